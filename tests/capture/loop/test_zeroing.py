"""zero_grad, gradients that are None, frozen and unused layers, evaluation passes."""

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
from torch import nn

import consequent


@pytest.mark.parametrize("kind", KINDS)
def test_the_helper_and_the_nets_are_what_they_claim(kind):
    model, x, t = build(kind)
    rows, plain = observe(model, loss_on(x, t))
    loss_on(x, t)(model).backward()
    assert_close(gradients(model), plain)  # the logged copy has the model's own gradients
    grads = corrected(model, loss_on(x, t), samples=len(x))
    for name, (X, dZ) in rows.items():
        weight = plain[f"{name}.weight"]
        assert_close({"": torch.from_numpy(dZ.T @ X).reshape(weight.shape)}, {"": weight})
        assert (len(X) < X.shape[1] + 1) == (kind == "wide")
        cosine = torch.cosine_similarity(grads[f"{name}.weight"].flatten(), weight.flatten(), dim=0)
        assert cosine < 0.999  # the correction changes more than the length


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("by_model", [True, False])
def test_zero_grad(kind, set_to_none, by_model):
    model, x, t, optimizer, correction = start(kind)
    for seed in range(3):
        x, t = build(kind, batch=len(x) + seed, seed=seed)[1:]
        (model if by_model else optimizer).zero_grad(set_to_none=set_to_none)
        loss_on(x, t)(model).backward()
        before, grads = weights(model), corrected(model, loss_on(x, t), samples=len(x))
        optimizer.step()
        assert_close(gradients(model), grads)
        assert_stepped(model, before, grads)
    assert correction.counters.steps == 3
    assert correction.counters.edited == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_discards_a_backward_pass_without_a_step(kind, set_to_none):
    model, x, t, optimizer, _ = start(kind)
    loss_on(*build(kind, seed=7)[1:])(model).backward()
    optimizer.zero_grad(set_to_none=set_to_none)
    loss_on(x, t)(model).backward()
    before, grads = weights(model), corrected(model, loss_on(x, t), samples=len(x))
    optimizer.step()
    assert_stepped(model, before, grads)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("after", ["backward", "step"])
def test_zeroed_through_data(kind, after):
    """``p.grad.data.zero_()``, as older scripts do: autograd's version counter does not see it."""
    model, x, t, optimizer, _ = start(kind)
    other = build(kind, seed=7)[1:]
    loss_on(*other)(model).backward()
    if after == "step":
        optimizer.step()
    for p in model.parameters():
        p.grad.data.zero_()
    loss_on(x, t)(model).backward()
    before, grads = weights(model), corrected(model, loss_on(x, t), samples=len(x))
    optimizer.step()
    assert_stepped(model, before, grads)


def test_a_gradient_that_is_zero_by_itself_counts():
    """One call has inputs and no ΔZ, the other a ΔZ and no inputs: nothing was zeroed, and the rows stay."""
    layer = nn.Linear(1, 1, bias=False).double()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    consequent.attach(optimizer, layer, damping=0.5, loss_reduction="sum")
    ones, zeros = torch.ones(2, 1, dtype=torch.float64), torch.zeros(2, 1, dtype=torch.float64)
    (0 * layer(ones).sum() + layer(zeros).sum()).backward()
    layer(3 * ones).sum().backward()
    optimizer.step()
    assert layer.weight.grad.item() == pytest.approx(6 / (2 + 2 * 9 + 0.5))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("which", ["bias", "weight", "layer", "all but one layer"])
def test_gradients_that_are_none(kind, which):
    """What has no gradient stays; what has one is corrected with its own columns alone."""
    model, x, t, optimizer, _ = start(kind)
    loss_on(x, t)(model).backward()
    names = {name for name, _ in model.named_parameters()}
    gone = {
        "bias": {"2.bias"} & names or {"0.bias"},
        "weight": {"0.weight"},
        "layer": {"0.weight", "0.bias"},
        "all but one layer": {name for name in names if not name.startswith("0.")},
    }[which]
    for name, parameter in model.named_parameters():
        if name in gone:
            parameter.grad = None
    before = weights(model)
    grads = corrected(model, loss_on(x, t), samples=len(x), only=names - gone)
    optimizer.step()
    assert_stepped(model, before, grads)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("frozen", [["0."], ["2."], ["0.weight"], ["0.bias", "2.weight"]])
@pytest.mark.parametrize("when", ["before", "after", "and thawed"])
def test_frozen_layers(kind, frozen, when):
    model, x, t = build(kind)
    parameters = [p for name, p in model.named_parameters() if any(name.startswith(f) for f in frozen)]
    if when == "before":
        for p in parameters:
            p.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    consequent.attach(optimizer, model, damping=DAMPING)
    for step in range(3):
        if when != "before":
            for p in parameters:
                p.requires_grad_(when == "and thawed" and step == 2)
        optimizer.zero_grad()
        loss_on(x, t)(model).backward()
        before, grads = weights(model), corrected(model, loss_on(x, t), samples=len(x))
        assert len(grads) == len(before) - (len(parameters) if when != "and thawed" or step < 2 else 0)
        optimizer.step()
        assert_stepped(model, before, grads)


class Branches(nn.Module):
    """Two branches, of which a call uses one."""

    def __init__(self, kind):
        super().__init__()
        self.left = build(kind, seed=1)[0]
        self.right = build(kind, seed=2)[0]
        self.go_left = True

    def forward(self, x):
        return (self.left if self.go_left else self.right)(x)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("momentum", [0, 0.9])
def test_layers_unused_in_a_forward_pass(kind, set_to_none, momentum):
    model, (x, t) = Branches(kind).double(), build(kind)[1:]
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=momentum)
    correction = consequent.attach(optimizer, model, damping=DAMPING)
    velocity = {}
    for left in [True, False, True, True, False]:
        model.go_left = left
        optimizer.zero_grad(set_to_none=set_to_none)
        loss_on(x, t)(model).backward()
        before, grads = weights(model), corrected(model, loss_on(x, t), samples=len(x))
        if not set_to_none:  # then torch takes a gradient of zeros as a gradient
            grads |= {
                n: torch.zeros_like(p) for n, p in model.named_parameters() if p.grad is not None and n not in grads
            }
        velocity |= {n: momentum * velocity.get(n, 0) + g for n, g in grads.items()}
        optimizer.step()
        assert_stepped(model, before, {n: velocity[n] for n in grads})
    assert len(correction.corrected) == 2 * len([m for m in model.left if isinstance(m, nn.Linear | nn.Conv2d)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["no_grad", "inference", "grad", "eval"])
@pytest.mark.parametrize("when", ["before forward", "before backward", "before step", "after step"])
def test_evaluation_passes_between_steps(kind, mode, when):
    model, x, t, optimizer, _ = start(kind)
    other = build(kind, batch=17, seed=9)[1]
    kept = []

    def evaluate(now):
        if now != when:
            return
        if mode == "eval":
            model.eval()
        with {"no_grad": torch.no_grad, "inference": torch.inference_mode}.get(mode, torch.enable_grad)():
            kept.append(model(other))  # with grad: a graph without a backward pass
        model.train()

    for _ in range(3):
        optimizer.zero_grad()
        evaluate("before forward")
        loss = loss_on(x, t)(model)
        evaluate("before backward")
        loss.backward()
        evaluate("before step")
        before, grads = weights(model), corrected(model, loss_on(x, t), samples=len(x))
        optimizer.step()
        evaluate("after step")
        assert_stepped(model, before, grads)


@pytest.mark.parametrize("kind", KINDS)
def test_only_a_part_under_no_grad(kind):
    """A feature extractor run under no_grad keeps its weights; the rest is corrected."""
    model, x, t, optimizer, _ = start(kind)

    def loss_of(m):
        with torch.no_grad():
            h = m[:2](x)
        return 0.5 * ((m[2:](h) - t) ** 2).sum() / len(x)

    loss_of(model).backward()
    before, grads = weights(model), corrected(model, loss_of, samples=len(x))
    assert not any(name.startswith("0.") for name in grads)
    optimizer.step()
    assert_stepped(model, before, grads)


@pytest.mark.parametrize("kind", KINDS)
def test_training_in_eval_mode(kind):
    model, x, t = build(kind)
    model = nn.Sequential(model[0], nn.Dropout(0.5), *model[1:]).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    consequent.attach(optimizer, model, damping=DAMPING)
    for _ in range(2):
        optimizer.zero_grad()
        loss_on(x, t)(model).backward()
        before, grads = weights(model), corrected(model, loss_on(x, t), samples=len(x))
        optimizer.step()
        assert_stepped(model, before, grads)


@pytest.mark.parametrize("samples", [3, 16])
@pytest.mark.parametrize("when", ["before attaching", "before the optimiser held the layer"])
def test_gradients_that_nobody_saw_are_told_of(samples, when):
    model, x, t = build("tall", batch=2 * samples)
    optimizer = torch.optim.SGD(model.parameters() if when == "before attaching" else model[2].parameters(), lr=LR)
    if when != "before attaching":
        consequent.attach(optimizer, model, damping=DAMPING)
    loss_on(x[:samples], t[:samples])(model).backward()
    if when == "before attaching":
        consequent.attach(optimizer, model, damping=DAMPING)
    else:
        optimizer.add_param_group({"params": list(model[0].parameters())})
    loss_on(x[samples:], t[samples:])(model).backward()
    said = "held something before the first" if samples == 16 else "is not the one its inputs explain"
    with pytest.warns(consequent.ConsequentWarning, match=f"its gradient {said}") as warned:
        optimizer.step()
    assert any("layer '0'" in str(warning.message) for warning in warned)
