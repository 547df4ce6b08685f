"""Graphs that are made otherwise: checkpointing, saved tensors, compilation, transforms, gradient penalties."""

import numpy as np
import pytest
import reference
import torch
from loop.expected import DAMPING, KINDS, assert_close, build, corrected, gradients, loss_on, mean_loss, observe, twin
from models.expected import half_squares, twin_of
from torch import nn
from torch.utils.checkpoint import checkpoint

import consequent
from at_backward.expected import check_joint, start


class Checkpointed(nn.Module):
    """Two segments that are recomputed, between two layers that are not."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.first, self.one, self.two, self.last = (nn.Linear(9, 9) for _ in range(4))
        self.use_reentrant = use_reentrant

    def segment(self, function, x):
        if self.use_reentrant is None:
            return function(x)
        return checkpoint(function, x, use_reentrant=self.use_reentrant)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        x = self.segment(lambda x: torch.tanh(self.one(x)), x)
        x = self.segment(lambda x: torch.tanh(self.two(x)), x)
        return self.last(x)


@pytest.mark.parametrize("batch", [3, 20])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(use_reentrant, batch):
    torch.manual_seed(0)
    model, x, t = Checkpointed(use_reentrant).double(), torch.randn(batch, 9).double(), torch.randn(batch, 9).double()
    plain = Checkpointed(None).double()
    plain.load_state_dict(model.state_dict())
    correction = consequent.Consequentialism(model, damping=DAMPING, at="backward")
    mean_loss(model(x), t).backward()
    assert_close(gradients(model), corrected(plain, loss_on(x, t), samples=batch))
    assert correction.samples == batch


class CheckpointedTwice(nn.Module):
    """One layer in two segments."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.first, self.layer = nn.Linear(9, 9), nn.Linear(9, 9)
        self.use_reentrant = use_reentrant

    def forward(self, x):
        x = torch.tanh(self.first(x))
        for _ in range(2):
            x = checkpoint(lambda x: torch.tanh(self.layer(x)), x, use_reentrant=self.use_reentrant)
        return x


def test_a_layer_in_two_segments_is_solved_once_without_reentrance():
    torch.manual_seed(0)
    model, x = CheckpointedTwice(False).double(), torch.randn(3, 9).double()
    check_joint(model, lambda m: half_squares(m(x)), 3)


def test_with_reentrance_every_segment_is_a_pass_of_its_own():
    """A reentrant checkpoint runs a backward pass inside of the pass: what it recomputes is solved by itself.

    So the uses of one weight in two segments are not solved together, but their corrections added up.
    """
    torch.manual_seed(0)
    model, x = CheckpointedTwice(True).double(), torch.randn(3, 9).double()
    plain = twin_of(model)
    consequent.Consequentialism(model, damping=DAMPING, at="backward")
    half_squares(model(x)).backward()
    h1 = torch.tanh(plain.first(x))
    z1 = plain.layer(h1)
    h2 = torch.tanh(z1)
    z2 = plain.layer(h2)
    d1, d2 = torch.autograd.grad(half_squares(torch.tanh(z2)), [z1, z2])
    matrix = sum(reference.corrected_matrices(plain.layer, h, d, DAMPING)[0] for h, d in ((h1, d1), (h2, d2)))
    (actual,) = reference.gradient_matrices(plain.layer, model.layer.weight.grad.numpy(), model.layer.bias.grad.numpy())
    np.testing.assert_allclose(actual, 3 * matrix, rtol=1e-9)


def test_reentrant_segments_are_counted_once_each():
    torch.manual_seed(0)
    model, x = Checkpointed(True).double(), torch.randn(3, 9).double()
    correction = consequent.Consequentialism(model, damping=DAMPING, at="backward")
    half_squares(model(x)).backward()
    assert correction.counters.steps == 3  # the pass itself, and the two inside of it


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_saved_elsewhere(kind):
    model, x, t, *_kept = start(kind)
    with torch.autograd.graph.save_on_cpu():
        loss = mean_loss(model(x), t)
    loss.backward()
    assert_close(gradients(model), corrected(model, loss_on(x, t), samples=len(x)))


@pytest.mark.parametrize("kind", KINDS)
def test_activations_in_place(kind):
    model, x, t = build(kind, inplace=True)
    consequent.Consequentialism(model, damping=DAMPING, at="backward")
    mean_loss(model(x), t).backward()
    assert_close(gradients(model), corrected(model, loss_on(x, t), samples=len(x)))


@pytest.fixture
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh_dynamo")
@pytest.mark.parametrize("when", ["before", "after", "after a call"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_models(backend, when):
    model, x, t = build("wide")
    plain_grads = torch.autograd.grad(mean_loss(model(x), t), [*model.parameters()])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    attach = lambda to: consequent.attach(optimizer, to, damping=DAMPING, at="backward")  # noqa: E731
    correction = attach(model) if when == "before" else None
    compiled = torch.compile(model, backend=backend)
    if when == "after a call":
        mean_loss(compiled(x), t).backward()
    if correction is None:
        correction = attach(compiled)
    expected = corrected(model, loss_on(x, t), samples=len(x))
    for _ in range(2):
        optimizer.zero_grad()
        mean_loss(compiled(x), t).backward()
        optimizer.step()
        assert_close(gradients(model), expected)
    correction.detach()
    optimizer.zero_grad()
    mean_loss(compiled(x), t).backward()
    assert_close(gradients(model), dict(zip(dict(model.named_parameters()), plain_grads, strict=True)))


@pytest.mark.usefixtures("_fresh_dynamo")
def test_a_compiled_backward_pass_of_a_step():
    """The loss is compiled along with the model: the layers are not."""
    model, x, t, *_kept, correction = start("conv")

    @torch.compile(backend="aot_eager")
    def loss_of(x, t):
        return mean_loss(model(x), t)

    for _ in range(2):
        model.zero_grad()
        loss_of(x, t).backward()
        assert_close(gradients(model), corrected(model, loss_on(x, t), samples=len(x)))
    assert correction.counters.steps == 2


def test_transforms_leave_layers_plain():
    model, x, t, optimizer, correction = start("wide")
    plain = twin(model)
    values = {name: p.detach() for name, p in model.named_parameters()}

    def loss_of(model, values, x, t):
        return mean_loss(torch.func.functional_call(model, values, (x,)), t)

    for net in (model, plain):
        net.zero_grad()
    found, expected = (torch.func.grad(lambda v, net=net: loss_of(net, v, x, t))(values) for net in (model, plain))
    assert_close(found, expected, 1e-12)
    per_sample = [
        torch.func.vmap(torch.func.grad(lambda v, a, b, net=net: loss_of(net, v, a[None], b[None])), (None, 0, 0))
        for net in (model, plain)
    ]
    assert_close(*(f(values, x, t) for f in per_sample), 1e-12)
    for mode in (torch.func.jacrev, torch.func.jacfwd):
        torch.testing.assert_close(*(mode(net)(x) for net in (model, plain)))
    torch.testing.assert_close(*(torch.func.jvp(net, (x,), (x,)) for net in (model, plain)))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        torch.testing.assert_close(
            *(torch.autograd.forward_ad.unpack_dual(net(dual)).tangent for net in (model, plain))
        )
    assert gradients(model) == {}
    assert correction.counters.steps == 0
    mean_loss(model(x), t).backward()
    assert_close(gradients(model), corrected(model, loss_on(x, t), samples=len(x)))
    optimizer.step()


def test_functional_calls_with_other_weights_are_plain():
    model, x, t, *_kept = start("wide")
    values = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    mean_loss(torch.func.functional_call(model, values, (x,)), t).backward()
    _, expected = observe(model, loss_on(x, t))
    assert_close({name: value.grad for name, value in values.items()}, expected)
    assert gradients(model) == {}


def test_a_gradient_penalty_is_what_the_step_makes_of_it():
    """The weight acts in ``Wᵀ ΔZ`` as well: that part is shortened and not solved for."""
    found = []
    for at in ("backward", "step"):
        model, x, _, optimizer, _ = start("wide", at)
        x.requires_grad_()
        (grad,) = torch.autograd.grad(torch.tanh(model(x)).sum(), x, create_graph=True)
        ((grad.norm(dim=1) - 1).square().mean() + mean_loss(model(x), torch.zeros(len(x), 3))).backward()
        optimizer.step()
        found.append(gradients(model))
    assert all(grad.isfinite().all() for grad in found[0].values())
    assert_close(*found, 1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_penalty_is_the_same_where_it_is_differentiated_again(kind):
    model, x, t, *_kept = start(kind)
    x.requires_grad_()
    parameters, found = [*model.parameters()], []
    for create_graph in (True, False):
        (grad,) = torch.autograd.grad(torch.tanh(model(x)).sum(), x, create_graph=True)
        loss = (grad.flatten(1).norm(dim=1) - 1).square().mean() + mean_loss(model(x), t)
        found.append(torch.autograd.grad(loss, parameters, create_graph=create_graph))
    for differentiable, plain in zip(*found, strict=True):
        torch.testing.assert_close(differentiable.detach(), plain, rtol=1e-7, atol=1e-10)
