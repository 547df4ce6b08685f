"""The data sets from their official addresses: bound to published digests, resumed where they were cut off."""

import gzip
import hashlib
import http.client
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from consequent_lab.datasets import CIFAR10, CIFAR100, FASHION_MNIST, Layout, locate

TIMEOUT = 30.0  # seconds without a byte
ATTEMPTS = 4  # in a row that bring nothing new before giving up
PAUSE = 1.0  # seconds before going on after the connection was cut, doubled after an attempt that brought nothing
CHUNK = 1 << 18

Report = Callable[[str, int, int], None]  # a file's name, its bytes that are here, all its bytes


class DownloadError(OSError):
    """A file could not be had, or is not the published one."""


@dataclass(frozen=True)
class Remote:
    """A published file."""

    url: str
    size: int
    sha256: str

    @property
    def name(self) -> str:
        """The file's name."""
        return self.url.rpartition("/")[2]


@dataclass(frozen=True)
class Source:
    """Where a data set is published.

    Args:
        remotes: the published files.
        archive_folder: the folder in the archive with the data set's files; None where they are published one by one.
    """

    remotes: tuple[Remote, ...]
    archive_folder: str | None = None


# Addresses: https://www.cs.toronto.edu/~kriz/cifar.html ("binary version") and the table in the README of
# https://github.com/zalandoresearch/fashion-mnist. Both publish md5 sums; the sizes and SHA-256 sums of the same files
# are those of TensorFlow Datasets (tensorflow_datasets/url_checksums/{cifar10,cifar100,fashion_mnist}.txt), and
# torchvision's prototype of FashionMNIST and MLDatasets.jl have the same.
_KRIZ = "https://www.cs.toronto.edu/~kriz"
_ZALANDO = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"  # no https there: the digest vouches for it
SOURCES: dict[str, Source] = {
    CIFAR10.name: Source(
        (
            Remote(
                f"{_KRIZ}/cifar-10-binary.tar.gz",
                170_052_171,
                "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            ),
        ),
        archive_folder="cifar-10-batches-bin",
    ),
    CIFAR100.name: Source(
        (
            Remote(
                f"{_KRIZ}/cifar-100-binary.tar.gz",
                168_513_733,
                "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
            ),
        ),
        archive_folder="cifar-100-binary",
    ),
    FASHION_MNIST.name: Source(
        (
            Remote(
                f"{_ZALANDO}/train-images-idx3-ubyte.gz",
                26_421_880,
                "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            ),
            Remote(
                f"{_ZALANDO}/train-labels-idx1-ubyte.gz",
                29_515,
                "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            ),
            Remote(
                f"{_ZALANDO}/t10k-images-idx3-ubyte.gz",
                4_422_102,
                "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            ),
            Remote(
                f"{_ZALANDO}/t10k-labels-idx1-ubyte.gz",
                5_148,
                "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
            ),
        )
    ),
}


def obtain(layout: Layout, source: Source, folder: Path, report: Report) -> None:
    """Brings the files of a data set that are missing into the folder; those that are there are left alone.

    Args:
        layout: which files belong to it.
        source: where they are published.
        folder: of all data sets.
        report: called now and then with a file's name, its bytes that are here and all its bytes.

    Raises:
        DownloadError: if that fails; says what to put where by hand.
    """
    place, missing = locate(layout, folder)
    if not missing:
        return
    if source.archive_folder is None:
        for remote in source.remotes:
            if remote.name.removesuffix(".gz") in missing:
                fetch(remote, place, report)
        return
    for remote in source.remotes:
        was_here = (folder / remote.name).exists()
        archive = fetch(remote, folder, report)
        unpack(archive, source.archive_folder, place, missing)
        if not was_here:
            archive.unlink()


# ---- one file ----------------------------------------------------------------------------------------------------


def fetch(remote: Remote, folder: Path, report: Report) -> Path:
    """Returns the published file in the folder, downloaded unless it is there already.

    What has arrived lies in a file with the ending .part, and another call goes on from there.

    Raises:
        DownloadError: if it cannot be had, or is not the published one.
    """
    path = folder / remote.name
    if path.exists():
        _check_digest(path, remote, f"remove {path} and run this again to download it")
        return path
    folder.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    if _size(part) > remote.size:
        part.unlink()
    _complete(remote, part, report)
    try:
        _check_digest(part, remote, "what had arrived is removed; run this again to start over")
    except DownloadError:
        part.unlink()  # or every further call would go on from it
        raise
    part.replace(path)
    return path


def _complete(remote: Remote, part: Path, report: Report) -> None:
    """Downloads until nothing is missing, however often the connection is cut, as long as that gets somewhere."""
    most, in_vain = _size(part), 0
    while (here := _size(part)) < remote.size:
        if in_vain == ATTEMPTS:
            raise DownloadError(
                f"the connection to {remote.url} is cut again and again; {here} of {remote.size} bytes are kept in "
                f"{part}: run this again to go on. {_by_hand(remote, part.parent)}"
            )
        _append(remote, part, report)
        in_vain = 0 if _size(part) > most else in_vain + 1
        most = max(most, _size(part))
        if most < remote.size:
            time.sleep(PAUSE * 2**in_vain)


def _append(remote: Remote, part: Path, report: Report) -> None:
    """Adds to what has arrived until the file is complete or the connection is cut."""
    have = _size(part)
    request = urllib.request.Request(remote.url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT)
    except (OSError, http.client.HTTPException) as error:  # URLError is an OSError
        if isinstance(error, urllib.error.HTTPError):
            error.close()
        reason = getattr(error, "reason", error)
        kept = f" What has arrived is kept in {part}." if have else ""
        raise DownloadError(
            f"cannot download {remote.url} ({reason}).{kept} {_by_hand(remote, part.parent)}"
        ) from error
    with response:
        if response.status != http.HTTPStatus.PARTIAL_CONTENT:
            have = 0  # the server sends everything
        _check_offer(remote, response, have, part.parent)
        with part.open("r+b" if have else "wb") as file:
            file.seek(have)
            _copy(remote, response, file, have, report)


def _check_offer(remote: Remote, response: http.client.HTTPResponse, have: int, folder: Path) -> None:
    """Refuses at once what cannot be the published file: a portal's log-in page, another part than was asked for."""
    if have:
        offered, wanted = response.headers.get("Content-Range"), f"bytes {have}-{remote.size - 1}/{remote.size}"
    else:
        offered, wanted = response.headers.get("Content-Length"), str(remote.size)
    if offered is not None and offered != wanted:
        raise DownloadError(
            f"{remote.url} offers another file than the published one ({offered!r} instead of {wanted!r} bytes). "
            f"{_by_hand(remote, folder)}"
        )


def _copy(remote: Remote, response: http.client.HTTPResponse, file: IO[bytes], have: int, report: Report) -> None:
    report(remote.name, have, remote.size)
    while have < remote.size:
        try:
            chunk = response.read(min(CHUNK, remote.size - have))
        except (OSError, http.client.HTTPException):  # of the network; those of the disk are raised below
            return
        if not chunk:
            return
        file.write(chunk)
        have += len(chunk)
        report(remote.name, have, remote.size)


def _check_digest(path: Path, remote: Remote, remedy: str) -> None:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != remote.sha256:
        raise DownloadError(
            f"{path} is not the file published at {remote.url}: its SHA-256 is {digest} instead of {remote.sha256}; "
            f"{remedy}"
        )


def _by_hand(remote: Remote, folder: Path) -> str:
    return f"Without a network: fetch {remote.name} elsewhere, put it into {folder.absolute()} and run this again."


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


# ---- an archive --------------------------------------------------------------------------------------------------


def unpack(archive: Path, inner: str, place: Path, wanted: list[str]) -> None:
    """Unpacks the files that are wanted from a folder in the archive; each appears when it is complete.

    Raises:
        DownloadError: if the archive is damaged, would write elsewhere, or lacks one of them; nothing is written then.
    """
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place, prefix=".unpacking-") as scratch:
        try:
            with tarfile.open(archive, "r:gz") as members:
                members.extractall(scratch, filter="data")
        except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DownloadError(f"{archive} cannot be unpacked: {error}") from error
        sources = [Path(scratch) / inner / file for file in wanted]
        absent = [source.name for source in sources if source.is_symlink() or not source.is_file()]
        if absent:
            raise DownloadError(f"{archive} has no {', '.join(absent)} in its folder {inner}")
        for source in sources:
            source.replace(place / source.name)
