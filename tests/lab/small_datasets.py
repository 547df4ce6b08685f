"""Small fakes of the data sets, in the official layouts, and what is in them."""

import gzip
import struct
from dataclasses import replace

import numpy as np
import torch

from consequent_lab.datasets import CIFAR10, CIFAR100, FASHION_MNIST

SMALL_CIFAR10 = replace(CIFAR10, train=100, test=20)
SMALL_CIFAR100 = replace(CIFAR100, train=200, test=100)
SMALL_FASHION = replace(FASHION_MNIST, train=60, test=20)
SMALL = {layout.name: layout for layout in (SMALL_CIFAR10, SMALL_CIFAR100, SMALL_FASHION)}


def balanced(count, classes, seed):
    """Labels with equally many of each class, in a random order."""
    return np.random.default_rng(seed).permutation(np.arange(count, dtype=np.uint8) % classes)


def pixels(count, *shape, seed):
    return np.random.default_rng(100 + seed).integers(0, 256, (count, *shape), dtype=np.uint8)


def write_cifar(layout, place):
    """Writes a data set of CIFAR's layout; returns the images and labels of both splits."""
    place.mkdir(parents=True, exist_ok=True)
    truth = []
    for seed, (files, count) in enumerate(((layout.train_files, layout.train), (layout.test_files, layout.test))):
        images, labels = pixels(count, *layout.shape, seed=seed), balanced(count, layout.classes, seed)
        columns = [labels[:, None]] if len(layout.label_classes) == 1 else [labels[:, None] // 5, labels[:, None]]
        rows = np.concatenate([*columns, images.reshape(count, -1)], axis=1)
        for file, part in zip(files, np.split(rows, len(files)), strict=True):
            (place / file).write_bytes(part.tobytes())
        truth.append((images, labels))
    return truth


def idx(array):
    """An IDX file: magic number, sizes, bytes."""
    return struct.pack(f">{1 + array.ndim}I", 2048 + array.ndim, *array.shape) + array.tobytes()


def write_fashion(layout, place, packed=False):
    """Writes a data set of Fashion-MNIST's layout; returns the images and labels of both splits."""
    place.mkdir(parents=True, exist_ok=True)
    truth = []
    for seed, (files, count) in enumerate(((layout.train_files, layout.train), (layout.test_files, layout.test))):
        images, labels = pixels(count, 28, 28, seed=seed), balanced(count, layout.classes, seed)
        for file, content in zip(files, (idx(images), idx(labels)), strict=True):
            path = place / (f"{file}.gz" if packed else file)
            path.write_bytes(gzip.compress(content, 1) if packed else content)
        truth.append((images[:, None], labels))
    return truth


def assert_same(dataset, truth):
    for images, labels, (true_images, true_labels) in zip(
        (dataset.train_images, dataset.test_images), (dataset.train_labels, dataset.test_labels), truth, strict=True
    ):
        assert images.dtype == torch.uint8
        assert labels.dtype == torch.int64
        np.testing.assert_array_equal(images.numpy(), true_images)
        np.testing.assert_array_equal(labels.numpy(), true_labels)


def cut(content):
    """A file of which half is missing."""
    return content[: len(content) // 2]
