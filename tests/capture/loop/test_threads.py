"""Other threads call the model, or train it as well."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from loop.expected import DAMPING, KINDS, LR, assert_close, build, corrected, gradients, loss_on, mean_loss
from torch import nn

import consequent


class Twice(nn.Module):
    """Calls a layer twice; ``between`` is called where the backward pass is between the two."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(5, 5), nn.Linear(5, 3)
        self.between = None

    def forward(self, x):
        hidden = torch.tanh(self.layer(x))
        if self.between is not None:
            hidden.register_hook(self.between)
        return self.head(torch.tanh(self.layer(hidden)))


def in_threads(*works):
    """All at once; raises what one of them raises."""
    errors = []

    def noting(work):
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=noting, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def attached(samples, at):
    """A corrected model that uses a weight twice, samples, targets, and the gradients that a step should have."""
    torch.manual_seed(0)
    model = Twice().double()
    x, t = torch.randn(samples, 5, dtype=torch.float64), torch.randn(samples, 3, dtype=torch.float64)
    wanted = corrected(model, loss_on(x, t), samples=samples)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    consequent.attach(optimizer, model, damping=DAMPING, at=at)
    return model, x, t, wanted, optimizer


@pytest.mark.parametrize("at", ["step", "backward"])
@pytest.mark.parametrize("builds_graph", [False, True], ids=["evaluates", "builds a graph"])
@pytest.mark.parametrize("samples", [3, 30])
def test_another_thread_calls_the_model_during_a_backward_pass(samples, builds_graph, at):
    model, x, t, wanted, optimizer = attached(samples, at)

    def call():
        with torch.set_grad_enabled(builds_graph):
            model(x[:2])

    def between(grad):
        model.between = None
        in_threads(call)

    model.between = between
    mean_loss(model(x), t).backward()
    assert model.between is None
    optimizer.step()
    assert_close(gradients(model), wanted)


@pytest.mark.parametrize("at", ["step", "backward"])
@pytest.mark.parametrize("kind", KINDS)
def test_two_threads_train_at_the_same_time(kind, at):
    model, x, t = build(kind)
    half = len(x) // 2
    losses = [loss_on(x[:half], t[:half]), loss_on(x[half:], t[half:])]
    if at == "step":
        wanted = corrected(model, *losses, samples=len(x))
    else:
        each = [corrected(model, loss, samples=n) for loss, n in zip(losses, (half, len(x) - half), strict=True)]
        wanted = {name: each[0][name] + each[1][name] for name in each[0]}
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    correction = consequent.attach(optimizer, model, damping=DAMPING, at=at)
    both_inside = threading.Barrier(2, timeout=20)
    activation = next(module for module in model.modules() if isinstance(module, nn.ReLU))

    def wait(*_):
        both_inside.wait()

    handle = activation.register_forward_hook(wait)

    def work(loss):
        value = loss(model)
        both_inside.wait()
        value.backward()

    in_threads(*[lambda loss=loss: work(loss) for loss in losses])
    handle.remove()
    optimizer.step()
    if at == "step":
        assert correction.samples == len(x)
    assert_close(gradients(model), wanted)


@pytest.mark.parametrize("at", ["step", "backward"])
@pytest.mark.parametrize("samples", [3, 30])
def test_the_model_is_called_while_another_thread_is_in_a_backward_pass_of_what_was_computed_here(samples, at):
    model, x, t, wanted, optimizer = attached(samples, at)
    is_between, was_called = threading.Event(), threading.Event()

    def between(grad):
        is_between.set()
        assert was_called.wait(20)

    model.between = between
    loss = mean_loss(model(x), t)
    model.between = None
    with ThreadPoolExecutor(1) as worker:
        backward = worker.submit(loss.backward)
        assert is_between.wait(20)
        with torch.no_grad():
            model(x[:2])
        was_called.set()
        backward.result()
    optimizer.step()
    assert_close(gradients(model), wanted)


@pytest.mark.parametrize("at", ["step", "backward"])
def test_a_backward_pass_that_raised_in_another_thread_leaves_nothing(at):
    """The thread lives on, and does nothing but backward passes."""
    model, x, t, wanted, optimizer = attached(7, at)

    def fail(grad):
        raise ValueError("on purpose")

    with ThreadPoolExecutor(1) as worker:
        model.between = fail
        loss = mean_loss(model(2 * x), t)
        with pytest.raises(ValueError, match="on purpose"):
            worker.submit(loss.backward).result()
        model.between = None
        optimizer.zero_grad()
        worker.submit(mean_loss(model(x), t).backward).result()
    optimizer.step()
    assert_close(gradients(model), wanted)
