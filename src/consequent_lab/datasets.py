"""CIFAR-10, CIFAR-100 and Fashion-MNIST from their official binary files, and the digits of scikit-learn.

Nothing here is unpickled, and nothing is read by halves: a file of another size than the published one, a header or a
label that does not belong there, is named in an error. What a file of the right size says about itself is checked as
well: each of the three data sets has exactly as many images of one class as of any other, in any order of its rows.
"""

import gzip
import math
import os
import shlex
import struct
import zlib
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from consequent_lab.samples import Data, Samples

FOLDER_VARIABLE = "CONSEQUENT_DATA"
DEFAULT_FOLDER = Path("data")


@dataclass(frozen=True)
class Dataset:
    """Images as `[N, channels, height, width]` in bytes, and their classes from 0 on.

    A user's own data may have other inputs, and targets that are numbers: then there are no classes.
    """

    name: str
    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    classes: int | None


# ---- official layouts --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """The files of a data set, packed by gzip or not, what must be in them, and where they are published.

    CIFAR's files hold rows of label bytes and pixels, red before green before blue, split evenly over the files. The
    others are IDX files: one of images and one of labels for each split, each with a header. An archive has its files
    in a folder, the first of the places.
    """

    name: str  # as on the command line
    title: str  # as in a sentence
    classes: int
    shape: tuple[int, int, int]  # channels, height and width
    train: int  # images
    test: int
    places: tuple[str, ...]  # sub-folders in which the files usually lie; the first one is where a download goes
    train_files: tuple[str, ...]
    test_files: tuple[str, ...]
    address: str  # of the folder with the published files
    digests: dict[str, str]  # SHA-256 sums of these, by name
    label_classes: tuple[int, ...] = ()  # values of every label byte of a row, the last of which is the class; not IDX

    @property
    def files(self) -> tuple[str, ...]:
        """Names of all files."""
        return self.train_files + self.test_files

    def find(self, place: Path, file: str) -> Path | None:
        """Returns where a file is in a folder, unpacked or packed, or None if it is not there."""
        return next((path for path in (place / file, place / f"{file}.gz") if path.is_file()), None)

    def read(self, paths: list[Path], count: int) -> tuple[Tensor, Tensor]:
        """Returns the images and labels of a split.

        Raises:
            ValueError: naming the file that is not what it should be.
        """
        if self.label_classes:
            tables = [self._table(path, count // len(paths)) for path in paths]
            width = len(self.label_classes)
            images = np.concatenate([table[:, width:] for table in tables])
            labels = np.concatenate([table[:, width - 1] for table in tables])
        else:
            images = _idx(paths[0], (count, *self.shape[1:])).copy()
            labels = _idx(paths[1], (count,))
            _check_range(paths[1], labels, self.classes)
        return torch.from_numpy(images.reshape(count, *self.shape)), torch.from_numpy(labels.astype(np.int64))

    def _table(self, path: Path, rows: int) -> np.ndarray:
        width = len(self.label_classes) + math.prod(self.shape)
        content = _content(path, rows * width, f"{rows} rows of {width} bytes")
        table = np.frombuffer(content, dtype=np.uint8).reshape(rows, width)
        for column, classes in enumerate(self.label_classes):
            _check_range(path, table[:, column], classes)
        return table


# Addresses: https://www.cs.toronto.edu/~kriz/cifar.html ("binary version") and the table in the README of
# https://github.com/zalandoresearch/fashion-mnist. Both publish md5 sums; the SHA-256 sums of the same files are those
# of TensorFlow Datasets (tensorflow_datasets/url_checksums/{cifar10,cifar100,fashion_mnist}.txt), and torchvision's
# prototype of FashionMNIST and MLDatasets.jl have the same.
CIFAR10 = Layout(
    name="cifar10",
    title="CIFAR-10",
    classes=10,
    shape=(3, 32, 32),
    train=50_000,
    test=10_000,
    places=("cifar-10-batches-bin", "."),
    train_files=tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
    test_files=("test_batch.bin",),
    address="https://www.cs.toronto.edu/~kriz",
    digests={"cifar-10-binary.tar.gz": "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"},
    label_classes=(10,),
)
CIFAR100 = replace(
    CIFAR10,
    name="cifar100",
    title="CIFAR-100",
    classes=100,
    places=("cifar-100-binary", "."),
    train_files=("train.bin",),
    test_files=("test.bin",),
    digests={"cifar-100-binary.tar.gz": "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec"},
    label_classes=(20, 100),
)
FASHION_MNIST = Layout(
    name="fashion-mnist",
    title="Fashion-MNIST",
    classes=10,
    shape=(1, 28, 28),
    train=60_000,
    test=10_000,
    places=("FashionMNIST/raw", "FashionMNIST", "fashion-mnist", "raw", "."),
    train_files=("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    test_files=("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
    address="http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",  # no https there: the digests vouch for them
    digests={
        "train-images-idx3-ubyte.gz": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        "train-labels-idx1-ubyte.gz": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
        "t10k-images-idx3-ubyte.gz": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        "t10k-labels-idx1-ubyte.gz": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
    },
)
LAYOUTS: dict[str, Layout] = {layout.name: layout for layout in (CIFAR10, CIFAR100, FASHION_MNIST)}
EMBEDDED = "digits"
TRAINING_DIGITS = 1440  # 45 mini-batches of 32; the other 357 images are the test set
NAMES = (*LAYOUTS, EMBEDDED)


# ---- loading -----------------------------------------------------------------------------------------------------


def load(name: str = EMBEDDED, folder: Path | None = None) -> Dataset:
    """Returns one of `NAMES`, from the folder that `data_folder` finds; the digits need none.

    Raises:
        FileNotFoundError: if a file is not there; says which, and how to get it.
        ValueError: if a file is not what it should be; names it.

    >>> digits = load("digits")
    >>> tuple(digits.train_images.shape), tuple(digits.test_images.shape)
    ((1440, 1, 8, 8), (357, 1, 8, 8))
    """
    if name == EMBEDDED:
        return _digits()
    return read(LAYOUTS[name], data_folder(folder))


def data_folder(folder: Path | None) -> Path:
    """Returns the folder of the data sets: the given one, else the environment's, else the default."""
    if folder is not None:
        return folder.expanduser()
    named = os.environ.get(FOLDER_VARIABLE)
    return Path(named).expanduser() if named else DEFAULT_FOLDER


def locate(layout: Layout, folder: Path) -> tuple[Path, list[str]]:
    """Returns the place in the folder that has most of the files, and the names of those that are missing there."""
    places = [folder / place for place in layout.places]
    missing = [[file for file in layout.files if layout.find(place, file) is None] for place in places]
    best = min(range(len(places)), key=lambda number: len(missing[number]))  # of equals, the first
    return places[best], missing[best]


def read(layout: Layout, folder: Path) -> Dataset:
    """Returns the data set that lies in the folder; raises as `load` does."""
    place, missing = locate(layout, folder)
    if missing:
        raise FileNotFoundError(_how_to_get(layout, folder, place, missing))
    splits = []
    for files, count in ((layout.train_files, layout.train), (layout.test_files, layout.test)):
        paths = [path for file in files if (path := layout.find(place, file)) is not None]
        images, labels = layout.read(paths, count)
        _check_balance(layout, paths, labels, count)
        splits.append((images, labels))
    return Dataset(layout.name, *splits[0], *splits[1], layout.classes)


def _how_to_get(layout: Layout, folder: Path, place: Path, missing: list[str]) -> str:
    if len(missing) < len(layout.files):
        what = f"{place} has only some of {layout.title}'s files; missing: {', '.join(missing)}"
    else:
        places = " or ".join(str(folder / place) for place in (layout.places[0], layout.places[-1]))
        what = f"{layout.title} is not there: no {', '.join(missing)} in {places}"
    return (
        f"{what}.\nDownload it with\n    consequent data {layout.name} --data {shlex.quote(str(folder))} --download\n"
        f"or name the folder that has these files with --data or the environment's {FOLDER_VARIABLE}."
    )


def _digits() -> Dataset:
    import sklearn.datasets  # here, so that training on the other data sets does not need it

    pixels, labels = sklearn.datasets.load_digits(return_X_y=True)  # values 0 to 16
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(pixels * (255 / 16)).round().to(torch.uint8).view(-1, 1, 8, 8)[order]
    classes = torch.tensor(labels, dtype=torch.int64)[order]
    train, test = slice(TRAINING_DIGITS), slice(TRAINING_DIGITS, None)
    return Dataset(EMBEDDED, images[train], classes[train], images[test], classes[test], classes=10)


def load_digits() -> Data:
    """Returns the digits as rows of 64 pixels, normalised with the training set's mean and standard deviation.

    >>> digits = load_digits()
    >>> tuple(digits.train.inputs.shape), tuple(digits.test.inputs.shape)
    ((1440, 64), (357, 64))
    """
    digits = load(EMBEDDED)
    train, test = ((16 / 255 * images.flatten(1)).round() for images in (digits.train_images, digits.test_images))
    mean, deviation = train.mean(), train.std()
    return Data(
        Samples((train - mean) / deviation, digits.train_labels), Samples((test - mean) / deviation, digits.test_labels)
    )


# ---- files -------------------------------------------------------------------------------------------------------


def _content(path: Path, size: int, meaning: str) -> bytes:
    """Returns the content of a file, unpacked, that must have this many bytes; gzip's own checksum is verified."""
    is_packed = path.suffix == ".gz"
    try:
        with gzip.open(path, "rb") if is_packed else path.open("rb") as file:
            content = file.read(size + 1)  # up to the end, where the checksum is, but no bomb
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if len(content) != size:
        found: str | int = path.stat().st_size
        if is_packed:
            found = "more" if len(content) > size else len(content)
        has = "unpacks to" if is_packed else "has"
        raise ValueError(f"{path} {has} {found} bytes instead of {size} ({meaning}): cut off, or another file")
    return content


def _idx(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """Returns the bytes of an IDX file: two zeros, 8 for bytes, the number of dimensions, the dimensions, the data."""
    header = struct.pack(f">{1 + len(shape)}I", 0x0800 + len(shape), *shape)
    sizes = " × ".join(map(str, shape))
    content = _content(path, len(header) + math.prod(shape), f"a header and {sizes}")
    if not content.startswith(header):
        raise ValueError(f"{path} starts with {content[: len(header)].hex()}, not with the IDX header of {sizes} bytes")
    return np.frombuffer(content, dtype=np.uint8, offset=len(header)).reshape(shape)


def _check_range(path: Path, labels: np.ndarray, classes: int) -> None:
    if (highest := int(labels.max())) >= classes:
        row = int(labels.argmax())
        raise ValueError(f"{path} has the label {highest} in row {row}; labels go from 0 to {classes - 1}")


def _check_balance(layout: Layout, paths: list[Path], labels: Tensor, count: int) -> None:
    """Finds another data set of the same format (MNIST's files have Fashion-MNIST's names) and damaged labels."""
    counts = torch.bincount(labels, minlength=layout.classes)
    odd = (counts != count // layout.classes).nonzero().flatten()
    if len(odd):
        names = ", ".join(path.name for path in paths)
        raise ValueError(
            f"{names} in {paths[0].parent}: {int(counts[odd[0]])} images of class {int(odd[0])}, but {layout.title} "
            f"has {count // layout.classes} of each: damaged, or another data set"
        )


def held_out(dataset: Dataset, fraction: float) -> Dataset:
    """Returns a part of the training set as another training set, and the rest of it in place of the test set.

    The same samples are held out every time, whatever the seed of a run; at least one is.

    >>> split = held_out(load("digits"), 0.1)
    >>> len(split.train_labels), len(split.test_labels)
    (1296, 144)
    """
    samples = len(dataset.train_labels)
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(0))
    out = max(1, round(fraction * samples))
    kept, rest = order[out:], order[:out]
    images, labels = dataset.train_images, dataset.train_labels
    return Dataset(dataset.name, images[kept], labels[kept], images[rest], labels[rest], dataset.classes)


# ---- inputs of a network -----------------------------------------------------------------------------------------


def prepared(
    dataset: Dataset, normalisation: str, device: torch.device | str, flat: bool, channels_last: bool = False
) -> Data:
    """Returns the data set as a network takes it, moved to the device once.

    Normalisations: "unit" (values in [0, 1]), "centred" ([-½, ½]), "symmetric" ([-1, 1]), "features" (every feature has
    mean 0 and variance 1 over the training set; one that is constant there becomes 0). Inputs that are not bytes are
    taken as they are. Where it is to be flat, an image is one row of features.
    """
    is_bytes = dataset.train_images.dtype == torch.uint8
    if is_bytes:
        shift, scale = _normaliser(dataset.train_images, normalisation)
        shift, scale = shift.float().to(device), scale.float().to(device)

    def samples(images: Tensor, labels: Tensor) -> Samples:
        inputs = images.to(device)
        if is_bytes:
            inputs = inputs.float().sub_(shift).mul_(scale)  # bytes travel, floats are made there
        return Samples(inputs.flatten(1) if flat else inputs, labels.to(device), channels_last=channels_last)

    return Data(samples(dataset.train_images, dataset.train_labels), samples(dataset.test_images, dataset.test_labels))


def _normaliser(images: Tensor, normalisation: str) -> tuple[Tensor, Tensor]:
    """Returns what to subtract from the bytes and what to multiply by then, in float64."""
    if normalisation == "features":
        mean, deviation = _moments(images)
        return mean, torch.where(deviation > 0, 1 / deviation, 0.0)
    ranges = {"unit": (0.0, 255.0), "centred": (127.5, 255.0), "symmetric": (127.5, 127.5)}
    shift, divisor = ranges[normalisation]
    return torch.tensor(shift, dtype=torch.float64), torch.tensor(1 / divisor, dtype=torch.float64)


def _moments(images: Tensor) -> tuple[Tensor, Tensor]:
    """Returns each feature's mean and standard deviation.

    The sums are of integers and hence exact: the same on any machine, and 0 for a constant feature.
    """
    count = len(images)
    total = images.sum(0, dtype=torch.int64)
    squares = torch.zeros_like(total)
    for some in images.split(1000):
        squares += some.to(torch.int32).square_().sum(0, dtype=torch.int64)
    variance = (count * squares - total.square()).double() / count**2
    return total.double() / count, variance.sqrt()
