"""The bound on how much a step changes a layer's outputs, against an independent computation in float64."""

import math
from itertools import pairwise

import pytest
import torch
from torch import nn

import consequent
from consequent.engines import step as engine
from consequent.maths.bound import DEFAULT

pytestmark = pytest.mark.usefixtures("bounded")


def network(kind):
    torch.manual_seed(0)
    if kind == "dense, few rows":
        return nn.Sequential(nn.Linear(30, 20), nn.Tanh(), nn.Linear(20, 9, bias=False)), torch.randn(8, 30)
    if kind == "dense, many rows":
        return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)), torch.randn(40, 6)
    return nn.Sequential(nn.Conv2d(4, 6, 3, groups=2), nn.ReLU(), nn.Conv2d(6, 2, 2)), torch.randn(5, 4, 7, 7)


KINDS = ("dense, few rows", "dense, many rows", "convolutions")


def rows_of(layer, inputs):
    """``[groups, rows, D]``, the bias's column of ones the last, and the outputs of a group."""
    if isinstance(layer, nn.Linear):
        X = inputs.reshape(1, -1, layer.in_features)
    else:
        patches = nn.functional.unfold(inputs, layer.kernel_size).movedim(1, -1)
        X = patches.reshape(-1, patches.shape[-1]).unflatten(-1, (layer.groups, -1)).movedim(1, 0)
    return X if layer.bias is None else torch.cat([X, torch.ones_like(X[..., :1])], -1)


def expected_shortenings(model, inputs, loss_of, rho, rate, bound):
    """By autograd and solves with explicit matrices: the factor for each layer."""
    seen, outputs = {}, {}

    def note(layer, args, output):
        output.retain_grad()
        seen[layer], outputs[layer] = args[0].detach(), output

    hooks = [layer.register_forward_hook(note) for layer in model if hasattr(layer, "weight")]
    loss_of(model(inputs)).backward()
    for hook in hooks:
        hook.remove()
    found = []
    for layer, x in seen.items():
        X = rows_of(layer, x)
        groups, rows, columns = X.shape
        dZ = outputs[layer].grad.movedim(1, -1).reshape(rows, groups, -1).movedim(1, 0)
        G = dZ.mT @ X
        S = X.mT @ X
        traces = S.diagonal(dim1=-2, dim2=-1).sum(-1)
        damped = S + (rho * traces / min(rows, columns))[:, None, None] * torch.eye(columns, dtype=S.dtype)
        U = G @ torch.linalg.inv(damped)
        size = rate * len(inputs) * math.sqrt((U * G).sum())
        allowed = bound * math.sqrt(traces.sum() / (groups * columns) * dZ.shape[-1] * groups)
        found.append(min(1.0, allowed / size))
    model.zero_grad()
    return found


def corrected(model, inputs, loss_of, optimizer, **options):
    correction = consequent.attach(optimizer, model, **options)
    optimizer.zero_grad()
    loss_of(model(inputs)).backward()
    optimizer.step()
    return [layer.weight.grad.clone() for layer in model if hasattr(layer, "weight")], correction


def half_squares(outputs):
    return outputs.square().sum() / 2 / len(outputs)


@pytest.mark.parametrize("momentum", [{}, {"momentum": 0.9}, {"momentum": 0.5, "dampening": 0.5}], ids=str)
@pytest.mark.parametrize("rate", [0.01, 0.3, 5.0])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_shortened_by_what_the_definition_says(kind, rate, momentum):
    model, inputs = network(kind)
    model, inputs = model.double(), inputs.double()
    m = momentum.get("momentum", 0.0)
    length = rate / (1 - m)  # of a first step, which torch does not dampen
    wanted = expected_shortenings(model, inputs, half_squares, 0.1, length, 0.2)
    free, _ = corrected(model, inputs, half_squares, torch.optim.SGD(model.parameters(), lr=0.0), bound=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, **momentum)
    found, correction = corrected(model, inputs, half_squares, optimizer, bound=0.2)
    for one, other, factor in zip(found, free, wanted, strict=True):
        torch.testing.assert_close(one, other * factor, rtol=1e-6, atol=1e-12)
    assert correction.counters.bounded == sum(factor < 1 for factor in wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_where_nothing_is_wrong_it_changes_no_bit(kind):
    model, inputs = network(kind)
    free, _ = corrected(model, inputs, half_squares, torch.optim.SGD(model.parameters(), lr=0.0), bound=None)
    found, correction = corrected(model, inputs, half_squares, torch.optim.SGD(model.parameters(), lr=1e-3))
    assert correction.bound == DEFAULT
    assert correction.counters.bounded == 0
    assert all(torch.equal(one, other) for one, other in zip(found, free, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_device_that_is_not_waited_for_does_the_same(kind, monkeypatch):
    model, inputs = network(kind)
    found, correction = corrected(model, inputs, half_squares, torch.optim.SGD(model.parameters(), lr=2.0))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(2.0 * parameter.grad)  # back to where it was
    monkeypatch.setattr(engine, "answers_at_once", lambda tensor: False)
    unseen, other = corrected(model, inputs, half_squares, torch.optim.SGD(model.parameters(), lr=2.0))
    for one, two in zip(found, unseen, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-7)
    assert other.counters.bounded == correction.counters.bounded > 0


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.filterwarnings("ignore:NaN or inf")
def test_what_is_not_applied_is_not_counted(waits, monkeypatch):
    """The last layer's gradient is NaN, the first one's is finite and too long."""
    if not waits:
        monkeypatch.setattr(engine, "answers_at_once", lambda tensor: False)
    model, inputs = network("dense, few rows")
    optimizer = torch.optim.SGD(model.parameters(), lr=100.0)
    correction = consequent.attach(optimizer, model)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for is_bad in (True, False):
        optimizer.zero_grad()
        half_squares(model(inputs)).backward()
        if is_bad:
            model[2].weight.grad[0, 0] = math.nan
        optimizer.step()
        assert correction.counters.skipped == 1
        assert correction.counters.bounded == (0 if is_bad else 2)
        moved = [not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)]
        assert not any(moved) if is_bad else all(moved)


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.RMSprop])
def test_optimisers_whose_steps_have_their_own_length_are_not_bounded(optimizer):
    model, inputs = network("dense, few rows")
    _, correction = corrected(model, inputs, half_squares, optimizer(model.parameters(), lr=100.0))
    assert correction.counters.bounded == 0


def test_gradients_corrected_by_hand_are_not_bounded():
    """They may be a GradScaler's, whose scale would be taken for a step that is far too long."""
    model, inputs = network("dense, few rows")
    free, _ = corrected(model, inputs, half_squares, torch.optim.SGD(model.parameters(), lr=0.0), bound=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    correction = consequent.attach(optimizer, model)
    optimizer.zero_grad()
    (1024.0 * half_squares(model(inputs))).backward()
    correction.step()
    found = [layer.weight.grad / 1024.0 for layer in model if hasattr(layer, "weight")]
    for one, other in zip(found, free, strict=True):
        torch.testing.assert_close(one, other)
    assert correction.counters.bounded == 0


def test_a_single_layer_lands_on_its_targets():
    torch.manual_seed(0)
    model, inputs = nn.Linear(10, 3).double(), torch.randn(4, 10, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    consequent.attach(optimizer, model, damping=1e-9)
    ((model(inputs) - 1e3).square().sum() / 2 / 4).backward()
    optimizer.step()
    torch.testing.assert_close(model(inputs), torch.full((4, 3), 1e3, dtype=torch.float64))


@pytest.mark.parametrize(
    ("bad", "error"), [(0, ValueError), (-1, ValueError), (math.nan, ValueError), ("much", TypeError)]
)
def test_what_is_no_bound_is_refused(bad, error):
    with pytest.raises(error, match=r"bound must be.*0\.2 is usual"):
        consequent.Consequentialism(nn.Linear(2, 2), bound=bad)
    correction = consequent.Consequentialism(nn.Linear(2, 2))
    with pytest.raises(error, match="bound must be"):
        correction.bound = bad


def sgd_and_adam(model):
    return [torch.optim.SGD(model[0].parameters()), torch.optim.Adam(model[1].parameters())]


IN_VAIN = {
    "under Adam": (lambda model: torch.optim.Adam(model.parameters()), {}),
    "with several optimisers": (sgd_and_adam, {}),
    'with at="backward"': (lambda model: torch.optim.SGD(model.parameters()), {"at": "backward"}),
}


@pytest.mark.parametrize("where", IN_VAIN)
def test_one_that_would_do_nothing_is_refused(where):
    make, options = IN_VAIN[where]
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = make(model)
    refused = pytest.raises(ValueError, match=rf"bound=0\.5 would do nothing {where}.*Leave bound= out")
    with refused:
        consequent.attach(optimizer, model, bound=0.5, **options)
    for bound in (DEFAULT, None):
        correction = consequent.attach(optimizer, model, bound=bound, **options)
        with refused:
            correction.bound = 0.5
        assert correction.bound == bound
        correction.bound = DEFAULT
        correction.load_state_dict({**correction.state_dict(), "bound": 0.5})  # as one of SGD, or of earlier versions
        assert "bound: off" in repr(correction)
        correction.detach()


@pytest.mark.parametrize("kept", ["state", "options"])
def test_copies_and_earlier_pickles_that_have_such_a_one_are_loaded(kept):
    """Those of earlier versions had no state of the correction."""
    for make in (consequent.CSGD, consequent.CAdam):
        optimizer = make(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))
        optimizer.correction.load_state_dict({**optimizer.correction.state_dict(), "bound": 0.5})
        state = optimizer.__getstate__()
        if kept == "options":
            del state["correction_state"]
        copied = make.__new__(make)
        copied.__setstate__(state)
        assert copied.correction.bound == 0.5


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("rate", [1.0, 10.0])
def test_a_rate_far_too_high_ends_in_a_slow_run(rate, momentum):
    """A deep autoencoder of noise: without the bound all of these are NaN, or 10¹⁰ and more."""
    torch.manual_seed(0)
    widths = (20, 16, 12, 4, 12, 16, 20)
    layers = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), nn.Tanh())]
    model, data = nn.Sequential(*layers[:-1]), torch.randn(64, 20)
    optimizer = consequent.CSGD(model, lr=rate, momentum=momentum, loss_reduction="mse")
    for _ in range(200):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(data), data)
        loss.backward()
        optimizer.step()
    assert loss < 3
    assert optimizer.correction.counters.bounded > 0


def test_an_empty_batch_has_nothing_to_bound():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    consequent.attach(optimizer, model)
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.randn(0, 3)).sum().backward()
    optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))
