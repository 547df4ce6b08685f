"""Models and the ranks' batches: what one process makes of all of them is what every rank must come to."""

import torch
from loop.expected import mean_loss
from reference import damping_options
from torch import nn

import consequent

DAMPING = 0.1


class Repeated(nn.Module):
    """A layer that is called twice."""

    def __init__(self):
        super().__init__()
        self.first, self.layer = nn.Linear(6, 9), nn.Linear(9, 9)

    def forward(self, x):
        return self.layer(torch.tanh(self.layer(torch.tanh(self.first(x)))))


class TwoBiases(nn.Module):
    """A weight with two biases. A rank may use one of them only."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(7, 7), nn.Linear(7, 7)
        self.other.weight = self.one.weight

    def forward(self, x, order="both"):
        if order == "reversed":
            return self.one(torch.tanh(self.other(x)))
        return self.other(torch.tanh(self.one(x))) if order == "both" else self.one(x)


class Branches(nn.Module):
    """Layers that some batches do not use."""

    def __init__(self):
        super().__init__()
        self.body, self.sometimes, self.never = nn.Linear(8, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x, branch):
        hidden = torch.tanh(self.body(x))
        return self.sometimes(hidden) if branch else hidden


class Images(nn.Module):
    """Convolutions; images may have any size."""

    def __init__(self, channels, groups=1, stride=1):
        super().__init__()
        self.one = nn.Conv2d(channels, 2 * channels, 3, padding=1, groups=groups, stride=stride)
        self.two = nn.Conv2d(2 * channels, 4, 3, padding=1, bias=False)

    def forward(self, x):
        return self.two(torch.tanh(self.one(x))).mean((-2, -1))


class Frozen(nn.Module):
    """Only the bias of a layer is trained."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(5, 6), nn.Linear(6, 4)
        self.two.weight.requires_grad_(False)

    def forward(self, x):
        return self.two(torch.tanh(self.one(x)))


class Transposed(nn.Module):
    """GPT-2's layers, whose weight is [features, outputs]."""

    def __init__(self):
        super().__init__()
        from transformers.pytorch_utils import Conv1D

        self.one, self.two = Conv1D(9, 6), Conv1D(4, 9)

    def forward(self, x):
        return self.two(torch.tanh(self.one(x)))


def _images(*shapes):
    return lambda ranks: [(torch.randn(shapes[rank % len(shapes)]),) for rank in range(ranks)]


def _rows(features, samples=3):
    return lambda ranks: [(torch.randn(samples, features),) for _ in range(ranks)]


# model, the arguments of its call on each of so many ranks
CASES = {
    "called twice": (Repeated, _rows(6)),
    "called twice, many rows": (Repeated, _rows(6, 8)),
    "two biases": (TwoBiases, lambda ranks: [(torch.randn(2, 7), "both") for _ in range(ranks)]),
    "two biases, in another order": (
        TwoBiases,
        lambda ranks: [(torch.randn(6, 7), "reversed" if rank else "both") for rank in range(ranks)],
    ),
    "two biases, one rank has one": (
        TwoBiases,
        lambda ranks: [(torch.randn(2, 7), "one" if rank else "both") for rank in range(ranks)],
    ),
    "a layer unused on rank 0": (Branches, lambda ranks: [(torch.randn(2, 8), rank > 0) for rank in range(ranks)]),
    "a layer unused on rank 1": (Branches, lambda ranks: [(torch.randn(9, 8), rank != 1) for rank in range(ranks)]),
    "images": (lambda: Images(2), _images((3, 2, 12, 12))),
    "images of several sizes": (lambda: Images(2), _images((3, 2, 5, 4), (2, 2, 4, 6))),
    "images of several sizes, few rows": (lambda: Images(8), _images((1, 8, 2, 2), (2, 8, 1, 3))),
    "convolution in groups": (lambda: Images(6, groups=3), _images((2, 6, 4, 4))),
    "convolution in groups, many rows": (lambda: Images(6, groups=3), _images((2, 6, 16, 16))),
    "convolution in groups, few rows": (lambda: Images(6, groups=3), _images((1, 6, 2, 2))),
    "images that cost less than their moment": (lambda: Images(12), _images((2, 12, 8, 8))),
    "with strides": (lambda: Images(4, stride=2), _images((2, 4, 5, 5))),
    "only a bias": (Frozen, _rows(5)),
    "transposed weights": (Transposed, _rows(6)),
}


def build(name, ranks, dtype=torch.float64):
    """The model and, for each rank, the arguments of its call and the targets."""
    make, arguments = CASES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = make()
        calls = arguments(ranks)
        targets = [torch.randn_like(model(*call).detach()) for call in calls]
    calls = [tuple(a.to(dtype) if isinstance(a, torch.Tensor) else a for a in call) for call in calls]
    return model.to(dtype), calls, [target.to(dtype) for target in targets]


def by_one_process(name, ranks, damping=DAMPING):
    """What the optimiser gets in one process that goes through the batches of all ranks."""
    model, calls, targets = build(name, ranks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    correction = consequent.attach(optimizer, model, **damping_options(damping))
    for call, target in zip(calls, targets, strict=True):
        (mean_loss(model(*call), target) / ranks).backward()
    optimizer.step()
    assert correction.samples == sum(len(call[0]) for call in calls)
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
