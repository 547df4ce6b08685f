"""Dense layers with many rows, by recorded launches on a GPU: no number is another than without them."""

import copy

import pytest
import torch
from test_gpu import weights
from torch import nn

import consequent
from consequent.engines.gpu import recordings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

STEPS, ROWS = 14, 160


def perceptron():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(300, 200), nn.Tanh(), nn.Linear(200, 200, bias=False), nn.Tanh(), nn.Linear(200, 200), nn.Tanh(),
        nn.Linear(200, 10),
    ).cuda()  # fmt: skip


def batches(sizes=(ROWS,)):
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        rows = sizes[step % len(sizes)]
        yield (
            torch.randn(rows, 300, generator=generator).cuda(),
            torch.randint(0, 10, (rows,), generator=generator).cuda(),
        )


def backward(model, inputs, labels):
    nn.functional.cross_entropy(model(inputs), labels).backward()


def plainly(model, optimizer):
    for batch in batches():
        optimizer.zero_grad()
        backward(model, *batch)
        optimizer.step()


def with_a_schedule(model, optimizer):
    """The bound goes by the learning rate, and acts."""
    for step, batch in enumerate(batches()):
        optimizer.param_groups[0]["lr"] = 30.0 / (1 + step)
        optimizer.zero_grad()
        backward(model, *batch)
        optimizer.step()


def with_edits(model, optimizer):
    for step, batch in enumerate(batches()):
        optimizer.zero_grad()
        backward(model, *batch)
        if step in (6, 9):
            model[4].weight.grad[3] += 0.1
        if step == 8:
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()


def with_batches_of_two_sizes(model, optimizer):
    for batch in batches((ROWS, ROWS, ROWS + 20)):
        optimizer.zero_grad()
        backward(model, *batch)
        optimizer.step()


def with_gradients_that_stay(model, optimizer):
    for step, batch in enumerate(batches()):
        if step % 2 == 0:
            optimizer.zero_grad(set_to_none=step % 4 == 0)
        backward(model, *batch)
        if step % 2 == 1:
            optimizer.step()


def trained(start, loop, at):
    model = copy.deepcopy(start)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    correction = consequent.attach(optimizer, model, at=at)
    loop(model, optimizer)
    return weights(model), correction.counters


LOOPS = [plainly, with_a_schedule, with_edits, with_batches_of_two_sizes, with_gradients_that_stay]


@pytest.mark.usefixtures("bounded")
@pytest.mark.filterwarnings("ignore::consequent.ConsequentWarning")
@pytest.mark.parametrize("at", ["step", "backward"])
@pytest.mark.parametrize("loop", LOOPS)
def test_recordings_change_no_number(loop, at, monkeypatch):
    start = perceptron()
    replayed = []
    replay = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: (replayed.append(graph), replay(graph))[1])
    actual, counters = trained(start, loop, at)
    if loop is not with_gradients_that_stay or at == "backward":  # several uses are not for groups
        assert len(replayed) >= 4
    monkeypatch.setattr(recordings.Replays, "run", lambda self, piece, key, work: (work(), False))
    expected, expected_counters = trained(start, loop, at)
    assert (actual - expected).norm() <= 1e-4 * (expected - weights(start)).norm()
    assert counters == expected_counters
    if at == "step" and loop is with_a_schedule:
        assert counters.bounded > 0
    if at == "step" and loop is with_edits:
        assert counters.edited == 2


def test_gradients_that_somebody_keeps_are_not_overwritten():
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    correction = consequent.attach(optimizer, model, at="backward")
    kept, copies = [], []
    for batch in batches():
        model.zero_grad()
        backward(model, *batch)
        kept.append([parameter.grad for parameter in model.parameters()])
        copies.append([gradient.clone() for gradient in kept[-1]])
    correction.detach()
    assert all(torch.equal(*pair) for pairs in zip(kept, copies, strict=True) for pair in zip(*pairs, strict=True))
