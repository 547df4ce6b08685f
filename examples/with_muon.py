"""Muon for the matrices between, AdamW for all else: both attached at once."""

import torch
from sklearn.datasets import load_digits
from torch import nn

import consequent

torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
matrices = [model[2].weight]  # not the first layer, not the head
rest = [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]
muon = torch.optim.Muon(matrices, lr=0.02, weight_decay=0.01)
adamw = torch.optim.AdamW(rest, lr=1e-2)
correction = consequent.attach([muon, adamw], model, relative_damping=0.1)

for epoch in range(5):
    for batch in torch.randperm(len(images)).split(128):
        model.zero_grad()
        loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
        loss.backward()
        muon.step()
        adamw.step()
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(images), labels)
    print(f"epoch {epoch + 1}: training loss {loss:.4f}")

print(correction)
