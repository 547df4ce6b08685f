"""What happens to ``.grad`` between the backward pass and the step: clipping, penalties, edits, a step by hand."""

import warnings

import pytest
import torch
from loop.expected import (
    DAMPING,
    KINDS,
    LR,
    assert_close,
    assert_stepped,
    build,
    corrected,
    gradients,
    loss_on,
    observe,
    start,
    weights,
)
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import consequent


def layers_of(model):
    return sum(1 for _ in model.parameters()) // 2  # each has a weight and a bias


def step_warned(optimizer, times):
    """Step; ``times`` ConsequentWarnings must come, no more and no fewer."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    found = [str(w.message) for w in caught if issubclass(w.category, consequent.ConsequentWarning)]
    assert len(found) == times, found
    assert all("not the one its inputs explain" in message for message in found)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("limit", [0.05, 1e-12, 1e6])
def test_clip_grad_norm_before_the_step(kind, limit):
    """The correction is linear in the gradient: c times the gradient is c times the correction."""
    model, x, t, optimizer, correction = start(kind)
    for _ in range(2):
        optimizer.zero_grad()
        loss_on(x, t)(model).backward()
        norm = float(clip_grad_norm_(model.parameters(), limit))
        factor = min(1.0, limit / (norm + 1e-6))
        before, grads = weights(model), corrected(model, loss_on(x, t), samples=len(x))
        optimizer.step()
        grads = {n: factor * g for n, g in grads.items()}
        assert_close(gradients(model), grads)
        if limit > 1e-6:
            assert_stepped(model, before, grads)
    assert correction.counters.edited == 0


@pytest.mark.parametrize("kind", KINDS)
def test_scaled_through_data(kind):
    """``p.grad.data.mul_(c)``, as older scripts do: autograd's version counter does not see it."""
    model, x, t, optimizer, _ = start(kind)
    loss_on(x, t)(model).backward()
    for p in model.parameters():
        p.grad.data.mul_(0.25)
    before, grads = weights(model), corrected(model, loss_on(x, t), samples=len(x))
    optimizer.step()
    assert_stepped(model, before, {n: 0.25 * g for n, g in grads.items()})


@pytest.mark.parametrize("kind", KINDS)
def test_layers_clipped_each_by_its_own_norm(kind):
    model, x, t, optimizer, _ = start(kind)
    loss_on(x, t)(model).backward()
    grads = corrected(model, loss_on(x, t), samples=len(x))
    for name, layer in model.named_children():
        if list(layer.parameters()):
            norm = float(clip_grad_norm_(layer.parameters(), 0.01))
            for parameter, _ in layer.named_parameters():
                grads[f"{name}.{parameter}"] *= 0.01 / (norm + 1e-6)
    before = weights(model)
    optimizer.step()
    assert_stepped(model, before, grads)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_step_by_hand_then_clip_then_step(kind, set_to_none):
    """The corrected gradients are clipped, and the optimiser's step does not correct them again."""
    model, x, t, optimizer, correction = start(kind)
    for _ in range(2):
        optimizer.zero_grad(set_to_none=set_to_none)
        loss_on(x, t)(model).backward()
        grads = corrected(model, loss_on(x, t), samples=len(x))
        correction.step()
        assert_close(gradients(model), grads)
        norm = float(torch.stack([g.norm() for g in grads.values()]).norm())
        assert float(clip_grad_norm_(model.parameters(), norm / 3)) == pytest.approx(norm)
        before = weights(model)
        optimizer.step()
        assert_stepped(model, before, {n: g / 3 for n, g in grads.items()}, tolerance=1e-5)
        assert_close(gradients(model), {n: g / 3 for n, g in grads.items()}, tolerance=1e-5)
    assert correction.counters.steps == 2


@pytest.mark.parametrize("kind", KINDS)
def test_step_by_hand_of_a_correction_without_an_optimiser(kind):
    model, x, t = build(kind)
    correction = consequent.Consequentialism(model, DAMPING)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for _ in range(2):
        optimizer.zero_grad()
        loss_on(x, t)(model).backward()
        before, grads = weights(model), corrected(model, loss_on(x, t), samples=len(x))
        correction.step()
        clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
        assert_stepped(model, before, grads)


@pytest.mark.parametrize("kind", KINDS)
def test_step_by_hand_twice_is_refused(kind):
    model, x, t, _, correction = start(kind)
    loss_on(x, t)(model).backward()
    grads = corrected(model, loss_on(x, t), samples=len(x))
    correction.step()
    with pytest.raises(RuntimeError, match="nothing to correct"):
        correction.step()
    assert_close(gradients(model), grads)


@pytest.mark.parametrize("kind", KINDS)
def test_corrected_gradients_replaced_by_other_tensors_are_refused(kind):
    """``p.grad = p.grad * c`` after the step by hand looks like a gradient set by hand: an error, no wrong number."""
    model, x, t, optimizer, correction = start(kind)
    loss_on(x, t)(model).backward()
    correction.step()
    for p in model.parameters():
        p.grad = p.grad * 0.5
    before = weights(model)
    with pytest.raises(RuntimeError, match="set by hand"):
        optimizer.step()
    assert_stepped(model, before, {})


@pytest.mark.parametrize("kind", KINDS)
def test_clip_grad_value(kind):
    """The final gradient is corrected as it is, with one warning per layer (the feature side looks once)."""
    model, x, t, optimizer, correction = start(kind)
    layers = layers_of(model)
    for step in range(3):
        optimizer.zero_grad()
        loss_on(x, t)(model).backward()
        plain = gradients(model)
        bound = 0.3 * min(float(g.abs().max()) for g in plain.values())
        clip_grad_value_(model.parameters(), bound)
        final = gradients(model)
        before, grads = weights(model), corrected(model, loss_on(x, t), samples=len(x), final=final)
        step_warned(optimizer, layers if step == 0 else 0)
        assert_stepped(model, before, grads, lr=LR, tolerance=1e-8)
        with torch.no_grad():  # dividing by λ makes such a step large
            for name, p in model.named_parameters():
                p.copy_(before[name])
    assert correction.counters.edited == (3 * layers if kind == "wide" else layers)


@pytest.mark.parametrize("kind", KINDS)
def test_clip_grad_value_in_float32_is_solved_in_float64(kind):
    """λ = 1e-4 on the feature side of wide layers: through float32 this would be noise."""
    model, x, t = build(kind, dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    consequent.attach(optimizer, model, damping=1e-4)
    loss_on(x, t)(model).backward()
    bound = 0.3 * min(float(g.abs().max()) for g in gradients(model).values())
    clip_grad_value_(model.parameters(), bound)
    grads = corrected(model, loss_on(x, t), samples=len(x), final=gradients(model), damping=1e-4)
    step_warned(optimizer, layers_of(model))
    assert_close(gradients(model), grads, tolerance=1e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("penalised", ["all", "one layer"])
def test_a_penalty_on_the_weights(kind, penalised):
    model, x, t, optimizer, _ = start(kind)

    def loss_of(m):
        parameters = [p for n, p in m.named_parameters() if penalised == "all" or n == "0.weight"]
        return loss_on(x, t)(m) + 0.05 * sum(p.square().sum() for p in parameters)

    for step in range(2):
        optimizer.zero_grad()
        loss_of(model).backward()
        final = observe(model, loss_of)[1]
        before, grads = weights(model), corrected(model, loss_of, samples=len(x), final=final)
        layers = layers_of(model) if penalised == "all" else 1
        step_warned(optimizer, layers if step == 0 else 0)
        assert_stepped(model, before, grads, tolerance=1e-8)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["noise", "replaced", "negated", "doubled and replaced", "a hook"])
def test_users_edit_of_the_gradient(kind, how):
    model, x, t, optimizer, _ = start(kind)
    layer = model[2]
    noise = torch.randn(layer.weight.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    if how == "a hook":
        layer.weight.register_hook(lambda grad: grad + noise)
    loss_on(x, t)(model).backward()
    if how == "noise":
        layer.weight.grad += noise
    elif how == "replaced":
        layer.weight.grad = noise.clone()
    elif how == "negated":
        layer.weight.grad.neg_()
        layer.bias.grad.neg_()
    elif how == "doubled and replaced":
        layer.weight.grad = layer.weight.grad * 2
        layer.bias.grad = layer.bias.grad * 2
    final = gradients(model)
    before, grads = weights(model), corrected(model, loss_on(x, t), samples=len(x), final=final)
    warns = how in ("noise", "replaced", "a hook")
    step_warned(optimizer, 1 if warns else 0)
    assert_stepped(model, before, grads, tolerance=1e-8)


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_bias_gradient_is_edited(kind):
    model, x, t, optimizer, _ = start(kind)
    loss_on(x, t)(model).backward()
    model[0].bias.grad *= 3
    final = gradients(model)
    before, grads = weights(model), corrected(model, loss_on(x, t), samples=len(x), final=final)
    step_warned(optimizer, 1 if kind == "wide" else 0)
    assert_stepped(model, before, grads, tolerance=1e-8)


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_clipped_between_micro_batches(kind):
    model, x, t, optimizer, _ = start(kind)
    other = build(kind, seed=4)[1:]
    loss_on(x, t)(model).backward()
    for p in model.parameters():
        p.grad *= 0.25
    loss_on(*other)(model).backward()
    before = weights(model)
    losses = loss_on(x, t, weight=0.25), loss_on(*other)
    grads = corrected(model, *losses, samples=2 * len(x), final=gradients(model))
    step_warned(optimizer, layers_of(model))
    assert_stepped(model, before, grads, tolerance=1e-8)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_zeroed_by_hand_after_the_backward_pass(kind):
    """Zeros are the gradient now: nothing moves."""
    model, x, t, optimizer, _ = start(kind)
    loss_on(x, t)(model).backward()
    for p in model.parameters():
        p.grad.zero_()
    before = weights(model)
    optimizer.step()
    assert_stepped(model, before, {})


def test_an_edit_on_a_device_that_is_not_waited_for(monkeypatch):
    """Simulated on the CPU: the edited gradient itself is used, shortened by λ + trace, and counted."""
    model, x, t, optimizer, correction = start("wide")
    monkeypatch.setattr(correction._rewriter, "_may_wait", lambda tensor: False)
    for step in range(4):
        optimizer.zero_grad()
        loss_on(x, t)(model).backward()
        if step < 2:  # looked at, then trusted
            grads = corrected(model, loss_on(x, t), samples=len(x))
        else:
            bound = 0.3 * min(float(g.abs().max()) for g in gradients(model).values())
            clip_grad_value_(model.parameters(), bound)
            inputs = {name: X for name, (X, _) in observe(model, loss_on(x, t))[0].items()}
            sizes = {name: float((X**2).sum()) + len(x) for name, X in inputs.items()}  # the bias's ones included
            grads = {n: len(x) * g / (sizes[n.split(".")[0]] + DAMPING) for n, g in gradients(model).items()}
        before = weights(model)
        optimizer.step()
        assert_stepped(model, before, grads, tolerance=1e-8)
    assert correction.counters.edited == 2 * layers_of(model)


@pytest.mark.parametrize("factor", [1.0, 1e-3, 65536.0])
def test_a_scaled_gradient_on_a_device_that_is_not_waited_for(monkeypatch, factor):
    model, x, t, optimizer, correction = start("wide")
    monkeypatch.setattr(correction._rewriter, "_may_wait", lambda tensor: False)
    for _ in range(3):
        optimizer.zero_grad()
        loss_on(x, t)(model).backward()
        grads = {n: factor * g for n, g in corrected(model, loss_on(x, t), samples=len(x)).items()}
        for p in model.parameters():
            p.grad *= factor
        correction.step()
        assert_close(gradients(model), grads, tolerance=1e-8)
    assert correction.counters.edited == 0


@pytest.mark.parametrize("option", ["damping", "relative_damping"])
def test_an_edit_without_damping_drops_what_no_input_explains(option):
    """λ = 0: G X†X†ᵀ, whichever way the zero was given."""
    model, x, t = build("wide")
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    consequent.attach(optimizer, model, **{option: 0.0})
    loss_on(x, t)(model).backward()
    clip_grad_value_(model.parameters(), 0.3 * min(float(g.abs().max()) for g in gradients(model).values()))
    final, seen = gradients(model), observe(model, loss_on(x, t))[0]
    step_warned(optimizer, layers_of(model))
    for name, (X, _) in seen.items():
        rows = torch.cat([torch.as_tensor(X), torch.ones(len(X), 1, dtype=torch.float64)], 1)
        grad = torch.cat([final[f"{name}.weight"], final[f"{name}.bias"][:, None]], 1)
        expected = len(x) * grad @ torch.linalg.pinv(rows.T @ rows, hermitian=True)
        assert_close({"w": gradients(model)[f"{name}.weight"]}, {"w": expected[:, :-1]}, tolerance=1e-6)
