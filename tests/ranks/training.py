"""Small networks, ways to spread them over ranks, and what is compared."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

SAMPLES = 16
UNEQUAL = {2: [13, 3], 4: [1, 9, 2, 4]}

on_cpus = pytest.mark.skipif(torch.__version__ < "2.8", reason="fully_shard needs a GPU before torch 2.8")
SHARDED = [pytest.param(how, marks=on_cpus) for how in ("whole model", "layer by layer", "hybrid")]


def perceptron():
    """Its last layer has one row: all ranks but one hold an empty shard of it."""
    return nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 1)), (7,)


def convolutions():
    first, second = nn.Conv2d(2, 6, 3, padding=1), nn.Conv2d(6, 3, 2, bias=False)
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), nn.Flatten(), nn.Linear(27, 2)), (2, 4, 4)


def all_kinds():
    grouped, transposed = nn.Conv2d(6, 6, 2, groups=3), nn.ConvTranspose2d(6, 2, 2)
    layers = nn.Conv2d(2, 6, 3, padding=1), nn.Tanh(), grouped, nn.Tanh(), transposed, nn.Tanh()
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32, 2)), (2, 4, 4)


class Sometimes(nn.Module):
    """A layer that is called only for more than three samples."""

    def __init__(self):
        super().__init__()
        self.first, self.sometimes, self.last = nn.Linear(7, 5), nn.Linear(5, 5), nn.Linear(5, 2)

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        return self.last(torch.tanh(self.sometimes(hidden)) if len(x) > 3 else hidden)


def sometimes():
    return Sometimes(), (7,)


NETWORKS = {build.__name__: build for build in (perceptron, convolutions, all_kinds, sometimes)}


def made(network):
    """The model, in float64, and the shape of a sample."""
    torch.manual_seed(0)
    model, shape = NETWORKS[network]()
    return model.double(), shape


def batch(shape, step):
    """The inputs of a step, those of all ranks together."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(SAMPLES, *shape, generator=generator, dtype=torch.float64)


def losses(outputs):
    """Of each sample; the targets are all 1."""
    return 0.5 * (outputs - 1).square().sum(1)


def equal_shares(ranks):
    return [SAMPLES // ranks.size] * ranks.size


def spread(model, how):
    """The model as its ranks train it."""
    if how == "alone":
        return model
    if how == "ddp":
        return DistributedDataParallel(model, find_unused_parameters=isinstance(model, Sometimes))
    if how == "compiled ddp":
        return torch.compile(DistributedDataParallel(model), backend="aot_eager")
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    if how == "hybrid":
        mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("copies", "parts"))
    if how != "whole model":
        for child in model:
            if any(True for _ in child.parameters()):
                fully_shard(child, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def accumulating(wrapped, is_last):
    """The context of a micro-batch; gradients are averaged over ranks in the last one alone."""
    if isinstance(wrapped, DistributedDataParallel):
        return nullcontext() if is_last else wrapped.no_sync()
    if hasattr(wrapped, "set_requires_gradient_sync"):
        wrapped.set_requires_gradient_sync(is_last)
    return nullcontext()


def gradients(parameters):
    return [whole(p.grad) for p in parameters]


def whole(tensor):
    """A copy of a tensor, of which this rank may hold a shard."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def assert_close(actual, expected, tolerance=1e-9):
    for mine, theirs in zip(actual, expected, strict=True):
        assert (mine - theirs).norm() <= tolerance * theirs.norm()


def assert_all_ranks(results, expected, tolerance=1e-9):
    """All ranks have the same tensors, to the bit, and these are the expected ones."""
    assert_close(results[0], expected, tolerance)
    for others in results[1:]:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(others, results[0], strict=True))
