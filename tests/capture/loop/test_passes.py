"""Several forward and backward passes, of which the captures must follow what is in ``.grad``."""

import math

import pytest
import torch
from loop.expected import (
    DAMPING,
    KINDS,
    LR,
    assert_close,
    assert_same,
    assert_stepped,
    build,
    corrected,
    gradients,
    loss_on,
    mean_loss,
    observe,
    start,
    weights,
)
from torch import nn

import consequent

TO_NONE = pytest.mark.parametrize("set_to_none", [True, False])


def clean_iteration(kind, model, optimizer, seed=3, set_to_none=True, x=None, t=None):
    """An ordinary iteration gives what it must: nothing leaked in from before."""
    if x is None:
        x, t = build(kind, seed=seed)[1:]
    optimizer.zero_grad(set_to_none=set_to_none)
    loss_on(x, t)(model).backward()
    before, grads = weights(model), corrected(model, loss_on(x, t), samples=len(x))
    optimizer.step()
    assert_stepped(model, before, grads)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize("interleaved", [True, False])
def test_two_forward_passes_before_one_step(kind, backwards, interleaved):
    model, x, t, optimizer, _ = start(kind)
    other = build(kind, batch=len(x) + 2, seed=5)[1:]
    for _ in range(2):
        optimizer.zero_grad()
        losses = [loss_on(x, t), loss_on(*other, weight=0.3)]
        if interleaved and backwards == 2:
            for loss_of in losses:
                loss_of(model).backward()
        else:
            values = [loss_of(model) for loss_of in losses]
            if backwards == 1:
                sum(values).backward()
            else:
                for value in reversed(values):
                    value.backward()
        before = weights(model)
        # Two micro-batches add up; batches in one loss count once, as the larger of them.
        samples = len(other[0]) if backwards == 1 else len(x) + len(other[0])
        grads = corrected(model, *losses, samples=samples)
        optimizer.step()
        assert_stepped(model, before, grads)


@pytest.mark.parametrize("kind", KINDS)
def test_a_forward_pass_that_was_given_up_does_not_count(kind):
    model, x, t, optimizer, _ = start(kind)
    kept = loss_on(*build(kind, batch=23, seed=5)[1:])(model)
    loss_on(x, t)(model).backward()
    before, grads = weights(model), corrected(model, loss_on(x, t), samples=len(x))
    optimizer.step()
    assert kept.requires_grad
    assert_stepped(model, before, grads)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("single", [True, False])
def test_retain_graph(kind, single):
    """Two losses on one forward pass: inputs count once and N once."""
    model, x, t, optimizer, _ = start(kind)

    def loss1(output):
        return mean_loss(output, t)

    def loss2(output):
        return 0.3 * (output**4).sum() / len(x)

    def both(m):
        output = m(x)
        return loss1(output) + loss2(output)

    for _ in range(2):
        optimizer.zero_grad()
        output = model(x)
        if single:
            (loss1(output) + loss2(output)).backward()
        else:
            loss1(output).backward(retain_graph=True)
            loss2(output).backward()
        before, grads = weights(model), corrected(model, both, samples=len(x))
        optimizer.step()
        assert_stepped(model, before, grads)


@pytest.mark.parametrize("kind", KINDS)
@TO_NONE
def test_retained_graph_run_again_after_zero_grad(kind, set_to_none):
    model, x, t, optimizer, _ = start(kind)
    loss = loss_on(x, t)(model)
    loss.backward(retain_graph=True)
    optimizer.zero_grad(set_to_none=set_to_none)
    loss.backward()
    before, grads = weights(model), corrected(model, loss_on(x, t), samples=len(x))
    optimizer.step()
    assert_stepped(model, before, grads)


@pytest.mark.parametrize("kind", KINDS)
def test_retain_graph_with_another_forward_pass_between(kind):
    model, x, t, optimizer, _ = start(kind)
    other = build(kind, seed=8)[1:]
    loss = loss_on(x, t)(model)
    loss.backward(retain_graph=True)
    loss_on(*other)(model).backward()
    loss.backward()
    before = weights(model)
    grads = corrected(model, loss_on(x, t, weight=2), loss_on(*other), samples=2 * len(x))
    optimizer.step()
    assert_stepped(model, before, grads)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", ["weights", "biases", "first layer", "last layer"])
def test_backward_of_some_inputs(kind, part):
    model, x, t, optimizer, _ = start(kind)
    names = [name for name, _ in model.named_parameters()]
    only = {
        "weights": [n for n in names if n.endswith("weight")],
        "biases": [n for n in names if n.endswith("bias")],
        "first layer": names[:2],
        "last layer": names[-2:],
    }[part]
    parameters = dict(model.named_parameters())
    loss_on(x, t)(model).backward(inputs=[parameters[n] for n in only])
    before, grads = weights(model), corrected(model, loss_on(x, t), samples=len(x), only=only)
    optimizer.step()
    assert_stepped(model, before, grads)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["autograd.grad", "backward and zero_grad", "backward(inputs=[x])"])
@TO_NONE
def test_adversarial_inputs(kind, how, set_to_none):
    model, x, t, optimizer, _ = start(kind)
    for _ in range(2):
        optimizer.zero_grad(set_to_none=set_to_none)
        leaf = x.clone().requires_grad_()
        loss = mean_loss(model(leaf), t)
        if how == "autograd.grad":
            (direction,) = torch.autograd.grad(loss, leaf)
        elif how == "backward(inputs=[x])":
            loss.backward(inputs=[leaf])
            direction = leaf.grad
        else:
            loss.backward()
            direction = leaf.grad
            optimizer.zero_grad(set_to_none=set_to_none)
        attacked = (leaf + 0.1 * direction.sign()).detach()
        loss_on(attacked, t)(model).backward()
        before, grads = weights(model), corrected(model, loss_on(attacked, t), samples=len(x))
        optimizer.step()
        assert_stepped(model, before, grads)


@pytest.mark.parametrize("kind", KINDS)
def test_adversarial_inputs_on_the_graph_that_is_trained(kind):
    """autograd.grad with retain_graph on the very forward pass that is then trained: that pass counts once."""
    model, x, t, optimizer, _ = start(kind)
    leaf = x.clone().requires_grad_()
    loss = mean_loss(model(leaf), t)
    torch.autograd.grad(loss, leaf, retain_graph=True)
    torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    loss.backward()
    before, grads = weights(model), corrected(model, loss_on(x, t), samples=len(x))
    optimizer.step()
    assert_stepped(model, before, grads)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("asked", ["inputs", "parameters"])
def test_autograd_grad_between_the_backward_pass_and_the_step(kind, asked):
    """It leaves .grad alone, so it must not count."""
    model, x, t, optimizer, _ = start(kind)
    loss_on(x, t)(model).backward()
    leaf = (3 * x).requires_grad_()
    torch.autograd.grad(mean_loss(model(leaf), t), leaf if asked == "inputs" else list(model.parameters()))
    before, grads = weights(model), corrected(model, loss_on(x, t), samples=len(x))
    optimizer.step()
    assert_stepped(model, before, grads)


def overlap_of(layer):
    """From how many positions of a convolution's window a pixel is met, at most."""
    if isinstance(layer, nn.Linear):
        return 1
    return math.prod(math.ceil(k / s) for k, s in zip(layer.kernel_size, layer.stride, strict=True))


def corrected_with_slopes(model, loss_of, first_pass, samples):
    """``N · (U + T / (trace(XᵀX) + τ + λ))``: T is the part of the weight's gradient that comes from its action in Wᵀδ.

    τ = Σ‖δ‖² bounds that action, δ being the output gradients of the first pass. X has its column of ones.
    """
    rows, gradients = observe(model, loss_of)
    slopes, _ = observe(model, first_pass)
    grads = corrected(model, loss_of, samples=samples)
    layers = dict(model.named_modules())
    for name, (X, dZ) in rows.items():
        weight = gradients[f"{name}.weight"]
        transposed = weight - torch.from_numpy(dZ.T @ X).reshape(weight.shape)
        assert transposed.norm() > 1e-3 * weight.norm()  # otherwise there is nothing to see
        tau = overlap_of(layers[name]) * (slopes[name][1] ** 2).sum()
        grads[f"{name}.weight"] = grads[f"{name}.weight"] + samples * transposed / (
            (X**2).sum() + len(X) + tau + DAMPING
        )
    return grads


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at", ["step", "backward"])
def test_gradient_penalty_with_create_graph(kind, at):
    """A weight then acts in Wᵀδ as well: what comes from there is shortened until it cannot overshoot."""
    model, x, t = build(kind)
    for place, module in enumerate(model):
        if isinstance(module, nn.ReLU):
            model[place] = nn.Tanh()  # has a second derivative
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    correction = consequent.attach(optimizer, model, damping=DAMPING, at=at)

    def loss_of(m):
        leaf = x.clone().requires_grad_()
        loss = mean_loss(m(leaf), t)
        (slope,) = torch.autograd.grad(loss, leaf, create_graph=True)
        return loss + 3.0 * slope.square().sum()

    for _ in range(2):
        optimizer.zero_grad()
        before, grads = weights(model), corrected_with_slopes(model, loss_of, loss_on(x, t), samples=len(x))
        loss_of(model).backward()
        if at == "step":
            assert_close(gradients(model), observe(model, loss_of)[1])
        optimizer.step()
        assert_stepped(model, before, grads, tolerance=1e-8)
    assert correction.counters.edited == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("zeroing", ["set_to_none", "zeros", "p.grad = None", "p.grad.zero_()"])
def test_sharpness_aware_minimisation(kind, zeroing):
    """SAM: the gradient at the perturbed weights, with that pass's inputs, is applied to the old weights."""
    model, x, t, optimizer, _ = start(kind)

    def zero():
        for p in model.parameters():
            if zeroing == "p.grad = None":
                p.grad = None
            elif zeroing == "p.grad.zero_()" and p.grad is not None:
                p.grad.zero_()
        if zeroing in ("set_to_none", "zeros"):
            optimizer.zero_grad(set_to_none=zeroing == "set_to_none")

    for _ in range(2):
        zero()
        loss_on(x, t)(model).backward()
        old = weights(model)
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
            for p in model.parameters():
                p += 0.3 * p.grad / norm
        zero()
        loss_on(x, t)(model).backward()
        grads = corrected(model, loss_on(x, t), samples=len(x))
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(old[name])
        optimizer.step()
        assert_stepped(model, old, grads)


@pytest.mark.parametrize("kind", ["wide", "tall"])
@TO_NONE
@pytest.mark.parametrize("freeze", [True, False])
@pytest.mark.parametrize("one_model", [True, False])
def test_generators_step_through_a_discriminator(kind, set_to_none, freeze, one_model):
    discriminator, real, _ = build(kind)
    features, n = real.shape[1], len(real)
    width = 24 if kind == "wide" else 6
    torch.manual_seed(1)
    generator = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, features)).double()
    both = nn.ModuleDict({"g": generator, "d": discriminator})
    opt_g = torch.optim.SGD(generator.parameters(), lr=LR)
    opt_d = torch.optim.SGD(discriminator.parameters(), lr=LR)
    consequent.attach(opt_g, both if one_model else generator, damping=DAMPING)
    consequent.attach(opt_d, both if one_model else discriminator, damping=DAMPING)
    for step in range(3):
        noise = torch.randn(n, width, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        fake = generator(noise)
        opt_d.zero_grad(set_to_none=set_to_none)

        def loss_d(d, fake=fake):
            return (d(real)[:, 0] - 1).square().mean() + d(fake.detach())[:, 0].square().mean()

        loss_d(discriminator).backward()
        before, grads = weights(discriminator), corrected(discriminator, loss_d, samples=n)
        opt_d.step()
        assert_stepped(discriminator, before, grads)

        opt_g.zero_grad(set_to_none=set_to_none)
        if freeze:
            discriminator.requires_grad_(False)

        def loss_g(g, noise=noise):
            return (discriminator(g(noise))[:, 0] - 1).square().mean()

        (discriminator(fake)[:, 0] - 1).square().mean().backward()
        before, grads = weights(generator), corrected(generator, loss_g, samples=n)
        before_d = weights(discriminator)
        opt_g.step()
        if freeze:
            discriminator.requires_grad_(True)
        assert_stepped(generator, before, grads)
        assert_same(weights(discriminator), before_d)


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_backward_pass_without_zero_grad_after_a_step_is_refused(kind):
    model, x, t, optimizer, _ = start(kind)
    clean_iteration(kind, model, optimizer)
    loss_on(x, t)(model).backward()
    before, grads = weights(model), gradients(model)
    with pytest.raises(RuntimeError, match="zero_grad"):
        optimizer.step()
    assert_same(weights(model), before)
    assert_same(gradients(model), grads)
    clean_iteration(kind, model, optimizer)
    clean_iteration(kind, model, optimizer, set_to_none=False)


@pytest.mark.parametrize("kind", KINDS)
def test_two_steps_in_a_row_take_the_same_gradient(kind):
    model, x, t, optimizer, _ = start(kind)
    loss_on(x, t)(model).backward()
    before, grads = weights(model), corrected(model, loss_on(x, t), samples=len(x))
    optimizer.step()
    optimizer.step()
    assert_stepped(model, before, grads, lr=2 * LR)
    clean_iteration(kind, model, optimizer)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("when", ["never called", "called, no backward", "after a step"])
def test_step_without_gradients_changes_nothing(kind, when):
    model, x, t, optimizer, correction = start(kind, weight_decay=0.1)
    if when == "after a step":
        loss_on(x, t)(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    elif when == "called, no backward":
        model(x)
    before = weights(model)
    optimizer.step()
    assert_same(weights(model), before)
    with pytest.raises(RuntimeError, match=r"backward"):
        correction.step()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("after_a_step", [True, False])
def test_gradients_set_by_hand_are_refused(kind, after_a_step):
    model, _, _, optimizer, _ = start(kind)
    if after_a_step:
        clean_iteration(kind, model, optimizer)
        optimizer.zero_grad()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before = weights(model)
    with pytest.raises(RuntimeError, match="set by hand"):
        optimizer.step()
    assert_same(weights(model), before)
    clean_iteration(kind, model, optimizer)


class Raises(nn.Module):
    """Raises in the forward or the backward pass when told to."""

    def __init__(self):
        super().__init__()
        self.where = None

    def forward(self, x):
        if self.where == "forward":
            raise ArithmeticError("on purpose")
        if self.where == "backward" and x.requires_grad:
            x = x * 1.0
            x.register_hook(self.hook)
        return x

    def hook(self, grad):
        raise ArithmeticError("on purpose")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["forward", "backward"])
@TO_NONE
@pytest.mark.parametrize("trained_before", [True, False])
def test_a_pass_that_raises_midway_leaves_nothing_behind(kind, where, set_to_none, trained_before):
    model, x, t = build(kind)
    trap = Raises()
    model = nn.Sequential(model[0], model[1], trap, *model[2:])
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    consequent.attach(optimizer, model, damping=DAMPING)
    if trained_before:
        clean_iteration(kind, model, optimizer, set_to_none=set_to_none)
        optimizer.zero_grad(set_to_none=set_to_none)
    for _ in range(2):
        trap.where = where
        with pytest.raises(ArithmeticError):
            loss_on(x, t)(model).backward()
        trap.where = None
        for seed in range(2):
            clean_iteration(kind, model, optimizer, seed=seed, set_to_none=set_to_none)
        optimizer.zero_grad(set_to_none=set_to_none)


@pytest.mark.parametrize("rows", [3, 20])
@TO_NONE
def test_a_backward_pass_that_raises_in_a_model_that_is_one_layer(rows, set_to_none):
    torch.manual_seed(0)
    model = nn.Linear(8, 3).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    consequent.attach(optimizer, model, damping=DAMPING)
    trap = Raises()
    x, t = torch.randn(rows, 8).double(), torch.randn(rows, 3).double()
    clean_iteration(None, model, optimizer, x=x, t=t, set_to_none=set_to_none)
    optimizer.zero_grad(set_to_none=set_to_none)
    trap.where = "backward"
    leaf = (2 * x).requires_grad_()
    with pytest.raises(ArithmeticError):
        mean_loss(model(trap(leaf)), t).backward()
    clean_iteration(None, model, optimizer, x=x, t=t, set_to_none=set_to_none)
    clean_iteration(None, model, optimizer, x=x, t=t, set_to_none=set_to_none)


@pytest.mark.parametrize("at", ["step", "backward"])
@pytest.mark.parametrize("samples", [6, 40], ids=["wide", "tall"])
@pytest.mark.parametrize("images", [True, False])
def test_wasserstein_with_a_gradient_penalty_stays_bounded(samples, images, at):
    """Twenty steps of a critic and a generator: what the penalty adds must not be taken for a step to make in full."""
    torch.manual_seed(0)
    if images:
        shape, size = (1, 4, 4), 16
        critic = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(96, 1))
    else:
        shape, size = (12,), 12
        critic = nn.Sequential(nn.Linear(12, 16), nn.LeakyReLU(0.2), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    generator = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, size), nn.Unflatten(1, shape))
    critic, generator = critic.double(), generator.double()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (critic, generator)]
    corrections = [
        consequent.attach(o, m, damping=1.0, at=at) for o, m in zip(optimizers, (critic, generator), strict=True)
    ]
    start = max(float(p.detach().norm()) for p in critic.parameters())
    for _ in range(20):
        real = torch.randn(samples, *shape, dtype=torch.float64) + 1
        fake = generator(torch.randn(samples, 5, dtype=torch.float64))
        share = torch.rand(samples, *[1] * len(shape), dtype=torch.float64)
        between = (share * real + (1 - share) * fake.detach()).requires_grad_()
        (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        penalty = (slope.flatten(1).norm(dim=1) - 1).square().mean()
        optimizers[0].zero_grad()
        (critic(fake.detach()).mean() - critic(real).mean() + 10 * penalty).backward()
        optimizers[0].step()
        optimizers[1].zero_grad()
        (-critic(fake).mean()).backward()
        optimizers[1].step()
        for parameter in (*critic.parameters(), *generator.parameters()):
            assert parameter.isfinite().all()
            assert float(parameter.detach().norm()) < 10 * (start + 1)
    assert all(correction.counters.skipped == correction.counters.edited == 0 for correction in corrections)
