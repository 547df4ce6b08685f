"""Short training runs by kernels, beside the same runs in float64 on a CPU; and which kernels were launched."""

import copy

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import consequent
from consequent.gpu import launch

OPTIMIZERS = {"SGD": {"lr": 0.3, "momentum": 0.9}, "Adam": {"lr": 0.01}}
OWN, AVERAGES, AUTO = {"averaging": 0}, {"averaging": 0.9, "refresh": 2}, {"averaging": "auto", "refresh": 2}
MOMENTS = {"inverses_kernels", "moments_kernels", "multiply_kernels"}
CASES = [  # net, options, the kernels besides those of the bound, whether own inputs are bounded
    ("dense", OWN, {"samples_kernels"}, True),
    ("dense", AVERAGES, MOMENTS, False),
    ("dense", AUTO, {"samples_kernels", *MOMENTS}, True),
    ("convolutions", OWN, {"samples_kernels", *MOMENTS}, True),
    ("convolutions", AVERAGES, MOMENTS, False),
    ("convolutions", AUTO, {"samples_kernels", *MOMENTS}, True),
]


def name_of(case):
    return f"{case[0]}, averaging={case[1]['averaging']}"


def network(kind):
    torch.manual_seed(0)
    if kind == "dense":
        layers = [nn.Linear(40, 48), nn.ReLU(), nn.Linear(48, 32, bias=False), nn.Tanh(), nn.Linear(32, 10)]
    else:
        layers = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2, padding=1, bias=False)]
        layers += [nn.ReLU(), nn.Flatten(), nn.Linear(8 * 9, 10)]
    return nn.Sequential(*layers).double()


def batches(kind, steps):
    generator = torch.Generator().manual_seed(1)
    shape = (24, 40) if kind == "dense" else (20, 3, 6, 6)
    for _ in range(steps):
        x = torch.randn(*shape, generator=generator, dtype=torch.float64) + 0.5
        yield x, torch.randint(0, 10, shape[:1], generator=generator)


def as_trained(tensors, device):
    """In float32, channels last."""
    moved = tensors.to(device, torch.float32)
    return moved.to(memory_format=torch.channels_last) if isinstance(moved, nn.Module) or moved.ndim == 4 else moved


def distance(model, reference):
    """The largest of all parameters, relative to their length."""
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max(float((p.detach().cpu().double() - q.detach()).norm() / q.detach().norm()) for p, q in pairs)


def trained_apart(kind, optimizer, device, steps=3, **options):
    """How far a run in float32 on the device ends from one in float64 on the CPU, and how far that one has gone."""
    start = network(kind)
    plain, model = copy.deepcopy(start), as_trained(copy.deepcopy(start), device)
    runs = []
    for one in (plain, model):
        made = getattr(torch.optim, optimizer)(one.parameters(), **OPTIMIZERS[optimizer])
        runs.append((one, made, consequent.attach(made, one, **options)))
    for x, y in batches(kind, steps):
        for one, made, _ in runs:
            made.zero_grad()
            inputs, targets = (x, y) if one is plain else (as_trained(x, device), y.to(device))
            F.cross_entropy(one(inputs), targets).backward()
            made.step()
    assert [correction.failed for _, _, correction in runs] == [0, 0]
    return distance(model, plain), distance(start, plain)


def launched():
    """The files whose kernels were launched since the known ones were forgotten."""
    return {kernel.fn.__module__.split(".")[-1] for kernel, *_ in launch._compiled}


def check_run(monkeypatch, case, optimizer, device, tolerance):
    """The run ends where it does in float64, by these kernels."""
    kind, options, kernels, own = case
    monkeypatch.setattr(launch, "_compiled", {})
    error, way = trained_apart(kind, optimizer, device, **options)
    assert error < tolerance < 0.01 * way
    assert launched() == kernels | ({"shorten_kernels"} if own and optimizer == "SGD" else set())
