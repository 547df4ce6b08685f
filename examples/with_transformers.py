"""Hugging Face's Trainer: one callback makes its AdamW C-AdamW, for a small GPT-2 that learns a sentence by heart.

With gradient accumulation, bfloat16, clipping (the Trainer's default) and a checkpoint that training resumes from.
(``Trainer(optimizers=(consequent.CAdamW(model, lr=…), None))`` does the same without a callback.)
"""

import tempfile
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from consequent.integrations.transformers import ConsequentialismCallback

text = "the quick brown fox jumps over the lazy dog and runs away, " * 3
letters = sorted(set(text))
codes = torch.tensor([letters.index(letter) for letter in text])
data = [{"input_ids": window, "labels": window} for window in codes.unfold(0, 24, 1)]


def train(steps: int, folder: str, checkpoint: Path | None = None) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(letters), n_positions=24, n_embd=32, n_layer=2, n_head=2, bos_token_id=None, eos_token_id=None
    )
    model, callback = GPT2LMHeadModel(config), ConsequentialismCallback()  # the one added line
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        save_steps=steps,
        logging_steps=steps,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=[callback])
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    with torch.no_grad():
        batch = codes.unfold(0, 24, 24).to(model.device)
        loss = model.eval()(input_ids=batch, labels=batch).loss
    print(f"{trainer.state.global_step} steps: loss {loss:.4f}, {len(callback.correction.corrected)} layers corrected")
    return model


with tempfile.TemporaryDirectory() as folder:
    train(30, folder)
    resumed = train(60, folder, Path(folder, "checkpoint-30"))
    whole = train(60, folder)
pairs = zip(whole.parameters(), resumed.parameters(), strict=True)
print("resumed and uninterrupted training agree:", all(torch.equal(a, b) for a, b in pairs))
