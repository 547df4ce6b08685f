"""The data sets from their official addresses: downloaded by pooch, and bound to published digests."""

import tarfile
import tempfile
from pathlib import Path

import pooch
import requests
from rich.progress import Progress

from consequent_lab.datasets import Layout, locate

TIMEOUT = 30.0  # seconds without a byte
RETRIES = 3  # of a download that was cut off or is not the published file, from its beginning
CHUNK = 1 << 18


class DownloadError(OSError):
    """A file could not be had, or is not the published one."""


def obtain(layout: Layout, folder: Path, bars: Progress) -> None:
    """Brings the files of a data set that are missing into the folder of all; those that are there are left alone.

    Raises:
        DownloadError: if that fails; says what to put where by hand.
    """
    place, missing = locate(layout, folder)
    for name, digest in layout.digests.items() if missing else ():
        url = f"{layout.address}/{name}"
        if name.endswith(".tar.gz"):
            was_here = (folder / name).exists()
            archive = fetch(url, digest, folder, bars)
            unpack(archive, layout.places[0], place, missing)
            if not was_here:
                archive.unlink()
        elif name.removesuffix(".gz") in missing:
            fetch(url, digest, place, bars)


def fetch(url: str, digest: str, folder: Path, bars: Progress) -> Path:
    """Returns a published file in the folder, downloaded unless it is there already; no other file ever appears there.

    Raises:
        DownloadError: if it cannot be had, or is not the published one.
    """
    address, _, name = url.rpartition("/")
    path = folder / name
    if path.exists():
        if (found := pooch.file_hash(path)) != digest:
            raise DownloadError(
                f"{path} is not the file published at {url}: its SHA-256 is {found} instead of {digest}; "
                f"remove {path} and run this again to download it"
            )
        return path
    pooch.get_logger().setLevel("WARNING")
    task = bars.add_task(name, total=None)

    def download(address: str, output: str, _: pooch.Pooch) -> None:
        with requests.get(address, stream=True, timeout=TIMEOUT) as response, Path(output).open("wb") as file:
            response.raise_for_status()
            bars.reset(task, total=int(response.headers.get("content-length", 0)) or None)
            for chunk in response.iter_content(CHUNK):
                file.write(chunk)
                bars.advance(task, len(chunk))

    files = pooch.create(folder, address, registry={name: digest}, retry_if_failed=RETRIES)
    try:
        files.fetch(name, downloader=download)
    except (ValueError, requests.RequestException) as error:  # a ValueError names both digests
        raise DownloadError(
            f"cannot download {url} ({error}). "
            f"Without a network: fetch {name} elsewhere, put it into {folder.absolute()} and run this again."
        ) from error
    return path


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
