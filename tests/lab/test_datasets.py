"""Data sets: the official layouts in small, everything that can be wrong with a file, and the inputs made of them."""

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch
from small_datasets import (
    SMALL_CIFAR10,
    SMALL_CIFAR100,
    SMALL_FASHION,
    assert_same,
    cut,
    idx,
    pixels,
    write_cifar,
    write_fashion,
)

from consequent_lab import datasets
from consequent_lab.datasets import LAYOUTS, Dataset, load, load_digits, prepared, read

# ---- reading -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [SMALL_CIFAR10, SMALL_CIFAR100], ids=lambda layout: layout.name)
@pytest.mark.parametrize("in_sub_folder", [True, False])
def test_cifar_is_read_from_its_folder_and_from_the_one_above(layout, in_sub_folder, tmp_path):
    truth = write_cifar(layout, tmp_path / layout.places[0] if in_sub_folder else tmp_path)
    dataset = read(layout, tmp_path)
    assert_same(dataset, truth)
    assert (dataset.name, dataset.classes) == (layout.name, layout.classes)


@pytest.mark.parametrize("place", ["FashionMNIST/raw", "."])
@pytest.mark.parametrize("packed", [True, False])
def test_fashion_mnist_is_read_packed_or_not(place, packed, tmp_path):
    truth = write_fashion(SMALL_FASHION, tmp_path / place, packed)
    assert_same(read(SMALL_FASHION, tmp_path), truth)


def test_the_official_layouts_have_the_published_counts():
    assert [(layout.train, layout.test, layout.classes) for layout in LAYOUTS.values()] == [
        (50_000, 10_000, 10),
        (50_000, 10_000, 100),
        (60_000, 10_000, 10),
    ]


def test_digits_are_embedded_and_the_default():
    digits, known = load(), load_digits()
    assert digits.name == "digits"
    assert torch.equal(digits.train_labels, known.train.targets)
    assert torch.equal(digits.test_labels, known.test.targets)
    assert digits.train_images.shape == (1440, 1, 8, 8)
    assert (int(digits.train_images.min()), int(digits.train_images.max())) == (0, 255)
    flat = digits.train_images.flatten(1).double()
    correlation = torch.corrcoef(torch.stack([flat.flatten(), known.train.inputs.double().flatten()]))[0, 1]
    assert correlation > 0.9999, "the same pixels, in steps of 1/255"
    assert len(known.train.inputs.unique()) == 17, "values 0 to 16"
    assert known.train.inputs.mean().item() == pytest.approx(0, abs=1e-5)
    assert known.train.inputs.std().item() == pytest.approx(1)


def test_the_folder_comes_from_the_environment_unless_it_is_given(small, tmp_path, monkeypatch):
    there, elsewhere = tmp_path / "there", tmp_path / "elsewhere"
    write_cifar(SMALL_CIFAR10, there / "cifar-10-batches-bin")
    monkeypatch.setenv("CONSEQUENT_DATA", str(there))
    assert load("cifar10").name == "cifar10"
    with pytest.raises(FileNotFoundError, match="elsewhere"):
        load("cifar10", elsewhere)
    monkeypatch.setenv("CONSEQUENT_DATA", "")
    assert datasets.data_folder(None) == Path("data")


# ---- files that are not what they should be ----------------------------------------------------------------------


def test_missing_data_says_how_to_get_it(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        read(SMALL_CIFAR10, tmp_path / "my data")
    message = str(caught.value)
    assert "test_batch.bin" in message
    assert f"consequent data cifar10 --data '{tmp_path}/my data' --download" in message
    assert "CONSEQUENT_DATA" in message


def test_a_missing_file_among_others_is_named(tmp_path):
    place = tmp_path / "cifar-10-batches-bin"
    write_cifar(SMALL_CIFAR10, place)
    (place / "data_batch_3.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"has only some of CIFAR-10's files; missing: data_batch_3.bin\."):
        read(SMALL_CIFAR10, tmp_path)


@pytest.mark.parametrize("change", [-1, 1, -3073, 3073])
def test_cifar_files_of_another_size_are_named(change, tmp_path):
    write_cifar(SMALL_CIFAR10, tmp_path)
    path = tmp_path / "data_batch_4.bin"
    content = path.read_bytes()
    path.write_bytes(content[:change] if change < 0 else content + bytes(change))
    with pytest.raises(ValueError, match=rf"data_batch_4.bin has {20 * 3073 + change} bytes instead of {20 * 3073} "):
        read(SMALL_CIFAR10, tmp_path)


def test_empty_files_are_named(tmp_path):
    write_fashion(SMALL_FASHION, tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(b"")
    with pytest.raises(ValueError, match="t10k-labels-idx1-ubyte has 0 bytes instead of 28 "):
        read(SMALL_FASHION, tmp_path)


@pytest.mark.parametrize(
    ("layout", "column", "value"), [(SMALL_CIFAR10, 0, 10), (SMALL_CIFAR100, 0, 20), (SMALL_CIFAR100, 1, 100)]
)
def test_cifar_labels_out_of_range_are_named(layout, column, value, tmp_path):
    write_cifar(layout, tmp_path)
    path = tmp_path / layout.test_files[0]
    rows = np.fromfile(path, dtype=np.uint8).reshape(layout.test, -1)
    rows[7, column] = value
    rows.tofile(path)
    with pytest.raises(
        ValueError, match=rf"{path.name} has the label {value} in row 7; labels go from 0 to {value - 1}"
    ):
        read(layout, tmp_path)


def test_fashion_mnist_labels_out_of_range_are_named(tmp_path):
    write_fashion(SMALL_FASHION, tmp_path)
    path = tmp_path / "train-labels-idx1-ubyte"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    with pytest.raises(ValueError, match=r"train-labels-idx1-ubyte has the label 255 in row 59; labels go from 0 to 9"):
        read(SMALL_FASHION, tmp_path)


def test_another_data_set_of_the_same_format_is_found_by_its_class_counts(tmp_path):
    (_, labels), _ = write_fashion(SMALL_FASHION, tmp_path)
    labels[np.flatnonzero(labels == 3)[0]] = 4
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(labels))
    with pytest.raises(ValueError, match=r"train-labels.*5 images of class 3, but Fashion-MNIST has 6 of each"):
        read(SMALL_FASHION, tmp_path)


@pytest.mark.parametrize(("position", "byte"), [(2, 9), (3, 1), (7, 61), (15, 27)])
def test_idx_headers_are_checked(position, byte, tmp_path):
    write_fashion(SMALL_FASHION, tmp_path)
    path = tmp_path / "train-images-idx3-ubyte"
    content = bytearray(path.read_bytes())
    content[position] = byte
    path.write_bytes(content)
    with pytest.raises(
        ValueError, match=r"train-images-idx3-ubyte starts with .* not with the IDX header of 60 × 28 × 28"
    ):
        read(SMALL_FASHION, tmp_path)


def flip(content):
    return content[:-6] + bytes([content[-6] ^ 1]) + content[-5:]  # in the checksum


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut, "damaged"),
        (flip, "damaged.*CRC"),
        (lambda _: b"<html>", "damaged: Not a gzipped file"),
        (lambda content: gzip.compress(gzip.decompress(content)[:-1]), "unpacks to 47055 bytes instead of 47056 "),
        (lambda content: gzip.compress(gzip.decompress(content) + bytes(9)), "unpacks to more bytes instead of 47056 "),
    ],
)
def test_damaged_gzip_files_are_named(damage, message, tmp_path):
    write_fashion(SMALL_FASHION, tmp_path, packed=True)
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=rf"train-images-idx3-ubyte.gz.*{message}"):
        read(SMALL_FASHION, tmp_path)


# ---- preparing ---------------------------------------------------------------------------------------------------


def constant_corner():
    """Random images whose first pixel is always 7 in the training set but not in the test set."""
    train, test = torch.from_numpy(pixels(50, 3, 4, 4, seed=1)), torch.from_numpy(pixels(20, 3, 4, 4, seed=2))
    train[:, 0, 0, 0] = 7
    return Dataset("fake", train, torch.arange(50) % 10, test, torch.arange(20) % 10, 10)


@pytest.mark.parametrize(
    ("normalisation", "lowest", "highest"), [("unit", 0, 1), ("centred", -0.5, 0.5), ("symmetric", -1, 1)]
)
def test_ranges_are_exact_at_their_ends(normalisation, lowest, highest):
    dataset = constant_corner()
    dataset.train_images[0, 0, 0, 1], dataset.train_images[0, 0, 0, 2] = 0, 255
    before = dataset.train_images.clone()
    inputs = prepared(dataset, normalisation, "cpu", flat=False).train.inputs
    assert inputs.dtype == torch.float32
    assert (inputs.min().item(), inputs.max().item()) == (lowest, highest)
    expected = lowest + before.double() / 255 * (highest - lowest)
    torch.testing.assert_close(inputs.double(), expected, rtol=0, atol=1e-7)
    assert torch.equal(dataset.train_images, before), "the data set itself is left alone"


def test_features_are_normalised_over_the_training_set():
    dataset = constant_corner()
    inputs = prepared(dataset, "features", "cpu", flat=True)
    train, test = dataset.train_images.flatten(1).double(), dataset.test_images.flatten(1).double()
    mean, deviation = train.mean(0), train.std(0, unbiased=False)
    for values, bytes_ in ((inputs.train.inputs, train), (inputs.test.inputs, test)):
        expected = (bytes_[:, 1:] - mean[1:]) / deviation[1:]
        torch.testing.assert_close(values[:, 1:].double(), expected, rtol=1e-5, atol=1e-6)
        assert torch.all(values[:, 0] == 0), "constant in the training set"


def test_prepared_shapes_and_labels():
    dataset = constant_corner()
    flat, square = (prepared(dataset, "unit", torch.device("cpu"), flat=flat) for flat in (True, False))
    assert (flat.train.inputs.shape, flat.test.inputs.shape) == ((50, 48), (20, 48))
    assert (square.train.inputs.shape, square.test.inputs.shape) == ((50, 3, 4, 4), (20, 3, 4, 4))
    assert torch.equal(flat.train.inputs.view(50, 3, 4, 4), square.train.inputs)
    assert torch.equal(flat.train.targets, dataset.train_labels)
    assert torch.equal(flat.test.targets, dataset.test_labels)
