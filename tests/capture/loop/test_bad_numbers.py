"""NaN, inf, singular matrices and failed factorisations: defined outcomes, and weights never half updated."""

import contextlib
import warnings

import numpy as np
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
    weights,
)
from torch import nn

import consequent


def normalised(kind, dtype=torch.float64):
    """A net with a BatchNorm between its layers."""
    model, x, t = build(kind, dtype=dtype)
    norm = nn.BatchNorm2d(4) if kind == "conv" else nn.BatchNorm1d(model[0].out_features)
    model.insert(1, norm.to(dtype))
    return model, x, t


def state_of(optimizer):
    return [{k: v.clone() for k, v in s.items() if isinstance(v, torch.Tensor)} for s in optimizer.state.values()]


def spoil(where, model, x, t, value):
    """Run a forward and a backward pass with a bad number in one place."""
    if where == "input":
        x = x.clone()
        x.view(-1)[3] = value
    loss = loss_on(x, t)(model)
    if where == "loss":
        loss = loss * value
    loss.backward()
    if where == "gradient":
        model[3].weight.grad.view(-1)[1] = value
    elif where == "bias gradient":
        model[0].bias.grad.view(-1)[1] = value
    elif where == "gradient of a norm":
        model[1].weight.grad[0] = value


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["input", "loss", "gradient", "bias gradient", "gradient of a norm"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_nan_or_inf_skips_the_step_entirely(kind, value, where, set_to_none):
    model, x, t = normalised(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, weight_decay=0.1)
    correction = consequent.attach(optimizer, model, damping=DAMPING)
    velocity = {}

    def clean_step():
        optimizer.zero_grad(set_to_none=set_to_none)
        before, grads = weights(model), corrected(model, loss_on(x, t), samples=len(x))
        grads = {n: g + 0.1 * before[n] for n, g in grads.items()}
        velocity.update({n: 0.9 * velocity[n] + g if n in velocity else g for n, g in grads.items()})
        loss_on(x, t)(model).backward()
        optimizer.step()
        assert_stepped(model, before, velocity, tolerance=1e-8)

    clean_step()
    for bad in range(2):
        optimizer.zero_grad(set_to_none=set_to_none)
        spoil(where, model, x, t, value)
        before, state, spoiled = weights(model), state_of(optimizer), gradients(model)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        assert len(caught) == (1 if bad == 0 else 0), [str(w.message) for w in caught]
        assert all(issubclass(w.category, consequent.ConsequentWarning) for w in caught)
        assert_same(weights(model), before)
        for old, new in zip(state, state_of(optimizer), strict=True):
            assert_same(new, old)
        assert set(gradients(model)) == set(spoiled)  # there to look at, as plain gradients would be
        for name, grad in gradients(model).items():
            torch.testing.assert_close(grad, spoiled[name], rtol=0, atol=0, equal_nan=True)
        assert correction.counters.skipped == bad + 1
        clean_step()
    assert correction.counters.steps == 5


@pytest.mark.parametrize(("samples", "features"), [(1, 3), (3, 1)])
@pytest.mark.parametrize("layers", [1, 2])
def test_inputs_whose_squares_are_infinite_skip_the_step(samples, features, layers):
    """A 1 × 1 matrix of infinity can be factorised, and its inverse is zero: that would be no step, and untold."""
    model = nn.ModuleList([nn.Linear(features, 2, bias=False) for _ in range(layers)])
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    correction = consequent.attach(optimizer, model, damping=DAMPING)
    x = torch.full((samples, features), 2.0**70)
    sum((layer(x) / 2.0**70).mean() for layer in model).backward()
    with pytest.warns(consequent.ConsequentWarning, match="NaN or inf"):
        optimizer.step()
    assert correction.counters.skipped == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["input", "loss", "gradient", "gradient of a norm"])
@pytest.mark.parametrize("by_hand", [True, False])
def test_nan_with_check_raises_and_nothing_changes(kind, where, by_hand):
    model, x, t = normalised(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    correction = consequent.attach(optimizer, model, damping=DAMPING, check=True)
    spoil(where, model, x, t, float("nan"))
    before, spoiled = weights(model), gradients(model)
    with pytest.raises(consequent.NonFiniteError, match="NaN or inf"):
        correction.step() if by_hand else optimizer.step()
    assert_same(weights(model), before)
    assert set(gradients(model)) == set(spoiled)
    for name, grad in gradients(model).items():
        torch.testing.assert_close(grad, spoiled[name], rtol=0, atol=0, equal_nan=True)
    optimizer.zero_grad()
    grads = corrected(model, loss_on(x, t), samples=len(x))
    loss_on(x, t)(model).backward()
    optimizer.step()
    assert_stepped(model, before, grads, tolerance=1e-8)


@pytest.mark.parametrize("kind", KINDS)
def test_nan_in_a_step_by_hand_makes_all_gradients_zero(kind):
    model, x, t = normalised(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    correction = consequent.attach(optimizer, model, damping=DAMPING)
    spoil("input", model, x, t, float("nan"))
    before = weights(model)
    with pytest.warns(consequent.ConsequentWarning, match="NaN or inf"):
        correction.step()
    assert_same(gradients(model), {n: torch.zeros_like(w) for n, w in before.items()})
    optimizer.step()
    assert_same(weights(model), before)
    assert correction.counters.skipped == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_second_step_after_a_skipped_one_takes_no_bad_gradient(kind, set_to_none):
    """The skipped gradients are back in .grad, uncorrected and not finite: stepping again must not apply them."""
    model, x, t = normalised(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    consequent.attach(optimizer, model, damping=DAMPING)
    loss_on(x, t)(model).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=set_to_none)
    spoil("input", model, x, t, float("nan"))
    before = weights(model)
    with pytest.warns(consequent.ConsequentWarning, match="NaN or inf"):
        optimizer.step()
    with contextlib.suppress(RuntimeError):
        optimizer.step()
    assert_same(weights(model), before)


@pytest.mark.parametrize("kind", KINDS)
def test_nan_in_one_micro_batch_skips_the_whole_step(kind):
    model, x, t = build(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    correction = consequent.attach(optimizer, model, damping=DAMPING)
    before = weights(model)
    loss_on(x, t)(model).backward()
    loss_on(x * float("nan"), t)(model).backward()
    loss_on(x, t)(model).backward()
    with pytest.warns(consequent.ConsequentWarning, match="NaN or inf"):
        optimizer.step()
    assert_stepped(model, before, {})
    assert correction.counters.skipped == 1
    optimizer.zero_grad()
    grads = corrected(model, loss_on(x, t), samples=len(x))
    loss_on(x, t)(model).backward()
    optimizer.step()
    assert_stepped(model, before, grads)


@pytest.mark.parametrize("kind", KINDS)
def test_nan_in_a_closure(kind):
    model, x, t = build(kind)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    correction = consequent.attach(optimizer, model, damping=DAMPING)
    before = weights(model)

    def closure():
        optimizer.zero_grad()
        loss = loss_on(x * float("nan"), t)(model)
        loss.backward()
        return loss

    with pytest.warns(consequent.ConsequentWarning, match="NaN or inf"):
        optimizer.step(closure)
    assert_stepped(model, before, {})
    assert not optimizer.state
    assert correction.counters.skipped == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", ["twice the same sample", "a zero sample", "a constant feature", "all zero"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_singular_gram_without_damping_is_the_pseudo_inverse(kind, what, dtype):
    model, x, _ = build(kind, dtype=dtype)
    model = nn.Sequential(model[0])
    x = x.clone()
    if what == "twice the same sample":
        x[1] = x[0]
    elif what == "a zero sample":
        x[0] = 0
    elif what == "a constant feature":
        x[:, 0] = 1
    else:
        x.zero_()
    target = torch.randn(model(x).shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    correction = consequent.attach(optimizer, model, damping=0)
    before, grads = weights(model), corrected(model, loss_on(x, target), samples=len(x), damping=0)
    loss_on(x, target)(model).backward()
    optimizer.step()
    tolerance = 1e-8 if dtype == torch.float64 else 1e-3
    size = max(g.norm() for g in grads.values())
    for name, w in weights(model).items():
        assert (before[name].double() - w.double() - LR * grads[name]).norm() <= tolerance * size, name
    assert correction.counters.skipped == 0


@pytest.mark.parametrize("rows", [4, 30], ids=["samples", "features"])
def test_the_pseudo_inverse_is_taken_of_the_inputs_not_of_their_gram(rows):
    """Singular values from 1 to 1e-6: squared in a Gram matrix, the small ones would lose all but four digits."""
    torch.manual_seed(0)
    model = nn.Linear(8, 2, bias=False).double()
    U, _, V = torch.linalg.svd(torch.randn(rows, 8).double(), full_matrices=False)
    x = U @ torch.diag(torch.logspace(0, -6, min(rows, 8), dtype=torch.float64)) @ V
    t = torch.randn(rows, 2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    consequent.attach(optimizer, model, damping=0)
    grads = corrected(model, loss_on(x, t), samples=rows, damping=0)
    loss_on(x, t)(model).backward()
    optimizer.step()
    assert_close(gradients(model), grads, tolerance=1e-7)


@pytest.mark.parametrize("side", ["samples", "features"])
@pytest.mark.parametrize("check", [True, False])
def test_a_factorisation_that_only_works_in_float64(side, check):
    """Equal samples (or features) of size 1e4 and λ = 1e-3: in float32 λ is lost and the second pivot is 0."""
    if side == "samples":
        x = torch.tensor([[1e4, 1e4, 0.0, 0.0], [1e4, 1e4, 0.0, 0.0]])
        t = torch.tensor([[1.0, 2.0], [1.0, 2.0]])
    else:
        x = torch.tensor([[2.0**13, 2.0**13], [-(2.0**13), -(2.0**13)]]).repeat(2, 1)  # the pivot is 0 exactly
        t = torch.tensor([[1.0, 2.0], [0.5, 0.1], [0.3, 1.0], [0.2, -1.0]])
    model = nn.Linear(x.shape[1], 2, bias=False)
    nn.init.zeros_(model.weight)
    gram = (x @ x.T if side == "samples" else x.T @ x) + 1e-3 * torch.eye(2)
    assert torch.linalg.cholesky_ex(gram)[1] > 0  # fails in float32 indeed
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    correction = consequent.attach(optimizer, model, damping=1e-3, check=check)
    before, grads = weights(model), corrected(model, loss_on(x, t), samples=len(x), damping=1e-3)
    loss_on(x, t)(model).backward()
    optimizer.step()
    assert_stepped(model, before, grads, tolerance=1e-3)
    counters = correction.counters
    assert (counters.rescued, counters.fallen_back, counters.skipped) == (1, 0, 0)


def break_factorisation(monkeypatch, size, message=None):
    """Factorising matrices of this size fails, in every dtype."""
    original, eigh = torch.linalg.cholesky_ex, torch.linalg.eigh

    def broken(matrix, **options):
        factor, info = original(matrix, **options)
        if matrix.shape[-1] == size:
            if message:
                raise ArithmeticError(message)
            return factor * float("nan"), torch.ones_like(info)
        return factor, info

    def broken_eigh(matrix):
        if matrix.shape[-1] == size:
            raise torch.linalg.LinAlgError("on purpose")
        return eigh(matrix)

    monkeypatch.setattr(torch.linalg, "cholesky_ex", broken)
    monkeypatch.setattr(torch.linalg, "eigh", broken_eigh)


def size_of_the_middle_layers_solve(kind, model, x, t):
    X, _ = observe(model, loss_on(x, t))[0]["2"]
    return min(len(X), X.shape[1] + 1)


def build_with_one_special_layer(kind):
    """Sizes at which only the layer "2" is solved."""
    if kind != "wide":
        return build(kind)
    torch.manual_seed(0)
    # 6 tokens per sample are pooled to 2 before the middle layer: it alone has another number of rows.

    class Pool(nn.Module):
        def forward(self, x):
            return x.relu().unflatten(1, (2, 3)).mean(2)

    model = nn.Sequential(nn.Linear(60, 40), Pool(), nn.Linear(40, 30), nn.ReLU(), nn.Flatten(), nn.Linear(60, 3))
    return model.double(), torch.randn(5, 6, 60).double(), torch.randn(5, 3).double()


@pytest.mark.parametrize("kind", KINDS)
def test_a_factorisation_that_fails_altogether_falls_back(kind, monkeypatch):
    """The plain gradient over λ + trace for that layer, the correction for the others; counted, warned of once."""
    model, x, t = build_with_one_special_layer(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    correction = consequent.attach(optimizer, model, damping=DAMPING)
    break_factorisation(monkeypatch, size_of_the_middle_layers_solve(kind, model, x, t))
    for step in range(2):
        optimizer.zero_grad()
        loss_on(x, t)(model).backward()
        before, grads = weights(model), corrected(model, loss_on(x, t), samples=len(x), shortened=["2"])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        assert len(caught) == (1 if step == 0 else 0)
        assert all("'2'" in str(w.message) and "damping" in str(w.message) for w in caught)
        assert_stepped(model, before, grads)
    assert correction.counters.fallen_back == 2
    assert correction.counters.rescued == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("failure", ["check", "exception"])
@pytest.mark.parametrize("by_hand", [True, False])
def test_a_failure_in_the_middle_layer_changes_nothing(kind, failure, by_hand, monkeypatch):
    model, x, t = build_with_one_special_layer(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    correction = consequent.attach(optimizer, model, damping=DAMPING, check=failure == "check")
    loss_on(x, t)(model).backward()
    before, plain = weights(model), gradients(model)
    error = torch.linalg.LinAlgError if failure == "check" else ArithmeticError
    with monkeypatch.context() as patch:
        size = size_of_the_middle_layers_solve(kind, model, x, t)
        break_factorisation(patch, size, None if failure == "check" else "on purpose")
        with pytest.raises(error):
            correction.step() if by_hand else optimizer.step()
    assert_same(weights(model), before)
    assert_same(gradients(model), plain)
    assert not optimizer.state
    optimizer.zero_grad()
    grads = corrected(model, loss_on(x, t), samples=len(x))
    loss_on(x, t)(model).backward()
    optimizer.step()
    assert_stepped(model, before, grads)


@pytest.mark.parametrize("side", ["samples", "features"])
def test_huge_but_finite_numbers_are_no_nan(side):
    """Inputs of 1e15: their squared norms of 1e30 are within float32, and nothing may be skipped or fail."""
    torch.manual_seed(0)
    rows = 3 if side == "samples" else 20
    model = nn.Linear(6, 2)
    x, t = 1e15 * torch.randn(rows, 6), torch.randn(rows, 2)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    correction = consequent.attach(optimizer, model, damping=DAMPING)
    grads = corrected(model, loss_on(x, t), samples=rows)
    loss_on(x, t)(model).backward()
    optimizer.step()
    assert correction.counters.skipped == 0
    assert_close({"weight": gradients(model)["weight"]}, {"weight": grads["weight"]}, tolerance=1e-2)


@pytest.mark.parametrize("rows", [3, 20], ids=["samples", "features"])
def test_plain_float16_gradients_whose_sum_overflows_are_finite(rows):
    """100 gradients of 1000 are finite in float16, whose largest number is 65504; nothing may be skipped."""

    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.shift = nn.Linear(8, 2), nn.Parameter(torch.zeros(100))

        def forward(self, x):
            return self.layer(x)

    torch.manual_seed(0)
    model = Shifted().half()
    x, t = torch.randn(rows, 8).half(), torch.randn(rows, 2).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    correction = consequent.attach(optimizer, model, damping=1.0)

    def loss_of(m):
        return loss_on(x, t)(m) + 1000 * m.shift.to(m.layer.weight.dtype).sum()

    grads = corrected(model, loss_of, samples=rows, damping=1.0)
    loss_on(x, t)(model).backward()
    model.shift.grad = torch.full_like(model.shift, 1000)
    optimizer.step()
    assert correction.counters.skipped == 0
    assert_close(gradients(model), grads, tolerance=1e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_output_gradients_of_zero(kind):
    """A batch that is fitted already: zero gradients, no NaN from recovering a factor of 0/0."""
    model, x, _ = build(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    correction = consequent.attach(optimizer, model, damping=DAMPING)
    before = weights(model)
    mean_loss(model(x), model(x).detach()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    assert_stepped(model, before, {})
    assert correction.counters.skipped == 0
    assert np.isfinite(float(sum(g.sum() for g in gradients(model).values())))


def test_warnings_point_at_the_users_line_and_come_again_if_nothing_trains():
    model, x, t = build("wide")
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    consequent.attach(optimizer, model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(12):
            optimizer.zero_grad()
            loss_on(x * float("nan"), t)(model).backward()
            optimizer.step()
    first, again = caught
    assert first.filename == again.filename == __file__
    assert "layer that is not corrected" not in str(first.message)
    assert "last 10 steps were all skipped" in str(again.message)


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.filterwarnings("ignore:NaN or inf")
def test_momentum_and_decay_where_the_device_is_not_waited_for(waits, monkeypatch):
    """As docs/reliability.md has it: a CPU's step is skipped, a GPU's is one with zero gradients."""
    if not waits:
        monkeypatch.setattr("consequent.engines.step.answers_at_once", lambda tensor: False)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.5)
    correction = consequent.attach(optimizer, model)
    inputs = torch.randn(5, 3, dtype=torch.float64)
    for is_bad in (False, True):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        momenta = [optimizer.state[p].get("momentum_buffer", torch.zeros(())).clone() for p in model.parameters()]
        optimizer.zero_grad()
        (model(inputs) * (torch.nan if is_bad else 1.0)).square().mean().backward()
        optimizer.step()
    assert correction.counters.skipped == 1
    for parameter, old, momentum in zip(model.parameters(), before, momenta, strict=True):
        expected = old if waits else old - 0.1 * (0.9 * momentum + 0.5 * old)
        torch.testing.assert_close(parameter.detach(), expected)


@pytest.mark.parametrize("clipped", [False, True])
def test_a_step_after_a_skipped_one_is_taken_although_the_layers_have_no_gradient(clipped):
    """All samples are masked, and only a penalty on another parameter is left."""
    torch.manual_seed(0)
    model, other = nn.Linear(3, 2), nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([*model.parameters(), other], lr=0.1)
    correction = consequent.attach(optimizer, model)
    model(torch.full((5, 3), torch.nan)).square().mean().backward()
    with pytest.warns(consequent.ConsequentWarning, match="NaN or inf"):
        optimizer.step()
    optimizer.zero_grad()
    ((model(torch.randn(5, 3)) * 0).square().mean() + other.square().sum()).backward()
    if clipped:
        torch.nn.utils.clip_grad_norm_([*model.parameters(), other], 100.0)
    optimizer.step()
    torch.testing.assert_close(other.detach(), torch.full((4,), 0.8))
    assert correction.counters.skipped == 1
