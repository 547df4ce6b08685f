"""Averaged moments over ranks: those of one process with all samples, also in the steps that do not refresh them."""

import pytest
import torch
import torch.distributed as dist
from loop.expected import assert_close, build, mean_loss
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

import consequent
from ranks.test_ddp import share
from ranks.test_fsdp import shard


def trained(kind, wrapper, options):
    """The parameters after several steps, each with another batch, of which a rank has its share."""
    model, x, t = build(kind, batch=16, dtype=torch.float64)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    wrapped = model
    if ranks > 1 and wrapper == "ddp":
        wrapped = DDP(model)
    elif ranks > 1:
        shard(model, "by layers")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    correction = consequent.attach(optimizer, wrapped, **options)
    for number in range(7):
        inputs, targets = x.roll(number, 0) * (1 + 0.3 * number), t
        if ranks > 1:
            inputs, targets = share(inputs), share(targets)
        optimizer.zero_grad()
        mean_loss(wrapped(inputs), targets).backward()
        optimizer.step()
    assert (correction.counters.edited, correction.counters.skipped) == (0, 0)
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in model.named_parameters()
    }


@pytest.mark.parametrize("options", [{"averaging": 0.8}, {"averaging": 0.5, "refresh": 3}, {"refresh": 2}], ids=str)
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
@pytest.mark.parametrize("kind", ["tall", "conv", "wide"])
def test_as_one_process(two, kind, wrapper, options):
    expected = trained(kind, wrapper, options)
    for found in two.run(trained, kind, wrapper, options):
        assert_close(found, expected, 1e-9)


def disagreeing():
    model, x, t = build("tall", batch=8)
    ddp = DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    consequent.attach(optimizer, ddp, refresh=2 + dist.get_rank())
    mean_loss(ddp(share(x)), share(t)).backward()
    with pytest.raises(RuntimeError, match=r"the ranks disagree.*refresh"):
        optimizer.step()


def test_ranks_that_refresh_at_different_steps_are_told(two):
    two.run(disagreeing)
