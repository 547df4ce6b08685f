"""Nothing is kept for longer than the graph, also where a pass raised."""

import gc
import weakref

import pytest
import torch
from loop.expected import DAMPING, KINDS, LR, assert_close, build, corrected, gradients, loss_on, mean_loss
from models.expected import check_same_grads, expected_backward, half_squares, twin_of
from ranks.cases import Repeated
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import consequent
from at_backward.expected import start
from consequent import NonFiniteError


def tensors_alive():
    gc.collect()
    return sum(type(thing) in (torch.Tensor, nn.Parameter) for thing in gc.get_objects())


@pytest.mark.parametrize("with_backward", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_activations_go_with_the_graph(kind, with_backward):
    """Nothing of ours keeps the graph, or the memory that it saved: not even until the garbage is collected."""
    model, x, t, *_kept = start(kind)
    seen = []
    model[2].register_forward_pre_hook(lambda _, args: seen.append(StorageWeakRef(args[0].untyped_storage())))
    gc.disable()
    try:
        outputs = model(x)
        loss = mean_loss(outputs, t)
        node = weakref.ref(outputs.grad_fn)
        assert not seen[0].expired()  # the graph saved it
        if with_backward:
            loss.backward()
            assert seen[0].expired()  # although the graph is still there
        assert node() is not None
        del outputs, loss
        assert (seen[0].expired(), node()) == (True, None)
    finally:
        gc.enable()


def passed(loss):
    """Whether the backward pass did not raise; nothing of an error is kept, which would keep the graph."""
    try:
        loss.backward()
    except NonFiniteError:
        return False
    return True


@pytest.mark.parametrize("how", ["nothing", "inputs", "backward", "raises"])
def test_memory_does_not_grow(how):
    model, x, t, optimizer, correction = start("wide", check=True)
    x.requires_grad_()
    counts = []
    for iteration in range(50):
        loss = mean_loss(model(x), t) * (torch.nan if how == "raises" else 1)
        if how == "inputs":
            torch.autograd.grad(loss, x)
        elif how != "nothing":
            assert passed(loss) == (how == "backward")
        del loss
        if how == "backward":
            optimizer.step()
        optimizer.zero_grad()
        x.grad = None
        if iteration % 24 == 1:
            counts.append(tensors_alive())
    assert len(set(counts)) == 1, counts
    # an engine that was stopped keeps what it had still to do, and with it the graph, until it runs again
    assert len(correction._capture.listener._open) <= (2 if how == "raises" else 1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_that_raised_is_forgotten_by_the_next(kind):
    model, x, t, *_kept = start(kind, check=True)
    seen = []
    model[2].register_forward_pre_hook(lambda _, args: seen.append(StorageWeakRef(args[0].untyped_storage())))
    assert not passed(mean_loss(model(x), t) * torch.nan)
    assert passed(mean_loss(model(x), t))
    gc.collect()
    assert [ref.expired() for ref in seen] == [True, True]


def test_a_pass_that_raised_is_no_part_of_the_next():
    """It stops between the two uses of a layer: only one of them was reached."""
    torch.manual_seed(0)
    model, x = Repeated().double(), torch.randn(3, 6).double()
    plain = twin_of(model)
    consequent.Consequentialism(model, damping=DAMPING, at="backward")

    def stop(_):
        raise KeyboardInterrupt

    hidden = torch.tanh(model.layer(torch.tanh(model.first(x))))
    hidden.register_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        half_squares(model.layer(hidden)).backward()
    assert all(p.grad is None for p in model.first.parameters())
    model.zero_grad()
    half_squares(model(x)).backward()
    expected_backward(plain, lambda m: half_squares(m(x)), 3, DAMPING)
    check_same_grads(model, plain)


@pytest.mark.parametrize("with_backward", [False, True])
@pytest.mark.parametrize("attached", [False, True])
def test_the_correction_goes_with_the_model(attached, with_backward):
    """Also if a forward pass came last: a gate and its node, which is in C++, refer to each other."""
    model, x, t = build("wide")
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    correction = consequent.Consequentialism(model, damping=DAMPING, at="backward")
    if attached:
        correction.attach(optimizer)
    loss = mean_loss(model(x), t)
    if with_backward:
        loss.backward()
    kept = [weakref.ref(thing) for thing in (model, optimizer, correction, loss)]
    del model, optimizer, correction, loss
    gc.collect()
    assert [ref() for ref in kept] == [None] * 4


def test_more_forward_passes_than_are_remembered():
    model, x, t, *_kept, correction = start("tall", batch=300)
    sum(mean_loss(model(x[i : i + 1]), t[i : i + 1]) for i in range(300)).backward()
    expected = corrected(model, *[loss_on(x[i : i + 1], t[i : i + 1]) for i in range(300)], samples=1)
    assert_close(gradients(model), expected, 1e-8)
    assert correction.samples == 1
