"""The data sets from their official addresses: downloaded by pooch, and bound to published digests."""

import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pooch
from requests import RequestException
from rich.progress import Progress

from consequent_lab.datasets import CIFAR10, CIFAR100, FASHION_MNIST, Layout, locate

TIMEOUT = 30.0  # seconds without a byte
RETRIES = 3  # of a download that was cut off or is not the published file, from its beginning
CHUNK = 1 << 18


class DownloadError(OSError):
    """A file could not be had, or is not the published one."""


@dataclass(frozen=True)
class Source:
    """Where a data set is published."""

    address: str  # of the folder with the published files
    digests: dict[str, str]  # SHA-256 sums of these, by name
    archive_folder: str | None = None  # in the archive, with the data set's files; None: they are published one by one


# Addresses: https://www.cs.toronto.edu/~kriz/cifar.html ("binary version") and the table in the README of
# https://github.com/zalandoresearch/fashion-mnist. Both publish md5 sums; the SHA-256 sums of the same files are those
# of TensorFlow Datasets (tensorflow_datasets/url_checksums/{cifar10,cifar100,fashion_mnist}.txt), and torchvision's
# prototype of FashionMNIST and MLDatasets.jl have the same.
SOURCES: dict[str, Source] = {
    CIFAR10.name: Source(
        "https://www.cs.toronto.edu/~kriz",
        {"cifar-10-binary.tar.gz": "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"},
        archive_folder="cifar-10-batches-bin",
    ),
    CIFAR100.name: Source(
        "https://www.cs.toronto.edu/~kriz",
        {"cifar-100-binary.tar.gz": "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec"},
        archive_folder="cifar-100-binary",
    ),
    FASHION_MNIST.name: Source(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",  # no https there: the digest vouches for it
        {
            "train-images-idx3-ubyte.gz": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            "train-labels-idx1-ubyte.gz": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            "t10k-images-idx3-ubyte.gz": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            "t10k-labels-idx1-ubyte.gz": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
        },
    ),
}


def obtain(layout: Layout, source: Source, folder: Path, bars: Progress) -> None:
    """Brings the files of a data set that are missing into the folder of all; those that are there are left alone.

    Raises:
        DownloadError: if that fails; says what to put where by hand.
    """
    place, missing = locate(layout, folder)
    for name in source.digests if missing else ():
        if source.archive_folder is not None:
            was_here = (folder / name).exists()
            archive = fetch(source, name, folder, bars)
            unpack(archive, source.archive_folder, place, missing)
            if not was_here:
                archive.unlink()
        elif name.removesuffix(".gz") in missing:
            fetch(source, name, place, bars)


def fetch(source: Source, name: str, folder: Path, bars: Progress) -> Path:
    """Returns a published file in the folder, downloaded unless it is there already; no other file ever appears there.

    Raises:
        DownloadError: if it cannot be had, or is not the published one.
    """
    path, digest, url = folder / name, source.digests[name], f"{source.address}/{name}"
    if path.exists():
        if (found := pooch.file_hash(path)) != digest:
            raise DownloadError(
                f"{path} is not the file published at {url}: its SHA-256 is {found} instead of {digest}; "
                f"remove {path} and run this again to download it"
            )
        return path
    pooch.get_logger().setLevel("WARNING")
    downloader = pooch.HTTPDownloader(progressbar=_Bar(bars, name), chunk_size=CHUNK, timeout=TIMEOUT)
    files = pooch.create(folder, source.address, registry={name: digest}, retry_if_failed=RETRIES)
    try:
        files.fetch(name, downloader=downloader)
    except (ValueError, RequestException) as error:  # a ValueError names both digests
        raise DownloadError(
            f"cannot download {url} ({error}). "
            f"Without a network: fetch {name} elsewhere, put it into {folder.absolute()} and run this again."
        ) from error
    return path


class _Bar:
    """The progress of one file, as pooch tells it."""

    def __init__(self, bars: Progress, name: str) -> None:
        self._bars, self._task = bars, bars.add_task(name, total=None)

    @property
    def total(self) -> float | None:
        """All bytes of the file; set when an attempt begins."""
        return self._bars.tasks[self._task].total

    @total.setter
    def total(self, size: int) -> None:
        self._bars.reset(self._task, total=size or None)

    def update(self, size: int) -> None:
        """Adds bytes that have arrived."""
        self._bars.advance(self._task, size)

    def reset(self) -> None:
        """Forgets them: pooch counts whole chunks, and says the true number in the end."""
        self._bars.update(self._task, completed=0)

    def close(self) -> None:
        """Leaves the bar to be seen."""


def unpack(archive: Path, inner: str, place: Path, wanted: list[str]) -> None:
    """Unpacks the files that are wanted from a folder in the archive; each appears when it is complete."""
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place, prefix=".unpacking-") as scratch:
        try:
            with tarfile.open(archive, "r:gz") as members:
                members.extractall(scratch, filter="data")
            for file in wanted:
                (Path(scratch) / inner / file).replace(place / file)
        except (tarfile.TarError, FileNotFoundError) as error:
            raise DownloadError(f"{archive} is not the archive that it should be: {error}") from error
