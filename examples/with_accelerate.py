"""Accelerate: one line after ``prepare``."""

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import consequent

digits = load_digits()
images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)

torch.manual_seed(0)
accelerator = Accelerator(mixed_precision="bf16")
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(images, labels), batch_size=32, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
consequent.attach(optimizer, model)  # the one added line

for epoch in range(3):
    for x, t in loader:
        optimizer.zero_grad()
        accelerator.backward(nn.functional.cross_entropy(model(x).float(), t))
        optimizer.step()
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(images.to(accelerator.device)).cpu().float(), labels)
    print(f"epoch {epoch + 1}: training loss {loss:.4f}")
