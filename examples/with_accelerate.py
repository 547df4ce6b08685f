"""Accelerate: nothing but ``attach``, with gradient accumulation, bfloat16, clipping and a saved state."""

import tempfile

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import consequent

digits = load_digits()
images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)

torch.manual_seed(0)
accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision="bf16")
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(images, labels), batch_size=16)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
correction = consequent.attach(optimizer, model)  # the one added line, before or after prepare()
accelerator.register_for_checkpointing(correction)  # its settings and counters are saved with the rest


def train_an_epoch() -> torch.Tensor:
    for x, t in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(x).float(), t)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


with tempfile.TemporaryDirectory() as folder:
    for _ in range(3):
        train_an_epoch()
    accelerator.save_state(folder)
    uninterrupted = train_an_epoch()
    accelerator.load_state(folder)
    resumed = train_an_epoch()

with torch.no_grad():
    accuracy = (model(images.to(accelerator.device)).argmax(1).cpu() == labels).float().mean()
print(f"{correction.counters.steps} corrected steps, training accuracy {accuracy:.1%}")
print("resumed and uninterrupted training agree:", torch.equal(uninterrupted, resumed))
