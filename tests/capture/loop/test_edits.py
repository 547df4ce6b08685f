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
    """The feature side corrects the final gradient as it is, the sample side only shortens it, and says so once."""
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
        step_warned(optimizer, layers if kind == "wide" and step == 0 else 0)
        assert_stepped(model, before, grads, lr=LR, tolerance=1e-8)
    assert correction.counters.edited == (3 * layers if kind == "wide" else 0)


@pytest.mark.parametrize("kind", KINDS)
def test_clip_grad_value_in_float32(kind):
    """λ = 1e-4, where solving for an edited gradient with fewer rows than columns would divide by λ."""
    model, x, t = build(kind, dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    consequent.attach(optimizer, model, damping=1e-4)
    loss_on(x, t)(model).backward()
    bound = 0.3 * min(float(g.abs().max()) for g in gradients(model).values())
    clip_grad_value_(model.parameters(), bound)
    grads = corrected(model, loss_on(x, t), samples=len(x), final=gradients(model), damping=1e-4)
    step_warned(optimizer, layers_of(model) if kind == "wide" else 0)
    assert_close(gradients(model), grads, tolerance=1e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("penalised", ["all", "one layer"])
@pytest.mark.parametrize("strength", [1e-6, 1e-4, 1e-2, 1e-1])
@pytest.mark.parametrize("at", ["step", "backward"])
def test_a_penalty_on_the_weights(kind, penalised, strength, at):
    """What comes to the gradient otherwise than from the layer stays as it is: N times U, plus the penalty's own."""
    model, x, t = build(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    correction = consequent.attach(optimizer, model, damping=DAMPING, at=at)

    def loss_of(m):
        parameters = [p for n, p in m.named_parameters() if penalised == "all" or n == "0.weight"]
        return loss_on(x, t)(m) + strength * sum(p.square().sum() for p in parameters)

    for _ in range(2):
        optimizer.zero_grad()
        before, grads = weights(model), corrected(model, loss_on(x, t), samples=len(x))
        for name, weight in before.items():
            if penalised == "all" or name == "0.weight":
                grads[name] = grads[name] + 2 * strength * weight
        loss_of(model).backward()
        optimizer.step()
        assert_stepped(model, before, grads, tolerance=1e-8)
    assert correction.counters.edited == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["norm", "a factor", "micro-batches"])
def test_a_penalty_on_the_weights_is_scaled_with_the_gradient(kind, how):
    """All of ``.grad`` was clipped, or added up over micro-batches: so was the penalty's part."""
    model, x, t, optimizer, correction = start(kind)
    y, u = build(kind, seed=4)[1:]
    factor = 1.0
    before = weights(model)
    losses = [loss_on(x, t)] if how != "micro-batches" else [loss_on(x, t), loss_on(y, u)]
    grads = corrected(model, *losses, samples=sum([len(x)] * len(losses)))
    for loss_of in losses:
        (loss_of(model) + 0.05 * sum(p.square().sum() for p in model.parameters())).backward()
    if how == "norm":
        norm = float(clip_grad_norm_(model.parameters(), 0.1))
        factor = 0.1 / (norm + 1e-6)
    elif how == "a factor":
        factor = 1 / 3
        for p in model.parameters():
            p.grad *= factor
    optimizer.step()
    expected = {n: factor * (g + len(losses) * 0.1 * before[n]) for n, g in grads.items()}
    assert_stepped(model, before, expected, tolerance=1e-8)
    assert correction.counters.edited == 0


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
    warns = kind == "wide" and how in ("noise", "replaced", "a hook")
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
    grads = corrected(model, loss_on(x, t), loss_on(*other), samples=2 * len(x), final=gradients(model))
    step_warned(optimizer, layers_of(model) if kind == "wide" else 0)
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
def test_an_edit_without_damping(option):
    """λ = 0 on the sample side: shortened by the trace alone, whichever way the zero was given."""
    model, x, t = build("wide")
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    consequent.attach(optimizer, model, **{option: 0.0})
    loss_on(x, t)(model).backward()
    clip_grad_value_(model.parameters(), 0.3 * min(float(g.abs().max()) for g in gradients(model).values()))
    grads = corrected(model, loss_on(x, t), samples=len(x), final=gradients(model), damping=0)
    step_warned(optimizer, layers_of(model))
    assert_close(gradients(model), grads)


EDITS = {
    "two rows averaged": lambda g: averaged(g, slice(0, 2)),
    "half of the rows averaged": lambda g: averaged(g, slice(0, None, 2)),
    "rows of equal signs averaged": lambda g: averaged(g, g.sum(1) > 0),
    "all rows averaged": lambda g: averaged(g, slice(None)),
    "columns averaged": lambda g: averaged(g.T, slice(0, 2)).T,
    "transposed": lambda g: g.T.clone(),
    "made symmetric": lambda g: (g + g.T) / 2,
    "rows exchanged": lambda g: g.flip(0),
    "columns exchanged": lambda g: g.flip(1),
    "one row gone": lambda g: torch.cat([g[:-1], 0 * g[-1:]]),
    "signs": torch.sign,
}


def averaged(matrix, rows):
    matrix = matrix.clone()
    matrix[rows] = matrix[rows].mean(0, keepdim=True)
    return matrix


@pytest.mark.parametrize("layers", [1, 4], ids=["alone", "with others"])
@pytest.mark.parametrize("waits", [True, False], ids=["looked at", "not waited for"])
@pytest.mark.parametrize("edit", EDITS)
def test_edits_of_a_square_layer_are_seen(monkeypatch, edit, waits, layers):
    """No edit may hide behind a symmetry of what the gradient is compared by."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8, bias=False) for _ in range(layers)]).double()
    x, t = torch.randn(5, 8, dtype=torch.float64), torch.randn(5, 8, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    correction = consequent.attach(optimizer, model, damping=DAMPING)
    if not waits:
        monkeypatch.setattr(correction._rewriter, "_may_wait", lambda tensor: False)
    loss_on(x, t)(model).backward()
    model[0].weight.grad.copy_(EDITS[edit](model[0].weight.grad))
    before, grads = weights(model), corrected(model, loss_on(x, t), samples=5, final=gradients(model))
    step_warned(optimizer, 1 if waits else 0)
    assert_stepped(model, before, grads, tolerance=1e-8)
    assert correction.counters.edited == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("factor", [1.0, 0.1])
def test_gradients_compressed_to_half_precision_are_no_edits(kind, half, factor):
    """Sent, or kept, in half precision: N times U, up to that rounding; and scaled as the gradient was."""
    model, x, t = build(kind, dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    correction = consequent.attach(optimizer, model, damping=DAMPING)
    for _ in range(2):
        optimizer.zero_grad()
        grads = corrected(model, loss_on(x, t), samples=len(x))
        loss_on(x, t)(model).backward()
        for p in model.parameters():
            p.grad.copy_((factor * p.grad).to(half))
        step_warned(optimizer, 0)
        # The sample side takes the factor alone from the gradient; the feature side solves for its rounding, too.
        tolerance = (1 if kind == "wide" else 40) * torch.finfo(half).eps
        assert_close(gradients(model), {n: factor * g for n, g in grads.items()}, tolerance)
    assert correction.counters.edited == 0


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
def test_an_edit_of_a_compressed_gradient_is_an_edit(half):
    model, x, t = build("wide", dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    correction = consequent.attach(optimizer, model, damping=DAMPING)
    loss_on(x, t)(model).backward()
    for p in model.parameters():
        p.grad.copy_(p.grad.to(half))
    model[2].weight.grad[:, 3] = 0
    grads = corrected(model, loss_on(x, t), samples=len(x), final=gradients(model), rounding=torch.finfo(half).eps)
    step_warned(optimizer, 1)
    assert correction.counters.edited == 1
    assert_close(gradients(model), grads, tolerance=2 * torch.finfo(half).eps)
