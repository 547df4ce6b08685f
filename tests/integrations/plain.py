"""The plain loop that every trainer is compared with: the same data in the same order, one line added."""

import contextlib

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import consequent

BATCH, CLASSES, LR, DAMPING = 6, 3, 0.05, 0.02
SETTINGS = {
    "usual": {},
    "accumulated": {"accumulate": 2},
    "clipped": {"clip": 0.05},
    "bfloat16": {"bfloat16": True},
    "all": {"accumulate": 2, "clip": 0.05, "bfloat16": True},
}


def make_model():
    """Layers that are solved on the side of the features (the convolution) and of the samples (the last one)."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.LayerNorm(64), nn.Linear(64, CLASSES)
    )


def make_data(batches):
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(batches * BATCH, 1, 4, 4, generator=generator)
    return images, torch.randint(0, CLASSES, (len(images),), generator=generator)


def make_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)


def train(model, images, labels, *, accumulate=1, clip=None, bfloat16=False, optimizer=None):
    """Returns the correction. The divisor is the same for an incomplete accumulation at the end."""
    optimizer = make_optimizer(model) if optimizer is None else optimizer
    correction = consequent.attach(optimizer, model, damping=DAMPING)
    context = torch.autocast("cpu", torch.bfloat16) if bfloat16 else contextlib.nullcontext()
    batches = list(zip(images.split(BATCH), labels.split(BATCH), strict=True))
    for index, (x, t) in enumerate(batches):
        with context:
            loss = F.cross_entropy(model(x).float(), t)
        (loss / accumulate).backward()
        if (index + 1) % accumulate == 0 or index + 1 == len(batches):
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return correction


def check_equal(model, expected):
    """Bit for bit: the same operations in the same order."""
    theirs = expected.state_dict()
    assert {name: torch.equal(value, theirs[name]) for name, value in model.state_dict().items()} == dict.fromkeys(
        theirs, True
    )


def check_has_learned(model):
    for value, start in zip(model.state_dict().values(), make_model().state_dict().values(), strict=True):
        assert not torch.equal(value, start)
