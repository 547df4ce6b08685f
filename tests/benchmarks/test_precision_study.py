"""The study of precision: what it measures, and what it says of it."""

import json
import math

import pytest
import torch

from benchmarks.precision import images, study
from benchmarks.precision.__main__ import main
from benchmarks.precision.formats import to_bfloat16, to_tf32
from consequent_lab.datasets import Dataset
from consequent_lab.models import residual_net


def test_tf32_keeps_ten_bits():
    exact = torch.tensor([0.0, 1.0, -1.5, 1 + 2.0**-10, 2.0**-120, 65504.0 * 2**60, math.inf, -math.inf])
    assert torch.equal(to_tf32(exact), exact)
    rounded = {
        1 + 2.0**-12: 1.0,
        1 + 2.0**-11: 1 + 2.0**-10,
        -1 - 2.0**-11: -1 - 2.0**-10,
        1 + 3 * 2.0**-12: 1 + 2.0**-10,
    }
    assert to_tf32(torch.tensor(list(rounded))).tolist() == list(rounded.values())
    assert to_tf32(torch.tensor(0.1)).item() == 0.0999755859375
    assert to_tf32(torch.tensor([math.nan])).isnan().all()
    numbers = torch.randn(1000)
    errors = ((to_tf32(numbers) - numbers) / numbers).abs()
    assert 2.0**-12 < errors.max() <= 2.0**-11
    assert ((to_bfloat16(numbers) - numbers) / numbers).abs().max() > 2.0**-9


def test_errors_grow_as_formats_shrink():
    torch.manual_seed(0)
    for shape, side in (((16, 64), "samples"), ((500, 20), "features")):
        error = study.layer_error(study.Captured("layer", torch.randn(shape), torch.randn(shape[0], 5)), 0.01)
        assert (error.side, error.size) == (side, min(shape))
        assert 0 < error.errors["float64"] <= error.errors["float32"] * 2
        assert error.errors["float32"] < 1e-5 < error.errors["tf32"] < 1e-2
        assert 2 < error.errors["bfloat16"] / error.errors["tf32"] < 50


def test_a_factorisation_that_fails_is_said_so():
    inputs = torch.rand(20, 1).expand(20, 300) + 1e-4 * torch.rand(20, 300)  # nearly dependent, 1e-12 of damping
    error = study.layer_error(study.Captured("layer", inputs, torch.randn(20, 2)), 1e-12)
    assert error.errors["bfloat16"] is None
    assert error.condition > 1e8
    moment = study.Moment(study.setups(quick=True)[0], 1, 2.3, (error,))
    assert moment.failures("bfloat16") == 1
    assert moment.record()["failed_factorisations"]["bfloat16"] == 1


def test_captured_rows_explain_the_gradients():
    torch.manual_seed(0)
    model = residual_net((4,), 1)
    inputs, labels = torch.rand(6, 3, 8, 8), torch.randint(0, 10, (6,))
    seen = study.capture(model, inputs, labels)
    gradients = {name: layer.weight.grad for name, layer in model.named_modules() if hasattr(layer, "weight")}
    assert [captured.name for captured in seen] == list(gradients)
    for captured in seen:
        plain = captured.output_grads.mT @ captured.inputs
        torch.testing.assert_close(plain[:, :-1], gradients[captured.name].flatten(1))


def test_quick_precision_looks_three_times(tmp_path):
    path = tmp_path / "numbers.json"
    assert main(["--quick", "--iterations", "30", "--output", str(path)]) == 0
    record = json.loads(path.read_text())
    assert [(m["network"], m["iteration"]) for m in record["moments"]] == [
        (network, iteration) for network in ("resnet20", "mlp") for iteration in (1, 3, 30)
    ]
    assert record["data"] == "digits, enlarged"
    for moment in record["moments"]:
        sides = {layer["side"] for layer in moment["layers"]}
        assert sides == ({"samples"} if moment["network"] == "mlp" else {"features", "samples"})
        assert set(moment["median_error"]) == {"float64", "float32", "tf32", "bfloat16"}
        assert moment["median_error"]["float32"] < moment["median_error"]["bfloat16"]
    assert record["moments"][-1]["loss"] < record["moments"][3]["loss"], "the network learns"


def test_cifar10_lies_between_minus_and_plus_a_half(monkeypatch, tmp_path):
    pixels = torch.tensor([0, 51, 255], dtype=torch.uint8).view(3, 1, 1, 1).expand(3, 3, 32, 32)
    dataset = Dataset("cifar10", pixels, torch.tensor([1, 0, 9]), pixels, torch.tensor([1, 0, 9]), 10)
    monkeypatch.setattr(images, "load", lambda name, folder: dataset)
    loaded = images.load_images(tmp_path)
    assert loaded.labels.tolist() == [1, 0, 9]
    assert loaded.pixels[:, 0, 0, 0].tolist() == pytest.approx([-0.5, -0.3, 0.5])


def test_other_files_than_cifar10_are_refused(tmp_path, capsys):
    for name in (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"):
        (tmp_path / name).write_bytes(b"\x00" * 100)
    assert main(["--quick", "--data", str(tmp_path)]) == 1
    assert "data_batch_1.bin" in capsys.readouterr().err


def test_digits_are_images_between_minus_and_plus_a_half():
    digits = images.upsampled_digits()
    assert digits.pixels.shape == (1797, 3, 32, 32)
    assert digits.pixels.min() == -0.5
    assert digits.pixels.max() == 0.5
