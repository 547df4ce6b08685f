"""The one added line: C-Nesterov from an ordinary training script, on scikit-learn's digits."""

import torch
from sklearn.datasets import load_digits
from torch import nn

import consequent

torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)

model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True)
correction = consequent.attach(optimizer, model)  # the one added line

for epoch in range(5):
    for batch in torch.randperm(len(images)).split(32):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(images), labels)
    print(f"epoch {epoch + 1}: training loss {loss:.4f}")

print(correction)  # which layers are corrected, and how
