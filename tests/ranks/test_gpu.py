"""Two ranks on one GPU: gloo takes tensors of a GPU, and NCCL would not let two ranks share one."""

import pytest
import torch
from loop.expected import DAMPING, assert_close, build, corrected, gradients, loss_on, mean_loss
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

import consequent
from ranks.sharing import shared
from ranks.test_ddp import SIZES, share

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def step(kind, samples):
    model, x, t = build(kind, batch=samples, dtype=torch.float32)
    ddp = DDP(model.cuda())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    correction = consequent.attach(optimizer, ddp, damping=DAMPING)
    x, t = share(x).cuda(), share(t).cuda()
    for _ in range(3):
        optimizer.zero_grad()
        mean_loss(ddp(x), t).backward()
        optimizer.step()
    assert (correction.counters.edited, correction.counters.skipped) == (0, 0)
    good = {name: grad.cpu() for name, grad in gradients(model).items()}
    optimizer.zero_grad()
    bad = float("nan") if torch.distributed.get_rank() == 1 else 1.0
    mean_loss(ddp(bad * x), t).backward()
    optimizer.step()
    assert not any(grad.any() for grad in gradients(model).values()), "a step with NaN is no step, on any rank"
    assert correction.counters.skipped == 1
    return good


@pytest.mark.parametrize(("kind", "samples"), SIZES)
def test_as_one_process(two, kind, samples):
    model, x, t = build(kind, batch=samples)
    expected = corrected(model, loss_on(x, t), samples=samples)
    for grads in two.run(step, kind, samples):
        assert_close(grads, expected, 2e-3)  # forward and backward pass may be in TF32


@pytest.mark.parametrize(("kind", "samples"), [("tall", 32), ("conv", 8)])
def test_factorisations_shared_out(two, kind, samples):
    model, x, t = build(kind, batch=samples)
    expected = corrected(model, loss_on(x, t), samples=samples)
    for grads, owners in two.run(shared, step, kind, samples):
        assert set(owners) == {0, 1}
        assert_close(grads, expected, 2e-3)
