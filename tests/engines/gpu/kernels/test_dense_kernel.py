import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from consequent.engines.gpu.kernels import dense
from consequent.engines.gpu.kernels.dense import DenseLayer, DenseStep

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = 1e-4


def make_layer(
    rows, features, outputs, *, bias=True, damping=0.1, of_trace=False, scale=3.0, factor=1.0, seed=0
) -> DenseLayer:
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(rows, features, generator=generator).to(DEVICE)
    dZ = torch.randn(rows, outputs, generator=generator).to(DEVICE)
    weight_grad = factor * (dZ.double().mT @ X.double()).float()
    bias_grad = factor * dZ.sum(0) if bias else None
    return DenseLayer(X, dZ, weight_grad, bias_grad, damping, of_trace, scale, TOLERANCE)


def with_ones(layer):
    X = layer.inputs.double()
    return X if layer.bias_grad is None else torch.cat([X, torch.ones_like(X[:, :1])], 1)


def gram_and_level(layer):
    X = with_ones(layer)
    gram = X @ X.mT
    return gram, layer.damping * gram.trace().item() if layer.of_trace else layer.damping


def reference(layer, factor=1.0):
    gram, level = gram_and_level(layer)
    A = torch.linalg.solve(gram + level * torch.eye(len(gram), device=DEVICE), layer.output_grads.double())
    return layer.scale * factor * A.mT @ with_ones(layer)


def shortened(layer):
    gram, level = gram_and_level(layer)
    return layer.scale * gradient(layer).double() / (gram.trace() + level)


def gradient(layer):
    parts = [layer.weight_grad] + ([] if layer.bias_grad is None else [layer.bias_grad[:, None]])
    return torch.cat(parts, 1)


def flags_for(layers, bad=0):
    return torch.tensor([bad] + [0] * len(layers), dtype=torch.int32, device=DEVICE)


def prepare(layers, flags):
    step = DenseStep(layers, flags)
    step.factorise()
    step.solve()
    step.look()
    return step


def rewrite(layers, bad=0, **counted):
    """Runs all launches; returns whether something was bad, and what was added to the counts."""
    flags = flags_for(layers, bad)
    before = (10, 20, 30, 40, 50, 60)
    counts = torch.tensor(before, device=DEVICE)
    prepare(layers, flags).write(counts, **counted)
    return flags[0].item(), [count - base for count, base in zip(counts.tolist(), before, strict=True)]


def assert_close(layer, wanted, tolerance=2e-5):
    error = (gradient(layer).double() - wanted).abs().max() / wanted.abs().max()
    assert error < tolerance


SETS = {
    "one": [(1, 1, 1, {})],
    "single row": [(1, 40, 3, {}), (1, 5, 70, {"bias": False})],
    "batch of 32": [
        (32, 140, 130, {}),
        (32, 128, 64, {"bias": False, "factor": 0.3}),
        (32, 64, 10, {"of_trace": True, "damping": 0.01 / 32}),
    ],
    "rows differ": [
        (64, 131, 20, {}),
        (3, 200, 150, {"of_trace": True}),
        (17, 9, 33, {"factor": 1e-6, "damping": 1.0}),
    ],
    "more rows than features": [(40, 7, 12, {"damping": 2.0}), (33, 1, 5, {"bias": False, "damping": 0.5})],
    "many outputs": [(5, 30, 300, {"factor": -2.0})],
    "batch of 128": [
        (128, 140, 150, {"factor": 0.7, "damping": 3.0}),
        (100, 200, 10, {"of_trace": True, "damping": 1e-3}),
    ],
}


@pytest.mark.parametrize("name", SETS)
def test_float64_reference(name):
    shapes = SETS[name]
    layers = [make_layer(*shape, **options, seed=seed) for seed, (*shape, options) in enumerate(shapes)]
    wanted = [reference(layer, options.get("factor", 1.0)) for layer, (*_, options) in zip(layers, shapes, strict=True)]
    assert rewrite(layers) == (0, [0, 0, 0, 0, 0, 0])
    for layer, right in zip(layers, wanted, strict=True):
        assert_close(layer, right)


def write_unread(layers):
    """The same where there is no gradient yet; returns the counts."""
    step = DenseStep(layers, flags_for(layers))
    step.factorise()
    step.solve()
    counts = torch.zeros(6, dtype=torch.int64, device=DEVICE)
    step.write(counts, is_looked_at=False)
    return counts.tolist()


def without_gradient(layer):
    unread = {"weight_grad": torch.full_like(layer.weight_grad, torch.nan)}
    if layer.bias_grad is not None:
        unread["bias_grad"] = torch.full_like(layer.bias_grad, torch.nan)
    return layer._replace(**unread)


@pytest.mark.parametrize("name", ["one", "rows differ", "batch of 128"])
def test_without_a_gradient_to_look_at(name):
    layers = [make_layer(*shape, **options, seed=seed) for seed, (*shape, options) in enumerate(SETS[name])]
    wanted = [reference(layer) for layer in layers]
    layers = [without_gradient(layer) for layer in layers]
    assert write_unread(layers) == [0, 0, 0, 0, 0, 0]
    for layer, right in zip(layers, wanted, strict=True):
        assert_close(layer, right)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, in the interpreter
@pytest.mark.parametrize("where", ["inputs", "output_grads"])
def test_what_is_not_finite_stays_in_its_own_layer_where_nobody_looks(where):
    layers = [make_layer(6, 50, 40, seed=seed) for seed in range(2)]
    wanted = reference(layers[1])
    getattr(layers[0], where)[2, 3] = torch.inf
    layers = [without_gradient(layer) for layer in layers]
    write_unread(layers)
    assert not gradient(layers[0]).sum().isfinite()
    assert_close(layers[1], wanted)


def test_no_factor_and_nobody_who_looks():
    layer = make_layer(6, 50, 40, damping=-1000.0)
    gram, level = gram_and_level(layer)
    wanted = layer.scale * (layer.output_grads.double().mT @ with_ones(layer)) / (gram.trace() + level)
    layer = without_gradient(layer)
    assert write_unread([layer]) == [0, 0, 0, 1, 0, 0]
    assert_close(layer, wanted)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("rows", "features", "outputs"), [(8, 50, 40), (40, 70, 130), (3, 20, 300)])
def test_a_step_that_would_change_the_outputs_too_much_is_shortened(rows, features, outputs, bias):
    layers = [make_layer(rows, features, outputs, bias=bias, factor=0.5, seed=seed) for seed in range(3)]
    shorter = []
    for layer in layers:
        gram, level = gram_and_level(layer)
        A = 0.5 * torch.linalg.solve(gram + level * torch.eye(rows, device=DEVICE), layer.output_grads.double())
        U, G = A.mT @ with_ones(layer), gradient(layer).double()
        allowed = (gram.trace() / (features + bias) * outputs).sqrt()
        shorter.append((allowed / (U * G).sum().sqrt()).item())
    limits = (0.3 / shorter[0], 0.99 / shorter[1], 1.01 / shorter[2])
    layers = [layer._replace(limit=limit) for layer, limit in zip(layers, limits, strict=True)]
    wanted = [reference(layer, 0.5 * part) for layer, part in zip(layers, (0.3, 0.99, 1.0), strict=True)]
    assert rewrite(layers) == (0, [0, 0, 0, 0, 0, 2])
    for layer, right in zip(layers, wanted, strict=True):
        assert_close(layer, right)


def test_more_tiles_than_programs(monkeypatch):
    monkeypatch.setattr(dense, "_PROBERS", 4)
    monkeypatch.setattr(dense, "_WRITERS", 4)
    layers = [make_layer(2, 300, 200, factor=0.7), make_layer(4, 20, 20)]
    wanted = [reference(layers[0], 0.7), reference(layers[1])]
    assert rewrite(layers) == (0, [0, 0, 0, 0, 0, 0])
    for layer, right in zip(layers, wanted, strict=True):
        assert_close(layer, right)


def test_rows_with_a_stride_and_odd_addresses():
    wide = torch.randn(8, 90, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    layer = make_layer(8, 40, 30)
    layer = layer._replace(inputs=wide[:, 1:41], output_grads=wide[:, 45:75])
    layer.weight_grad.copy_(layer.output_grads.mT @ layer.inputs)
    layer.bias_grad.copy_(layer.output_grads.sum(0))
    right = reference(layer)
    rewrite([layer])
    assert_close(layer, right)


def test_nothing_is_written_before_the_last_launch():
    layer = make_layer(6, 20, 9)
    before = gradient(layer)
    prepare([layer], flags_for([layer]))
    assert torch.equal(gradient(layer), before)


@pytest.mark.parametrize("kind", ["weight", "bias", "sign of one row"])
def test_an_edited_gradient_is_shortened(kind):
    edited, kept = make_layer(5, 50, 40, seed=1), make_layer(4, 50, 40, seed=2, factor=0.5)
    if kind == "weight":
        edited.weight_grad.clamp_(-0.5, 0.5)
    elif kind == "bias":
        edited.bias_grad.add_(5.0)
    else:
        edited.weight_grad[3].neg_()
    wanted = shortened(edited), reference(kept, 0.5)
    assert rewrite([edited, kept]) == (0, [0, 0, 0, 0, 1, 0])
    assert_close(edited, wanted[0])
    assert_close(kept, wanted[1])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("rows", "features", "outputs"), [(5, 50, 40), (40, 150, 300)])
def test_an_edited_gradient_is_bounded_too(rows, features, outputs, bias):
    layers = [make_layer(rows, features, outputs, bias=bias, seed=seed) for seed in range(2)]
    limits = []
    for layer, part in zip(layers, (0.3, 1.01), strict=True):
        layer.weight_grad.clamp_(-0.5, 0.5)
        gram, level = gram_and_level(layer)
        energy = gradient(layer).double().square().sum() / (gram.trace() + level)
        limits.append(part * (energy / (gram.trace() / (features + bias) * outputs)).sqrt().item())
    layers = [layer._replace(limit=limit) for layer, limit in zip(layers, limits, strict=True)]
    wanted = [part * shortened(layer) for layer, part in zip(layers, (0.3, 1.0), strict=True)]
    assert rewrite(layers) == (0, [0, 0, 0, 0, 2, 1])
    for layer, right in zip(layers, wanted, strict=True):
        assert_close(layer, right)


def test_a_gradient_of_zeros_gives_zeros():
    layer, other = make_layer(4, 50, 40, factor=0.0), make_layer(2, 20, 10)
    layer.output_grads.zero_()
    wanted = reference(other)
    assert rewrite([layer, other]) == (0, [0, 0, 0, 0, 0, 0])
    assert not gradient(layer).any()
    assert_close(other, wanted)


def test_inputs_of_zeros_under_relative_damping():
    layer = make_layer(8, 50, 40, bias=False, of_trace=True)
    layer.inputs.zero_()
    layer.weight_grad.zero_()
    assert rewrite([layer]) == (0, [0, 0, 0, 0, 0, 0])
    assert not gradient(layer).any()


@pytest.mark.parametrize("size", [1e-18, 1e19])
def test_tiny_and_huge_gradients(size):
    """A GradScaler's are; the squares of the probes would vanish or overflow."""
    layer = make_layer(8, 50, 40)
    layer.output_grads.mul_(size)
    layer.weight_grad.mul_(size * 0.5)
    layer.bias_grad.mul_(size * 0.5)
    right = reference(layer, 0.5)
    assert rewrite([layer]) == (0, [0, 0, 0, 0, 0, 0])
    assert_close(layer, right)


@pytest.mark.parametrize("place", ["inputs", "output_grads", "weight_grad", "bias_grad"])
def test_not_finite_anywhere_zeroes_all(place):
    layers = [make_layer(3, 50, 40), make_layer(2, 20, 10, bias=False)]
    getattr(layers[0], place).view(-1)[7] = float("inf" if place == "weight_grad" else "nan")
    assert rewrite(layers) == (1, [0, 0, 0, 0, 0, 0])
    for layer in layers:
        assert not gradient(layer).any()


def test_bad_beforehand_zeroes_all():
    layers = [make_layer(3, 50, 40), make_layer(2, 20, 10, bias=False)]
    assert rewrite(layers, bad=1) == (1, [0, 0, 0, 0, 0, 0])
    for layer in layers:
        assert not gradient(layer).any()


def test_a_row_that_is_there_twice_gets_more_damping():
    layer, other = make_layer(8, 50, 40, damping=1e-12, scale=1.0), make_layer(8, 20, 10)
    layer.inputs[5] = layer.inputs[2]
    layer.output_grads[5] = layer.output_grads[2]
    layer.weight_grad.copy_(layer.output_grads.mT @ layer.inputs)
    layer.bias_grad.copy_(layer.output_grads.sum(0))
    wanted = reference(other)
    assert rewrite([layer, other]) == (0, [0, 0, 1, 0, 0, 0])
    moved = with_ones(layer) @ gradient(layer).double().mT
    torch.testing.assert_close(moved, layer.output_grads.double(), rtol=1e-4, atol=1e-4)
    assert_close(other, wanted)


def test_a_matrix_without_a_factor_falls_back():
    layer, other = make_layer(8, 50, 40, damping=-100.0, factor=0.5), make_layer(8, 20, 10)
    wanted = shortened(layer), reference(other)
    assert rewrite([layer, other]) == (0, [0, 0, 0, 1, 0, 0])
    assert_close(layer, wanted[0])
    assert_close(other, wanted[1])


def test_as_accurate_as_cholesky_where_rows_nearly_depend():
    """What counts is the consequence ``X ΔŴᵀ``, not the digits of an ill-conditioned solution."""
    layer = make_layer(32, 60, 40, bias=False, damping=1e-3, scale=1.0)
    layer.inputs[16:] = layer.inputs[:16] + 3e-3 * layer.inputs[16:]  # condition 1e5
    layer.weight_grad.copy_(layer.output_grads.mT @ layer.inputs)
    X, right = layer.inputs, reference(layer)
    level = layer.damping * torch.eye(32, device=DEVICE)
    factor = torch.linalg.cholesky(X @ X.mT + level)
    cholesky = torch.cholesky_solve(layer.output_grads, factor).mT @ X
    assert rewrite([layer]) == (0, [0, 0, 0, 0, 0, 0])

    def miss(update):
        return ((update.double() - right) @ X.double().mT).norm()

    assert miss(layer.weight_grad) < 2 * miss(cholesky)


def test_twice_the_same_is_bitwise_the_same():
    first, second = (make_layer(9, 150, 90) for _ in range(2))
    rewrite([first])
    rewrite([second])
    assert torch.equal(gradient(first), gradient(second))


@pytest.mark.parametrize("counted", [{}, {"steps": 1}, {"skips": 1}, {"steps": 1, "skips": 1}])
@pytest.mark.parametrize("bad", [0, 1])
def test_a_step_is_counted_once_however_many_layers_there_are(bad, counted):
    layers = [make_layer(3, 150, 140), make_layer(2, 20, 10)]
    _, counts = rewrite(layers, bad, **counted)
    assert counts == [counted.get("steps", 0), bad * counted.get("skips", 0), 0, 0, 0, 0]


def test_refuses_what_it_cannot_read():
    layer = make_layer(8, 50, 40)
    flags = flags_for([layer])
    with pytest.raises(ValueError, match="1 to 128 rows, got 129"):
        DenseStep([make_layer(129, 5, 4)], flags)
    with pytest.raises(ValueError, match="side by side"):
        DenseStep([layer._replace(inputs=layer.inputs.mT.contiguous().mT)], flags)
    with pytest.raises(ValueError, match="do not fit together"):
        DenseStep([layer._replace(inputs=layer.inputs[:, :9])], flags)
    with pytest.raises(TypeError, match="must be float32"):
        DenseStep([layer._replace(inputs=layer.inputs.double())], flags)
