"""What is solved for together: all uses of a weight in one backward pass, and nothing of another pass."""

import numpy as np
import pytest
import reference
import torch
import torch.nn.functional as F  # noqa: N812
from loop.expected import (
    DAMPING,
    KINDS,
    LR,
    assert_close,
    assert_stepped,
    corrected,
    gradients,
    loss_on,
    mean_loss,
    twin,
    weights,
)
from models.expected import half_squares
from ranks.cases import Repeated, TwoBiases
from torch import nn

import consequent
from at_backward.expected import added, check_joint, start


@pytest.mark.parametrize("sizes", [[2, 2], [1, 3, 1]])
@pytest.mark.parametrize("kind", KINDS)
def test_micro_batches_add_up_their_own_corrections(kind, sizes):
    model, x, t, *_kept, correction = start(kind, batch=sum(sizes))
    pieces = list(zip(x.split(sizes), t.split(sizes), strict=True))
    parts = []
    for inputs, targets in pieces:
        (mean_loss(model(inputs), targets) / len(sizes)).backward()
        loss = loss_on(inputs, targets, 1 / len(sizes))
        parts.append(corrected(model, loss, samples=len(inputs)))
        assert correction.samples == len(inputs)
    assert_close(gradients(model), added(*parts))
    assert correction.counters.steps == len(sizes)
    together = corrected(model, *[loss_on(*p, 1 / len(sizes)) for p in pieces], samples=len(x))
    assert (gradients(model)["0.weight"] - together["0.weight"]).norm() > 1e-3 * together["0.weight"].norm()


def test_two_forward_passes_and_then_their_backward_passes():
    model, x, t, *_kept = start("wide", batch=8)
    losses = [mean_loss(model(x[i : i + 4]), t[i : i + 4]) for i in (0, 4)]
    parts = [corrected(model, loss_on(x[i : i + 4], t[i : i + 4]), samples=4) for i in (0, 4)]
    losses[1].backward()
    assert_close(gradients(model), parts[1])
    losses[0].backward()
    assert_close(gradients(model), added(*parts))


def test_zero_grad_forgets_a_pass_and_none_of_it_is_in_the_next():
    model, x, t, optimizer, _ = start("wide", batch=8)
    for set_to_none in (True, False):
        mean_loss(model(x[:5]), t[:5]).backward()
        optimizer.zero_grad(set_to_none)
        mean_loss(model(x[5:]), t[5:]).backward()
        assert_close(gradients(model), corrected(model, loss_on(x[5:], t[5:]), samples=3))
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", KINDS)
def test_real_and_fake_samples_are_solved_for_together(kind):
    """``D(real) + D(fake)`` in one pass: 2n rows, and N = n."""
    model, x, t, *_kept, correction = start(kind, batch=8)
    (mean_loss(model(x[:4]), t[:4]) + mean_loss(model(x[4:]), t[4:])).backward()
    expected = corrected(model, loss_on(x[:4], t[:4]), loss_on(x[4:], t[4:]), samples=4)
    assert_close(gradients(model), expected)
    assert (correction.samples, correction.counters.steps) == (4, 1)


@pytest.mark.parametrize("batch", [2, 12])
def test_a_layer_called_twice_is_solved_once(batch, solves):
    torch.manual_seed(0)
    model, x = Repeated().double(), torch.randn(batch, 6).double()
    check_joint(model, lambda m: half_squares(m(x)), batch)
    assert sorted(solves, key=id) == sorted([model.first, model.layer], key=id)


class Tied(nn.Module):
    """Several layers with one weight; some of them have a bias of their own."""

    def __init__(self, biases):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(7, 7, bias=bias) for bias in biases)
        for layer in self.layers:
            layer.weight = self.layers[0].weight

    def forward(self, x, count=None):
        for layer in self.layers[:count]:
            x = torch.tanh(layer(x))
        return x


@pytest.mark.parametrize("batch", [2, 20])
@pytest.mark.parametrize(
    "biases",
    [(False, False), (True, True), (True, False, True), (False, True)],
    ids=lambda b: "".join("-b"[i] for i in b),
)
def test_layers_with_one_weight_are_solved_together(biases, batch, solves):
    torch.manual_seed(0)
    model, x = Tied(biases).double(), torch.randn(batch, 7).double()
    check_joint(model, lambda m: half_squares(m(x)), batch)
    assert len(solves) == 1


@pytest.mark.parametrize("order", ["both", "reversed", "one"])
def test_a_bias_that_is_not_used_has_no_gradient(order):
    torch.manual_seed(0)
    model, x = TwoBiases().double(), torch.randn(3, 7).double()
    check_joint(model, lambda m: half_squares(m(x, order)), 3)
    assert (model.other.bias.grad is None) == (order == "one")


def test_a_bias_that_two_layers_share_with_their_weight():
    torch.manual_seed(0)
    model, x = Tied((True, True)).double(), torch.randn(3, 7).double()
    model.layers[1].bias = model.layers[0].bias
    check_joint(model, lambda m: half_squares(m(x)), 3)


def test_a_use_that_the_loss_does_not_depend_on():
    model, x, t, *_kept = start("wide", batch=8)
    model(x[:4])
    unused = model(x[4:])
    mean_loss(model(x[:4]), t[:4]).backward()
    assert_close(gradients(model), corrected(model, loss_on(x[:4], t[:4]), samples=4))
    assert unused.requires_grad


def test_a_layer_that_the_loss_does_not_depend_on_has_no_gradient():
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(5, 3), nn.Linear(5, 3)]).double()
    consequent.Consequentialism(model, damping=DAMPING, at="backward")
    x = torch.randn(4, 5).double()
    used, _ = [layer(x) for layer in model]
    half_squares(used).backward()
    assert (model[0].weight.grad is None, model[1].weight.grad is None) == (False, True)


def test_a_model_that_is_called_in_parts():
    model, x, t, *_kept, correction = start("wide")
    hidden = model[1](model[0](x))
    mean_loss(model[2:](hidden), t).backward()
    assert_close(gradients(model), corrected(model, loss_on(x, t), samples=len(x)))
    assert (correction.samples, correction.counters.steps) == (len(x), 1)


@pytest.mark.parametrize("sizes", [(8, 4), (4, 8)])
def test_several_roots_have_one_number_of_samples(sizes):
    """N is the same for all layers of a pass: the largest, whichever root the engine takes first."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)]).double()
    consequent.Consequentialism(model, damping=DAMPING, at="backward")
    xs = [torch.randn(size, 6).double() for size in sizes]
    grads = [torch.randn(size, 3).double() for size in sizes]
    torch.autograd.backward([layer(x) for layer, x in zip(model, xs, strict=True)], grads)
    for layer, x, grad in zip(model, xs, grads, strict=True):
        (expected,) = reference.corrected_matrices(layer, x, grad, DAMPING)
        (actual,) = reference.gradient_matrices(layer, layer.weight.grad.numpy(), layer.bias.grad.numpy())
        np.testing.assert_allclose(actual, 8 * expected, rtol=1e-10)


def test_a_generators_step_through_the_discriminator():
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 8)), nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 1))]
    generator, discriminator = (net.double() for net in nets)
    optimizers = [torch.optim.SGD(net.parameters(), lr=LR) for net in (generator, discriminator)]
    for optimizer, net in zip(optimizers, (generator, discriminator), strict=True):
        consequent.attach(optimizer, net, damping=DAMPING, at="backward")
    noise = torch.randn(4, 6).double()
    loss_of = lambda g, d: F.softplus(-d(g(noise))).mean()  # noqa: E731
    loss_of(generator, discriminator).backward()
    assert_close(
        {name: p.grad for name, p in generator.named_parameters()},
        corrected(generator, lambda g: loss_of(g, twin(discriminator)), samples=4),
    )
    with torch.no_grad():
        fake = generator(noise)
    discriminator.zero_grad()
    F.softplus(discriminator(fake)).mean().backward()
    expected = corrected(discriminator, lambda d: F.softplus(d(fake)).mean(), samples=4)
    assert_close(gradients(discriminator), expected)


def test_retained_graphs_give_the_gradient_again():
    model, x, t, *_kept, correction = start("wide")
    loss = mean_loss(model(x), t)
    once = corrected(model, loss_on(x, t), samples=len(x))
    loss.backward(retain_graph=True)
    assert_close(gradients(model), once)
    loss.backward()
    assert_close(gradients(model), added(once, once))
    assert (correction.counters.steps, correction.samples) == (2, len(x))


def test_two_losses_of_one_graph_are_two_passes():
    model, x, t, *_kept = start("wide")
    outputs = model(x)
    mean_loss(outputs, t).backward(retain_graph=True)
    outputs.square().mean().backward()
    other = corrected(model, lambda m: m(x).square().mean(), samples=len(x))
    assert_close(gradients(model), added(corrected(model, loss_on(x, t), samples=len(x)), other))


def test_a_forward_pass_between_the_passes_of_a_retained_graph():
    model, x, t, *_kept = start("wide")
    loss = mean_loss(model(x), t)
    loss.backward(retain_graph=True)
    mean_loss(model(x), t).backward()
    loss.backward()
    once = corrected(model, loss_on(x, t), samples=len(x))
    assert_close(gradients(model), added(once, once, once))


def test_sharpness_aware_minimisation():
    """The first pass gives the way up, by its consequentialist gradient; the second one gives the step."""
    model, x, t, optimizer, _ = start("wide")
    before = weights(model)
    mean_loss(model(x), t).backward()
    first = corrected(model, loss_on(x, t), samples=len(x))
    up = {name: 0.3 * p.grad / p.grad.norm() for name, p in model.named_parameters()}
    assert_close(up, {name: 0.3 * grad / grad.norm() for name, grad in first.items()})
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.add_(up[name])
    optimizer.zero_grad()
    expected = corrected(model, loss_on(x, t), samples=len(x))
    mean_loss(model(x), t).backward()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.sub_(up[name])
    optimizer.step()
    assert_stepped(model, before, expected)


def test_a_closure():
    model, x, t, optimizer, correction = start("wide")
    before = weights(model)

    def closure():
        optimizer.zero_grad()
        loss = mean_loss(model(x), t)
        loss.backward()
        return loss

    expected = corrected(model, loss_on(x, t), samples=len(x))
    loss = loss_on(x, t)(twin(model)).item()
    assert optimizer.step(closure).item() == pytest.approx(loss)
    assert_stepped(model, before, expected)
    assert correction.counters.steps == 1
