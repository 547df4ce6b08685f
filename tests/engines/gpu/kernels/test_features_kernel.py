from itertools import groupby

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from consequent.engines.gpu.kernels import features
from consequent.engines.gpu.kernels.features import FeatureLayer, KeptLayers, prepare_features, write_features
from consequent.maths import triangular_products as lower

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DAMPING = 0.1
ARE_KEPT = False  # whether layers come with inverses instead of factors


@pytest.fixture(params=["by kernels", "by cuBLAS", "kept"], autouse=True)
def products(request, monkeypatch):
    """Small products and large ones; these in several parts, as larger ones still would be; and with kept inverses."""
    monkeypatch.setattr(request.module, "ARE_KEPT", request.param == "kept")
    if request.param == "by cuBLAS":
        monkeypatch.setattr(features, "_MOST_MULTIPLICATIONS", 0)
        monkeypatch.setattr(lower, "ENTRIES", 1)
        monkeypatch.setattr(lower, "WIDTH", 1)
    return request.param


def make_layer(outputs, *shape, bias=True, channels_last=False, ok=True, seed=0) -> FeatureLayer:
    generator = torch.Generator().manual_seed(seed)
    weight_grad = torch.randn(outputs, *shape, generator=generator).to(DEVICE)
    if channels_last:
        weight_grad = weight_grad.to(memory_format=torch.channels_last)
    bias_grad = torch.randn(outputs, generator=generator).to(DEVICE) if bias else None
    size = weight_grad[0].numel() + bias
    rows = torch.randn(2 * size + 1, size, generator=generator).double().to(DEVICE)
    moment = rows.mT @ rows
    damped = moment + DAMPING * torch.eye(size, device=DEVICE)
    factor = torch.linalg.inv(torch.linalg.cholesky(damped)).float().contiguous()
    if not ok:
        factor.fill_(float("nan"))
    status = torch.tensor([moment.trace().item(), DAMPING, float(ok), float("nan")], device=DEVICE)
    return FeatureLayer(weight_grad, bias_grad, factor[None], status[None], 3.0)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(40, 30), (130, 5, 3, 3), (3, 2)])
def test_a_step_that_would_change_the_outputs_too_much_is_shortened(shape, bias):
    layers = [make_layer(*shape, bias=bias, seed=seed) for seed in range(3)]
    layers = [layer._replace(status=layer.status.nan_to_num()) for layer in layers]
    shorter = []
    for layer in layers:
        G = gradient(layer).double()
        allowed = (layer.status[0, 0].double() / G.shape[1] * shape[0]).sqrt()
        shorter.append((allowed / (reference(layer) / layer.scale * G).sum().sqrt()).item())
    limits = (0.3 / shorter[0], 0.99 / shorter[1], 1.01 / shorter[2])
    layers = [layer._replace(limit=limit) for layer, limit in zip(layers, limits, strict=True)]
    wanted = [part * reference(layer) for layer, part in zip(layers, (0.3, 0.99, 1.0), strict=True)]
    assert rewrite(layers) == (0, [0, 0, 0, 0, 0, 2])
    for layer, right in zip(layers, wanted, strict=True):
        assert_close(layer, right)


def gradient(layer):
    parts = [layer.weight_grad.flatten(1)] + ([] if layer.bias_grad is None else [layer.bias_grad[:, None]])
    return torch.cat(parts, 1)


def reference(layer):
    W = layer.inverse_factor[0].double().tril()
    return layer.scale * gradient(layer).double() @ W.mT @ W


def shortened(layer):
    return layer.scale * gradient(layer).double() / layer.status[0, :2].double().sum()


def kept(layers):
    """The same layers with inverses, those of one shape that follow each other together."""
    groups = []
    for _, alike in groupby(layers, key=lambda layer: (len(layer.weight_grad), layer.inverse_factor.shape)):
        members, inverses = list(alike), []
        for layer in members:
            W, (trace, level, ok, _) = layer.inverse_factor[0].double(), layer.status[0].double()
            identity = torch.eye(len(W), device=DEVICE)
            inverses.append((W.mT @ W if ok else identity / (trace + level)).float())
        together = torch.stack(inverses)
        layers = [one._replace(inverse_factor=P[None]) for one, P in zip(members, together.unbind(), strict=True)]
        groups.append(KeptLayers(layers, together))
    return groups


def rewrite(layers, bad=0, **counted):
    """Runs both halves; returns what ``bad`` and the counts hold then."""
    flag = torch.tensor([bad], dtype=torch.int32, device=DEVICE)
    before = (10, 20, 30, 40, 50, 60)
    counts = torch.tensor(before, device=DEVICE)
    prepared = prepare_features([], flag, kept(layers)) if ARE_KEPT else prepare_features(layers, flag)
    write_features(prepared, counts, **counted)
    return flag.item(), [count - base for count, base in zip(counts.tolist(), before, strict=True)]


def assert_close(layer, wanted, tolerance=3e-6):
    error = (gradient(layer).double() - wanted).abs().max() / wanted.abs().max()
    assert error < tolerance


SETS = {
    "one": [(1, (1,), {}), (1, (1,), {"bias": False})],
    "head": [(10, (64,), {})],
    "convolutions": [
        (16, (3, 3, 3), {}),
        (40, (7, 3, 2), {"channels_last": True}),
        (33, (5, 1, 4), {"bias": False, "channels_last": True}),
        (5, (16, 3, 3), {"bias": False}),
    ],
    "edges of tiles": [(32, (32,), {"bias": False}), (32, (31,), {}), (32, (32,), {}), (65, (64,), {"bias": False})],
    "1×1 and one channel": [(9, (20, 1, 1), {"channels_last": True}), (9, (1, 3, 3), {"channels_last": True})],
    "one dimension": [(12, (6, 5), {})],
}


@pytest.mark.parametrize("tile", ["_SMALL", "_LARGE"])
@pytest.mark.parametrize("name", SETS)
def test_float64_reference(name, tile, monkeypatch):
    monkeypatch.setattr(features, "_SMALL", getattr(features, tile))
    layers = [make_layer(o, *shape, **options, seed=seed) for seed, (o, shape, options) in enumerate(SETS[name])]
    wanted = [reference(layer) for layer in layers]
    assert rewrite(layers) == (0, [0, 0, 0, 0, 0, 0])
    for layer, right in zip(layers, wanted, strict=True):
        assert_close(layer, right)


def test_more_tiles_than_programs(monkeypatch):
    monkeypatch.setattr(features, "_MOST_PROGRAMS", 2)
    layers = [make_layer(40, 80), make_layer(4, 20)]
    wanted = [reference(layer) for layer in layers]
    rewrite(layers)
    for layer, right in zip(layers, wanted, strict=True):
        assert_close(layer, right)


def test_only_the_triangle_is_read(products):
    if products != "by kernels":
        pytest.skip("all of the matrix is read")
    layer = make_layer(20, 50)
    right = reference(layer)
    rows, columns = torch.triu_indices(51, 51, offset=1)
    layer.inverse_factor[0, rows, columns] = float("nan")
    assert rewrite([layer]) == (0, [0, 0, 0, 0, 0, 0])
    assert_close(layer, right)


def test_small_and_large_layers_in_one_step(monkeypatch):
    layers = [make_layer(4, 20), make_layer(40, 80), make_layer(9, 30, ok=False), make_layer(50, 70, ok=False)]
    monkeypatch.setattr(features, "_MOST_MULTIPLICATIONS", 10_000)
    wanted = [reference(layer) for layer in layers[:2]] + [shortened(layer) for layer in layers[2:]]
    assert rewrite(layers, steps=1, skips=1) == (0, [1, 0, 0, 2, 0, 0])
    for layer, right in zip(layers, wanted, strict=True):
        assert_close(layer, right)


def test_nothing_is_written_before_the_second_half():
    layer = make_layer(6, 20)
    before = gradient(layer)
    prepare_features([layer], torch.zeros(1, dtype=torch.int32, device=DEVICE))
    assert torch.equal(gradient(layer), before)


def test_layers_with_raised_pivots_are_counted_once():
    layers = [make_layer(40, 80, seed=seed) for seed in range(3)]
    for layer, raised in zip(layers, (2.0, 0.0, 1.0), strict=True):
        layer.status[0, 3] = raised
    wanted = [reference(layer) for layer in layers]
    assert rewrite(layers) == (0, [0, 0, 2, 0, 0, 0])
    for layer, right in zip(layers, wanted, strict=True):
        assert_close(layer, right)


def test_a_layer_without_a_factor_falls_back():
    lost = make_layer(40, 4, 3, 3, channels_last=True, ok=False)
    lost.status[0, 3] = 5.0  # pivots were raised before it failed: that is no rescue
    kept = make_layer(9, 30)
    wanted = shortened(lost), reference(kept)
    assert rewrite([lost, kept]) == (0, [0, 0, 0, 1, 0, 0])
    assert_close(lost, wanted[0])
    assert_close(kept, wanted[1])


@pytest.mark.parametrize("ok", [True, False])
@pytest.mark.parametrize("place", ["weight_grad", "bias_grad", "status"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_not_finite_anywhere_zeroes_all(place, value, ok):
    layers = [make_layer(40, 50, ok=ok), make_layer(9, 4, 3, 3, channels_last=True, bias=False)]
    getattr(layers[0], place).view(-1)[0] = value
    assert rewrite(layers) == (1, [0, 0, 0, 0, 0, 0])
    for layer in layers:
        assert not gradient(layer).any()


def test_a_product_that_overflows_zeroes_all():
    layers = [make_layer(4, 5), make_layer(9, 20)]
    layers[0].weight_grad.fill_(1e30)
    layers[0].inverse_factor.mul_(1e30)
    assert rewrite(layers) == (1, [0, 0, 0, 0, 0, 0])
    for layer in layers:
        assert not gradient(layer).any()


def test_bad_beforehand_zeroes_all():
    layers = [make_layer(40, 50), make_layer(9, 20, ok=False)]
    assert rewrite(layers, bad=1) == (1, [0, 0, 0, 0, 0, 0])
    for layer in layers:
        assert not gradient(layer).any()


def test_no_layers():
    assert rewrite([]) == (0, [0, 0, 0, 0, 0, 0])


def test_refuses_what_it_cannot_read():
    layer = make_layer(8, 5, 3, 3)
    bad = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="does not fit"):
        prepare_features([layer._replace(bias_grad=None)], bad)
    with pytest.raises(ValueError, match="contiguous or channels last"):
        prepare_features([layer._replace(weight_grad=layer.weight_grad.mT)], bad)
    with pytest.raises(TypeError, match="must be float32"):
        prepare_features([layer._replace(status=layer.status.double())], bad)


@pytest.mark.parametrize("counted", [{}, {"steps": 1}, {"skips": 1}, {"steps": 1, "skips": 1}])
@pytest.mark.parametrize("bad", [0, 1])
def test_a_step_is_counted_once_however_many_layers_there_are(bad, counted):
    layers = [make_layer(10, 64), make_layer(40, 9)]
    _, counts = rewrite(layers, bad, **counted)
    assert counts == [counted.get("steps", 0), bad * counted.get("skips", 0), 0, 0, 0, 0]
