"""Recordings on a GPU: an eager program gets the numbers that it gets without them."""

import copy
import threading

import pytest
import torch
from test_gpu import weights
from torch import nn

import consequent
from consequent.engines.gpu import recordings as replay
from consequent.reports.counters import Counters
from consequent_lab.models import residual_net

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

STEPS = 12


def convolutions():
    torch.manual_seed(0)
    return residual_net((8, 16), 2, batch_norm=False).cuda()


def batches(sizes=(16,), side=12):
    """A new batch for each step, on the host."""
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        samples = sizes[step % len(sizes)]
        inputs = torch.randn(samples, 3, side, side, generator=generator)
        yield inputs, torch.randint(0, 10, (samples,), generator=generator)


def backward(model, inputs, labels):
    nn.functional.cross_entropy(model(inputs.cuda()), labels.cuda()).backward()


def take_step(model, optimizer, inputs, labels):
    optimizer.zero_grad()
    backward(model, inputs, labels)
    optimizer.step()


def plainly(model, optimizer):
    for batch in batches():
        take_step(model, optimizer, *batch)


def with_batches_of_two_sizes(model, optimizer):
    for batch in batches(sizes=(16, 16, 20)):
        take_step(model, optimizer, *batch)


def with_evaluations(model, optimizer):
    for batch in batches():
        take_step(model, optimizer, *batch)
        with torch.no_grad():
            model(torch.randn(37, 3, 12, 12, device="cuda"))


def with_steps_in_parts(model, optimizer):
    for step, (inputs, labels) in enumerate(batches()):
        optimizer.zero_grad()
        backward(model, inputs, labels)
        if step % 3 == 1:
            backward(model, inputs.flip(0), labels)
        elif step % 3 == 2:
            optimizer.zero_grad()  # changed one's mind
            backward(model, inputs.flip(1), labels)
        optimizer.step()


def with_other_damping(model, optimizer):
    for step, batch in enumerate(batches()):
        optimizer.correction.damping = 0.1 if step % 4 < 2 else 1.0
        take_step(model, optimizer, *batch)


def with_autocast(model, optimizer):
    for inputs, labels in batches():
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            outputs = model(inputs.cuda())
        nn.functional.cross_entropy(outputs.float(), labels.cuda()).backward()
        optimizer.step()


def trained(start, loop):
    model = copy.deepcopy(start)
    optimizer = consequent.CSGD(model, lr=0.05, momentum=0.9, nesterov=True, damping=0.1)
    loop(model, optimizer)
    return weights(model), optimizer


LOOPS = [
    plainly,
    with_batches_of_two_sizes,
    with_evaluations,
    with_steps_in_parts,
    with_other_damping,
    with_autocast,
]


@pytest.mark.parametrize("loop", LOOPS)
def test_recordings_change_no_number(loop, monkeypatch):
    start = convolutions()
    replayed = []
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", _counted(torch.cuda.CUDAGraph.replay, replayed))
    actual, optimizer = trained(start, loop)
    assert len(replayed) > 5
    assert optimizer.correction.counters == Counters(steps=STEPS)
    monkeypatch.setattr(replay.Replays, "run", lambda self, piece, key, work: (work(), False))
    expected, _ = trained(start, loop)
    assert (actual - expected).norm() <= 2e-3 * (expected - weights(start)).norm()  # the model's own sums vary


def _counted(function, calls):
    def counting(graph):
        calls.append(graph)
        return function(graph)

    return counting


def test_recordings_may_be_replayed_in_any_order():
    """They share memory; the results of one must outlive the replay of another."""
    replays = replay.Replays(replay.GraphRecorder(), 2**30)
    buffers = {name: torch.zeros(1000, device="cuda") for name in "abc"}

    def run(name):
        def work():
            parts = [buffers[name] + place for place in range(4)]  # gone when the work is done
            return (torch.stack(parts).sum(0),)

        return replays.run(name, 0, work)[0][0]

    aside = torch.cuda.Stream()
    with torch.cuda.stream(aside):
        for order in ("abc", "abc", "abc", "cba", "bca", "bac", "ab", "cba"):
            for name in order:
                buffers[name].normal_()
            results = {name: run(name) for name in order}
            for name in order:
                assert torch.allclose(results[name], 4 * buffers[name] + 6)


def test_nothing_waits_while_recording():
    model = convolutions()
    optimizer = consequent.CSGD(model, lr=0.05, damping=0.1)
    inputs, labels = (tensor.cuda() for tensor in next(batches()))
    for step in range(8):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        if step > 0:  # the first one looks at every layer
            torch.cuda.set_sync_debug_mode("error")
        try:
            loss.backward()
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_memory_stays_the_same():
    model = convolutions()
    optimizer = consequent.CSGD(model, lr=0.05, damping=0.1)
    used = []
    for _ in range(8):
        plainly(model, optimizer)
        optimizer.zero_grad()
        torch.cuda.synchronize()
        used.append(torch.cuda.memory_allocated())
    assert used[-1] <= used[2]


def test_other_threads_may_use_the_gpu_meanwhile():
    """As the thread of a DataLoader does that pins memory."""
    stop, failures = threading.Event(), []

    def copies():
        try:
            stream = torch.cuda.Stream(
                priority=-1
            )  # torch has few streams of each priority: one that nobody records on
            while not stop.is_set():
                pinned = torch.randn(1000).pin_memory()
                stream.synchronize()
                pinned.cuda(non_blocking=True).sum().item()
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=copies)
    thread.start()
    try:
        start = convolutions()
        actual, _ = trained(start, plainly)
    finally:
        stop.set()
        thread.join()
    assert not failures
    assert actual.isfinite().all()


def test_detaching_gives_the_memory_back():
    model = convolutions()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    plainly(model, optimizer)  # so that the libraries have their memory
    optimizer.zero_grad()
    before = torch.cuda.memory_allocated()
    correction = consequent.attach(optimizer, model, damping=0.1)
    plainly(model, optimizer)
    optimizer.zero_grad()
    correction.detach()
    assert torch.cuda.memory_allocated() <= before + 2**16
