"""`promise=` on several ranks: they take the step of one process with the mean of their losses."""

import re
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

import consequent
from ranks.test_ddp import share
from ranks.test_fsdp import shard

HIGH = 1e4  # a learning rate at which every step promises too much


def branches():
    torch.manual_seed(0)
    model = nn.Module()
    model.first = nn.Linear(5, 6)
    model.left, model.right = (  # the norms are not corrected, and promise as well
        nn.Sequential(nn.LayerNorm(6), nn.SiLU(), nn.Linear(6, 6), nn.SiLU(), nn.Linear(6, 3)) for _ in range(2)
    )
    return model.double()


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = branches()

    def forward(self, inputs, way):
        return (self.parts.left if way == 0 else self.parts.right)(self.parts.first(inputs))


def data():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, size, generator=generator, dtype=torch.float64) for size in (5, 3)]


def weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def attached(model, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=HIGH)
    return optimizer, consequent.attach(optimizer, model, **{"promise": 1.0, "bound": None} | options)


def on_a_rank(sizes, ways, micro_batches=1, clip=None):
    """The weights after two steps, and how many of these were shortened. Every rank takes a way through the model."""
    model, rank = Both(), dist.get_rank()
    ddp = DDP(model, find_unused_parameters=True)
    optimizer, correction = attached(ddp, loss_reduction=8.0)  # all ranks have a loss that is divided by 8 in all
    inputs, targets = (tensor.split(sizes)[rank] for tensor in data())
    for _ in range(2):
        optimizer.zero_grad()
        pieces = list(zip(inputs.chunk(micro_batches), targets.chunk(micro_batches), strict=True))
        for place, (x, t) in enumerate(pieces):
            with nullcontext() if place == len(pieces) - 1 else ddp.no_sync():
                (mse_loss(ddp(x, ways[rank]), t) / micro_batches).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return weights(model), correction.counters.promised


def on_a_rank_sharded(how, clip):
    model = plain()
    shard(model, how)
    optimizer, correction = attached(model, loss_reduction="mse")
    inputs, targets = (share(tensor) for tensor in data())
    for _ in range(2):
        optimizer.zero_grad()
        for place, (x, t) in enumerate(zip(inputs.chunk(2), targets.chunk(2), strict=True)):
            model.set_requires_gradient_sync(place == 1)
            (mse_loss(model(x), t) / 2).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return torch.cat([p.full_tensor().detach().flatten() for p in model.parameters()]), correction.counters.promised


def plain():
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Linear(5, 7), nn.SiLU(), nn.LayerNorm(7), nn.Linear(7, 6), nn.SiLU(), nn.Linear(6, 3))
    ).double()


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("how", ["as one", "layers", "hybrid"])
def test_sharded_weights(four, how, clip):
    """Three outputs for four ranks: one has no rows of the last layer."""
    model = plain()
    optimizer, correction = attached(model, loss_reduction="mse")
    inputs, targets = data()
    for _ in range(2):
        optimizer.zero_grad()
        mse_loss(model(inputs), targets).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    assert correction.counters.promised == 2
    for after, promised in four.run(on_a_rank_sharded, how, clip):
        assert promised == 2
        torch.testing.assert_close(after, weights(model), rtol=1e-6, atol=1e-8)


def in_one_process(sizes, ways, clip=None):
    model = Both()
    optimizer, correction = attached(model, loss_reduction=8.0)
    inputs, targets = (tensor.split(sizes) for tensor in data())
    for _ in range(2):
        optimizer.zero_grad()
        parts = [mse_loss(model(x, way), t) for x, t, way in zip(inputs, targets, ways, strict=True)]
        (sum(parts) / len(parts)).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    assert correction.counters.promised == 2
    return weights(model)


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize(
    ("sizes", "ways", "micro_batches"),
    [([4, 4], [0, 0], 1), ([6, 2], [0, 0], 1), ([4, 4], [0, 0], 2), ([4, 4], [0, 1], 1)],
    ids=["halves", "uneven", "micro-batches", "each a layer of its own"],
)
def test_as_one_process(two, sizes, ways, micro_batches, clip):
    found = two.run(on_a_rank, sizes, ways, micro_batches, clip)
    expected = in_one_process(sizes, ways, clip)
    for after, promised in found:
        assert promised == 2
        torch.testing.assert_close(after, expected, rtol=1e-6, atol=1e-8)
    assert torch.equal(found[0][0], found[1][0]), "replicas would drift apart"


def unseen_on_one():
    ddp = DDP(nn.Sequential(nn.Linear(5, 4), nn.SiLU(), nn.Linear(4, 3)).double())
    optimizer, _ = attached(ddp, loss_reduction="mse")
    inputs, targets = data()
    loss = mse_loss(ddp(inputs), targets)
    if dist.get_rank() == 1:
        torch.autograd.backward(torch.autograd.graph.get_gradient_edge(loss), torch.ones_like(loss))
    else:
        loss.backward()
    optimizer.step()


def negative():
    ddp = DDP(nn.Sequential(nn.Linear(5, 4), nn.SiLU(), nn.Linear(4, 3)).double())
    optimizer, _ = attached(ddp, loss_reduction="mse")
    inputs, targets = data()
    (mse_loss(ddp(inputs), targets) - 300.0 * dist.get_rank()).backward()
    optimizer.step()


def upwards_on_one():
    ddp = DDP(plain())
    optimizer, _ = attached(ddp, loss_reduction="mse")
    optimizer.param_groups[0]["maximize"] = dist.get_rank() == 1
    inputs, targets = data()
    mse_loss(ddp(inputs), targets).backward()
    optimizer.step()


EXCLUDED = {"exclude": ["parts.first", re.compile(".*left.*")], "loss_reduction": 8.0}


def plain_on_one():
    model = Both()
    ddp = DDP(model, find_unused_parameters=True)
    optimizer, correction = attached(ddp, **EXCLUDED)
    inputs, targets = data()
    mse_loss(ddp(inputs, dist.get_rank()), targets).backward()
    optimizer.step()
    return weights(model), correction.counters.promised


def test_a_rank_whose_pass_comes_to_no_layer_that_is_corrected(two):
    model = Both()
    optimizer, _ = attached(model, **EXCLUDED)
    inputs, targets = data()
    (sum(mse_loss(model(inputs, way), targets) for way in (0, 1)) / 2).backward()
    optimizer.step()
    for after, promised in two.run(plain_on_one):
        assert promised == 1
        torch.testing.assert_close(after, weights(model), rtol=1e-6, atol=1e-8)


def divided_otherwise():
    model = plain()
    shard(model, "as one")
    model.set_gradient_divide_factor(1.0)
    optimizer, _ = attached(model, loss_reduction="mse")
    inputs, targets = data()
    mse_loss(model(inputs), targets).backward()
    optimizer.step()


def by_hand():
    model = nn.Sequential(nn.Linear(5, 4), nn.SiLU(), nn.Linear(4, 3)).double()
    optimizer, _ = attached(model, loss_reduction="mse", process_group=dist.group.WORLD)
    inputs, targets = data()
    mse_loss(model(inputs), targets).backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (unseen_on_one, "cannot be kept on another rank; the error there says why|it was not seen"),
        (negative, "is for losses that are never below zero, and this one is -1"),
        (upwards_on_one, "cannot be kept on another rank; the error there says why|and that it goes down"),
        (divided_otherwise, r"set_gradient_divide_factor\(1\) was called"),
        (by_hand, "with process_group= they are averaged by hand"),
    ],
    ids=lambda case: getattr(case, "__name__", ""),
)
def test_an_error_comes_to_all_ranks(two, run, message):
    errors = two.errors(run)
    assert all(re.search(message, error) for error in errors), errors
