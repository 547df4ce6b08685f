"""Hugging Face's Trainer: one line in ``create_optimizer``, for a small GPT-2 that learns a sentence by heart."""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import consequent

text = "the quick brown fox jumps over the lazy dog and runs away, " * 3
letters = sorted(set(text))
codes = torch.tensor([letters.index(letter) for letter in text])
LENGTH = 24  # of a window; the loss is a mean over all its letters but the first
data = [{"input_ids": window, "labels": window} for window in codes.unfold(0, LENGTH, 1)]


class ConsequentialistTrainer(Trainer):
    """An ordinary trainer."""

    def create_optimizer(self, *arguments: object) -> torch.optim.Optimizer:
        """C-AdamW."""
        optimizer = super().create_optimizer(*arguments)
        consequent.attach(optimizer, self.model, loss_reduction=lambda n: n * (LENGTH - 1))  # the one added line
        return optimizer


torch.manual_seed(0)
config = GPT2Config(
    vocab_size=len(letters), n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2, bos_token_id=None, eos_token_id=None
)
model = GPT2LMHeadModel(config)
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=60,
        per_device_train_batch_size=16,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = ConsequentialistTrainer(model=model, args=arguments, train_dataset=data)
    trainer.train()
with torch.no_grad():
    batch = codes.unfold(0, LENGTH, LENGTH).to(model.device)
    loss = model.eval()(input_ids=batch, labels=batch).loss
print(f"{trainer.state.global_step} steps: loss {loss:.4f}")
