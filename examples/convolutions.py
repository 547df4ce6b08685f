"""A convolutional network without BatchNorm; the last layer gets a tenth of the learning rate, as in the paper."""

import torch
from sklearn.datasets import load_digits
from torch import nn

import consequent

torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16 - 0.5
labels = torch.tensor(digits.target)

model = nn.Sequential(
    nn.Conv2d(1, 8, 3, padding=1),
    nn.ReLU(inplace=True),
    nn.Conv2d(8, 16, 3, stride=2, padding=1),
    nn.ReLU(inplace=True),
    nn.Flatten(),
    nn.Linear(16 * 4 * 4, 10),
)
*body, head = model
groups = [
    {"params": [p for layer in body for p in layer.parameters()]},
    {"params": head.parameters(), "lr": 0.01},
]
optimizer = consequent.CSGD(model, groups, lr=0.1, momentum=0.9, nesterov=True)

for epoch in range(3):
    for batch in torch.randperm(len(images)).split(64):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        accuracy = (model(images).argmax(1) == labels).float().mean()
    print(f"epoch {epoch + 1}: training accuracy {accuracy:.1%}")
