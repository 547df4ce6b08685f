"""SOAP of the package pytorch_optimizer (``pip install pytorch-optimizer``), fed with consequentialist gradients.

SOAP begins with a step that changes no weight: it only looks at the gradient.
"""

import torch
from pytorch_optimizer import SOAP
from sklearn.datasets import load_digits
from torch import nn

import consequent

torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = SOAP(model.parameters(), lr=1e-2)
consequent.attach(optimizer, model)

for epoch in range(5):
    for batch in torch.randperm(len(images)).split(64):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(images), labels)
    print(f"epoch {epoch + 1}: training loss {loss:.4f}")
