"""A residual network without BatchNorm, by docs/recipes.md: start, decay, warm-up, cosine, crops, cutout, averages."""

import math

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import consequent


def start_near_shortcuts(last_layers, fraction=0.1):
    """Makes residual blocks, of which these are the last layers, begin nearly as their shortcuts."""
    with torch.no_grad():
        for layer in last_layers:
            layer.weight.mul_(fraction)


def groups_with_decay(model, decay, lr, momentum=0.0):
    """Parameter groups for SGD: at this learning rate a step takes the fraction ``decay`` of each weight."""
    weights = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    weight_decay = decay * (1 - momentum) / lr
    return [{"params": weights, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def warmed_up_cosine(optimizer, steps, warmup):
    """A rise in ``warmup`` steps, then half a cosine down to zero; call its ``step()`` after the optimiser's."""

    def factor(step):
        return min((step + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * step / steps))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def augmented(images, padding=4, flips=True):
    """Each image, ``[N, C, H, W]``, moved by up to ``padding`` pixels and perhaps flipped; zeros come in at borders."""
    N, C, H, W = images.shape
    device = images.device
    padded = nn.functional.pad(images, [padding] * 4)
    rows = torch.arange(H, device=device) + torch.randint(2 * padding + 1, (N, 1), device=device)
    columns = torch.arange(W, device=device) + torch.randint(2 * padding + 1, (N, 1), device=device)
    if flips:
        columns = torch.where(torch.rand(N, 1, device=device) < 0.5, columns.flip(1), columns)
    image, channel = torch.arange(N, device=device), torch.arange(C, device=device)
    return padded[image.view(-1, 1, 1, 1), channel.view(1, -1, 1, 1), rows[:, None, :, None], columns[:, None, None, :]]


def covered(images, side=8):
    """Each image, ``[N, C, H, W]``, with a square of zeros somewhere in it."""
    N, _, H, W = images.shape
    device = images.device
    top = torch.randint(H - side + 1, (N, 1), device=device)
    left = torch.randint(W - side + 1, (N, 1), device=device)
    rows, columns = torch.arange(H, device=device) - top, torch.arange(W, device=device) - left
    inside = ((rows >= 0) & (rows < side))[:, None, :, None] & ((columns >= 0) & (columns < side))[:, None, None, :]
    return images.masked_fill(inside, 0)


class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU(), nn.Conv2d(channels, channels, 3, padding=1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the same shape."""
        return torch.relu(x + self.inner(x))


torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
digits = load_digits()
everything = torch.tensor(digits.images, dtype=torch.float32, device=device).unsqueeze(1) / 16
targets = torch.tensor(digits.target, device=device)
is_test = torch.rand(len(targets), generator=torch.Generator().manual_seed(0)).to(device) < 0.25
images, labels = everything[~is_test], targets[~is_test]
epochs, batch_size, lr, momentum = 8, 64, 0.1, 0.9
steps = epochs * math.ceil(len(images) / batch_size)

model = nn.Sequential(
    nn.Conv2d(1, 12, 3, padding=1),
    nn.ReLU(),
    Block(12),
    nn.Conv2d(12, 24, 3, stride=2, padding=1),
    nn.ReLU(),
    Block(24),
    nn.AdaptiveAvgPool2d(2),
    nn.Flatten(),
    nn.Linear(96, 10),
).to(device)
start_near_shortcuts(block.inner[-1] for block in model if isinstance(block, Block))
groups = groups_with_decay(model, 1e-3, lr, momentum)
optimizer = torch.optim.SGD(groups, lr=lr, momentum=momentum, nesterov=True)
consequent.attach(optimizer, model)
scheduler = warmed_up_cosine(optimizer, steps, warmup=steps // 20)
averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95))  # for some 200 steps

for epoch in range(epochs):
    for batch in torch.randperm(len(images), device=device).split(batch_size):
        optimizer.zero_grad()
        inputs = covered(augmented(images[batch], padding=1, flips=False), side=2)
        loss = nn.functional.cross_entropy(model(inputs), labels[batch])
        loss.backward()
        optimizer.step()
        scheduler.step()
        averaged.update_parameters(model)
    with torch.no_grad():
        accuracies = [(m(everything[is_test]).argmax(1) == targets[is_test]).float().mean() for m in (model, averaged)]
    print(f"epoch {epoch + 1}: test accuracy {accuracies[0]:.1%}, of the averaged weights {accuracies[1]:.1%}")
