"""correction.foresight(): what was wanted, what the step really did, against independent computation."""

import math

import numpy as np
import pytest
import reference
import torch
from models.expected import half_squares, twin_of, watching
from torch import nn

import consequent
from consequent.statistics.moment import Moment

RTOL = 1e-5  # foresight is for looking at: float32 is enough


def close(actual, expected, rtol=RTOL):
    expected = np.asarray(expected, dtype=np.float64)
    actual = np.asarray(actual.detach() if isinstance(actual, torch.Tensor) else actual, dtype=np.float64)
    assert actual.shape == expected.shape
    scale = np.abs(expected).max() if expected.size else 0.0
    np.testing.assert_allclose(actual, expected, rtol=rtol, atol=rtol * scale)


def cosine(a, b):
    a, b = np.asarray(a).ravel(), np.asarray(b).ravel()
    return a @ b / math.sqrt((a @ a) * (b @ b))


def one_step(model, x, lr=0.3, damping=0.01, loss=half_squares, make=torch.optim.SGD, **options):
    """(foresight, calls of the twin with their ΔZ, weights before)."""
    twin = twin_of(model)
    optimizer = make(model.parameters(), lr=lr)
    correction = consequent.attach(optimizer, model, damping=damping, foresight=True, **options)
    loss(model(x)).backward()
    optimizer.step()
    with watching(twin) as calls:
        loss(twin(x)).backward()
    return correction.foresight(), calls, twin


# ---- off ------------------------------------------------------------------------------------------------------------


def test_off_is_an_error_and_keeps_no_rows():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 20, bias=False), nn.Linear(20, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    correction = consequent.attach(optimizer, model)
    half_squares(model(torch.randn(8, 3, dtype=torch.float64))).backward()
    records = correction._parts.corrector.records
    for layer in (model[0], model[2]):  # more samples than features: the second moment is all that is kept
        assert isinstance(records[layer.weight].statistic, Moment)
        (use,) = records[layer.weight].uses
        assert use.inputs is None
        assert use.output_grad is None
    optimizer.step()
    assert all(record.is_empty for record in records.values())
    with pytest.raises(RuntimeError, match="foresight is off: attach with foresight=True"):
        correction.foresight()


def test_before_the_first_step():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    correction = consequent.attach(optimizer, model, foresight=True)
    with pytest.raises(RuntimeError, match="there is no step to look at yet"):
        correction.foresight()


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam])
def test_training_is_bitwise_the_same_with_and_without(make):
    results = []
    for foresight in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv1d(2, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(12, 5), nn.Tanh(), nn.Linear(5, 2))
        optimizer = make(model.parameters(), lr=0.05)
        correction = consequent.attach(optimizer, model, foresight=foresight)
        for samples in (3, 17, 5, 40):
            optimizer.zero_grad()
            half_squares(model(torch.randn(samples, 2, 5))).backward()
            optimizer.step()
        assert correction.counters.steps == 4
        results.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# ---- the ideal step -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("damping", [0.0, 1e-9])
@pytest.mark.parametrize("lr", [1.0, 0.1])
def test_independent_inputs_without_damping_get_exactly_what_is_wanted(lr, damping, bias):
    torch.manual_seed(0)
    model = nn.Linear(10, 3, bias=bias).double()
    x = torch.randn(6, 10, dtype=torch.float64)
    seen, ((_, _, zero),), twin = one_step(model, x, lr=lr, damping=damping)
    (layer,) = seen.values()
    wanted = -lr * 6 * reference.to_numpy(zero.grad)
    close(layer.wanted[0], wanted)
    close(layer.produced[0], wanted)
    close(layer.produced[0], reference.to_numpy(model(x) - twin(x)))
    assert layer.ratio == pytest.approx(1, abs=1e-6)
    assert layer.cosine == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("samples", [1, 4, 12])
def test_all_numbers_of_a_linear_layer(samples):
    """Damped, and on both sides; the cosine of backpropagation from ΔZ·XᵀX."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3).double()
    x = torch.randn(samples, 5, dtype=torch.float64) + 1
    seen, ((_, _, zero),), twin = one_step(model, x, lr=0.3, damping=0.5)
    (layer,) = seen.values()
    X = np.concatenate([x.numpy(), np.ones((samples, 1))], axis=1)
    dZ = zero.grad.numpy()
    wanted = -0.3 * samples * dZ
    produced = -0.3 * samples * X @ reference.consequential_gradient(X, dZ, 0.5).T
    close(layer.wanted[0], wanted)
    close(layer.produced[0], produced)
    close(layer.produced[0], reference.to_numpy(model(x) - twin(x)))
    assert layer.ratio == pytest.approx(np.linalg.norm(produced) / np.linalg.norm(wanted), rel=RTOL)
    assert layer.cosine == pytest.approx(cosine(produced, wanted), abs=RTOL)
    assert layer.backprop_cosine == pytest.approx(cosine(X @ X.T @ dZ, dZ), abs=RTOL)
    close(layer.interference[0], X @ X.T)


@pytest.mark.parametrize("loss_reduction", ["sum", 2.5])
def test_the_divisor_of_the_loss(loss_reduction):
    torch.manual_seed(0)
    model = nn.Linear(5, 3).double()
    x = torch.randn(4, 5, dtype=torch.float64)
    seen, ((_, _, zero),), _ = one_step(model, x, loss_reduction=loss_reduction)
    close(seen[""].wanted[0], -0.3 * (1 if loss_reduction == "sum" else 2.5) * zero.grad.numpy())


# ---- convolutions and sequences -------------------------------------------------------------------------------------

CONVOLUTIONS = {
    "1d": (lambda: nn.Conv1d(2, 3, 3), (3, 2, 7)),
    "1d-stride-dilation": (lambda: nn.Conv1d(2, 3, 3, stride=2, dilation=2, padding=1), (3, 2, 9)),
    "1d-same-even": (lambda: nn.Conv1d(2, 3, 4, padding="same"), (2, 2, 6)),
    "2d-padding": (lambda: nn.Conv2d(2, 3, 3, padding=1), (3, 2, 4, 5)),
    "2d-no-bias": (lambda: nn.Conv2d(2, 3, 2, bias=False), (3, 2, 4, 4)),
    "2d-stride-leaves-border": (lambda: nn.Conv2d(2, 2, 2, stride=3), (2, 2, 7, 6)),
    "2d-rectangular": (lambda: nn.Conv2d(1, 2, (1, 3), stride=(2, 1), padding=(1, 2)), (3, 1, 4, 5)),
    "2d-reflect": (lambda: nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect"), (2, 2, 4, 4)),
    "2d-circular-dilation": (lambda: nn.Conv2d(1, 2, 2, padding=1, dilation=2, padding_mode="circular"), (2, 1, 4, 4)),
    "2d-replicate-stride": (lambda: nn.Conv2d(1, 2, 3, padding=1, stride=2, padding_mode="replicate"), (2, 1, 5, 5)),
    "2d-groups": (lambda: nn.Conv2d(4, 2, 3, groups=2, padding=1), (3, 4, 3, 3)),
    "2d-depthwise": (lambda: nn.Conv2d(3, 3, 2, groups=3), (2, 3, 4, 4)),
    "2d-kernel-1": (lambda: nn.Conv2d(3, 2, 1), (4, 3, 2, 2)),
    "3d": (lambda: nn.Conv3d(1, 2, 2, stride=(1, 2, 1), padding=(0, 1, 0)), (2, 1, 3, 4, 3)),
    "unbatched": (lambda: nn.Conv2d(2, 3, 3, padding=1), (2, 4, 5)),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_interference_of_images_is_the_sum_over_positions(name):
    """Σₚ x_{a,p} · x_{b,p} over explicit patches, a constant 1 for the bias at every position."""
    torch.manual_seed(0)
    make, shape = CONVOLUTIONS[name]
    layer = make().double()
    model = nn.Sequential(layer)
    x = torch.randn(*shape, dtype=torch.float64)
    seen, ((_, _, zero),), twin = one_step(model, x, lr=0.01, loss=lambda z: half_squares(z.reshape(-1)))
    batched = len(shape) == len(layer.kernel_size) + 2
    samples = shape[0] if batched else 1
    expected = np.zeros((samples, samples))
    for group in reference.conv_patches(x, layer):
        patches = group.reshape(samples, -1, group.shape[1])
        for a in range(samples):
            for b in range(samples):
                expected[a, b] += np.sum(patches[a] * patches[b])
    if layer.bias is not None:
        expected += zero.grad[0].numel() / layer.out_channels if batched else zero.grad.numel() / layer.out_channels
    found = seen["0"]
    close(found.interference[0], expected)
    assert found.interference[0].shape == (samples, samples)
    close(found.wanted[0], -0.01 * samples * zero.grad.numpy())
    close(found.produced[0], reference.to_numpy(model(x) - twin(x)))


def test_interference_of_sequences_is_per_sample():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2)).double()
    x = torch.randn(4, 5, 3, dtype=torch.float64)
    seen, _, twin = one_step(model, x)
    expected = np.array([[np.sum(x[a].numpy() * x[b].numpy()) + 5 for b in range(4)] for a in range(4)])
    close(seen["0"].interference[0], expected)
    close(seen["0"].produced[0], reference.to_numpy(model(x) - twin(x)))


def test_no_matrix_of_positions_by_positions():
    """32×32 positions of 2 images: positions × positions would be 2048² numbers."""
    model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1))
    x = torch.randn(2, 1, 32, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    correction = consequent.attach(optimizer, model, foresight=True)
    sizes = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            sizes.extend(t.numel() for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, torch.Tensor))
            return result

    with Sizes():
        half_squares(model(x)).backward()
        optimizer.step()
        seen = correction.foresight()
    assert max(sizes) < 10 * 2 * 32 * 32 * 9
    patches = reference.conv_patches(x, model[0])[0].reshape(2, -1)
    close(seen["0"].interference[0], patches @ patches.T + 32 * 32, rtol=1e-4)


# ---- repeated calls, shared weights, biases alone -------------------------------------------------------------------


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        return self.layer(torch.tanh(self.layer(x)))


@pytest.mark.parametrize("samples", [1, 5])
def test_repeated_calls(samples):
    torch.manual_seed(0)
    model = Twice().double()
    x = torch.randn(samples, 3, dtype=torch.float64)
    seen, calls, twin = one_step(model, x, damping=0.1)
    found = seen["layer"]
    assert len(found.wanted) == len(found.produced) == len(found.interference) == len(calls) == 2
    X = [np.concatenate([inputs.numpy(), np.ones((samples, 1))], axis=1) for _, inputs, _ in calls]
    dZ = [zero.grad.numpy() for _, _, zero in calls]
    update = reference.consequential_gradient(np.concatenate(X), np.concatenate(dZ), 0.1)
    scale = -0.3 * samples
    # The calls come in the order of the backward pass, the last one first.
    for place, call in ((0, 1), (1, 0)):
        close(found.wanted[place], scale * dZ[call])
        close(found.produced[place], scale * X[call] @ update.T)
        close(found.interference[place], X[call] @ X[call].T)
    produced, wanted = scale * np.concatenate(X) @ update.T, scale * np.concatenate(dZ)
    assert found.ratio == pytest.approx(np.linalg.norm(produced) / np.linalg.norm(wanted), rel=RTOL)
    assert found.cosine == pytest.approx(cosine(produced, wanted), abs=RTOL)
    close(reference.to_numpy(model.layer.weight - twin.layer.weight), scale * update[:, :3])


@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_only_the_bias_is_trained(kind):
    torch.manual_seed(0)
    layer = nn.Linear(4, 3) if kind == "linear" else nn.Conv1d(2, 3, 3)
    layer.weight.requires_grad_(False)
    model = nn.Sequential(layer).double()
    x = torch.randn(5, 4, dtype=torch.float64) if kind == "linear" else torch.randn(5, 2, 6, dtype=torch.float64)
    seen, ((_, _, zero),), twin = one_step(model, x)
    found = seen["0"]
    positions = 1 if kind == "linear" else 4
    close(found.wanted[0], -0.3 * 5 * zero.grad.numpy())
    close(found.produced[0], reference.to_numpy(model(x) - twin(x)))
    close(found.interference[0], np.full((5, 5), float(positions)))


def test_only_the_weight_is_trained():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3)).double()
    model[0].bias.requires_grad_(False)
    x = torch.randn(3, 4, dtype=torch.float64)
    seen, _, twin = one_step(model, x)
    close(seen["0"].interference[0], x.numpy() @ x.numpy().T)
    close(seen["0"].produced[0], reference.to_numpy(model(x) - twin(x)))


# ---- true units -----------------------------------------------------------------------------------------------------

FREEZE = {"both": (), "weight-only": ("bias",), "bias-only": ("weight",)}


def frozen_linear(trained, features=6):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(features, 3))
    for kind in FREEZE[trained]:
        getattr(model[0], kind).requires_grad_(False)
    return model


@pytest.mark.parametrize("trained", FREEZE)
@pytest.mark.parametrize("samples", [3, 20])
def test_norm_clipping_shortens_what_is_wanted(samples, trained):
    model = frozen_linear(trained).double()
    twin = twin_of(model)
    x = torch.randn(samples, 6, dtype=torch.float64)
    with watching(twin) as calls:
        half_squares(twin(x)).backward()
    factor = 0.01 / nn.utils.get_total_norm([p.grad for p in twin.parameters() if p.grad is not None])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    correction = consequent.attach(optimizer, model, damping=1e-9, foresight=True)
    half_squares(model(x)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()
    found = correction.foresight()["0"]
    zero = calls[0][2]
    close(found.wanted[0], -0.3 * samples * float(factor) * zero.grad.numpy(), rtol=1e-4)
    close(found.produced[0], reference.to_numpy(model(x) - twin(x)), rtol=1e-4)


@pytest.mark.parametrize("trained", FREEZE)
@pytest.mark.parametrize("samples", [3, 20])
def test_a_loss_scale_is_not_in_what_is_wanted(samples, trained):
    model = frozen_linear(trained)
    twin = twin_of(model).double()
    x = torch.randn(samples, 6)
    with watching(twin) as calls:
        half_squares(twin(x.double())).backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    correction = consequent.attach(optimizer, model, damping=1e-3, foresight=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(half_squares(model(x))).backward()
    scaler.step(optimizer)
    scaler.update()
    found = correction.foresight()["0"]
    close(found.wanted[0], -0.3 * samples * calls[0][2].grad.numpy(), rtol=1e-4)
    close(found.produced[0], reference.to_numpy(model.double()(x.double()) - twin(x.double())), rtol=1e-3)


def test_each_group_has_its_own_learning_rate():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    twin = twin_of(model)
    x = torch.randn(3, 4, dtype=torch.float64)
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.03}]
    optimizer = consequent.CSGD(model, groups, lr=0.3, foresight=True)
    half_squares(model(x)).backward()
    optimizer.step()
    with watching(twin) as calls:
        half_squares(twin(x)).backward()
    seen = optimizer.correction.foresight()
    assert set(seen) == {"0", "2"}
    for (_, _, zero), name, lr in zip(calls, ("0", "2"), (0.3, 0.03), strict=True):
        close(seen[name].wanted[0], -lr * 3 * zero.grad.numpy())


def test_maximising_wants_the_opposite():
    torch.manual_seed(0)
    model = nn.Linear(8, 2).double()
    x = torch.randn(3, 8, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, maximize=True)
    correction = consequent.attach(optimizer, model, damping=1e-9, foresight=True)
    half_squares(model(x)).backward()
    optimizer.step()
    assert correction.foresight()[""].cosine == pytest.approx(1, abs=1e-5)


def test_it_is_the_last_step_that_is_looked_at():
    """Also when that step was skipped: an older one must not pass for it."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    correction = consequent.attach(optimizer, model, foresight=True)
    x = torch.randn(3, 4, dtype=torch.float64)
    for scale in (1, 2):
        twin = twin_of(model)
        optimizer.zero_grad()
        half_squares(model(scale * x)).backward()
        optimizer.step()
        found = correction.foresight()[""]
        close(found.produced[0], reference.to_numpy(model(scale * x) - twin(scale * x)))
    optimizer.zero_grad()
    half_squares(model(x * math.nan)).backward()
    with pytest.warns(consequent.ConsequentWarning, match="skipped"):
        optimizer.step()
    with pytest.raises(RuntimeError, match=r"skipped|no step"):
        correction.foresight()


def test_the_table():
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module("a_long_name", nn.Linear(6, 5))
    model.add_module("act", nn.Tanh())
    model.add_module("head", nn.Linear(5, 2))
    seen, *_ = one_step(model.double(), torch.randn(3, 6, dtype=torch.float64))
    lines = str(seen).splitlines()
    assert lines[1].split() == ["layer", "produced/wanted", "the", "step", "correction", "backpropagation"]
    rows = {line.split()[0]: [float(cell) for cell in line.split()[1:]] for line in lines[2:]}
    assert set(rows) == {"a_long_name", "head"}
    for name, (ratio, cos, correction, backprop) in rows.items():
        assert ratio == pytest.approx(seen[name].ratio, abs=1e-4)
        assert cos == pytest.approx(seen[name].cosine, abs=1e-3)
        assert correction == pytest.approx(seen[name].corrected_cosine, abs=1e-3)
        assert backprop == pytest.approx(seen[name].backprop_cosine, abs=1e-3)
    assert len({len(line) for line in lines[1:]}) == 1


@pytest.mark.parametrize(
    "make", [torch.optim.Adam, lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9, nesterov=True)]
)
def test_the_correction_apart_from_what_the_optimizer_makes_of_it(make):
    """Momentum and Adam bend the step; the corrected gradient still points at the targets."""
    torch.manual_seed(0)
    model = nn.Linear(12, 3).double()
    optimizer = make(model.parameters(), lr=1e-3)
    correction = consequent.attach(optimizer, model, damping=1e-9, foresight=True)
    for _ in range(3):
        optimizer.zero_grad()
        half_squares(model(torch.randn(4, 12, dtype=torch.float64))).backward()
        optimizer.step()
    (layer,) = correction.foresight().values()
    assert layer.corrected_cosine == pytest.approx(1, abs=1e-6)
    assert abs(layer.cosine) < 0.99


def test_a_layer_is_shown_without_its_numbers():
    torch.manual_seed(0)
    model = nn.Linear(30, 20)
    optimizer = consequent.CSGD(model, lr=0.1, foresight=True)
    model(torch.randn(50, 30)).square().mean().backward()
    optimizer.step()
    (layer,) = optimizer.correction.foresight().values()
    shown = repr(layer)
    assert len(shown) < 250
    assert "wanted: [50, 20]" in shown
    assert f"cosine={layer.cosine:.4g}" in shown
