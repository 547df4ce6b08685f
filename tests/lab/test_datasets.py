"""Data sets: the official layouts in small, everything that can be wrong with a file, and downloads that go wrong."""

import gzip
import hashlib
import io
import socket
import struct
import subprocess
import sys
import tarfile
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from consequent_lab import cli, datasets, downloads
from consequent_lab.datasets import CIFAR10, CIFAR100, FASHION_MNIST, LAYOUTS, Dataset, load, prepared, read
from consequent_lab.digits import load_digits
from consequent_lab.download_display import DownloadDisplay
from consequent_lab.downloads import SOURCES, DownloadError, Remote, Source, fetch, obtain, unpack

SMALL_CIFAR10 = replace(CIFAR10, train=100, test=20)
SMALL_CIFAR100 = replace(CIFAR100, train=200, test=100)
SMALL_FASHION = replace(FASHION_MNIST, train=60, test=20)
SMALL = {layout.name: layout for layout in (SMALL_CIFAR10, SMALL_CIFAR100, SMALL_FASHION)}


# ---- fakes in the official layouts -------------------------------------------------------------------------------


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


@pytest.fixture
def small(monkeypatch):
    """Makes the command line believe that the data sets are small."""
    for name, layout in SMALL.items():
        monkeypatch.setitem(LAYOUTS, name, layout)


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
    assert torch.equal(digits.train_labels, known.train_labels)
    assert torch.equal(digits.test_labels, known.test_labels)
    assert digits.train_images.shape == (1440, 1, 8, 8)
    assert (int(digits.train_images.min()), int(digits.train_images.max())) == (0, 255)
    flat = digits.train_images.flatten(1).double()
    correlation = torch.corrcoef(torch.stack([flat.flatten(), known.train_inputs.double().flatten()]))[0, 1]
    assert correlation > 0.9999, "the same pixels, in steps of 1/255"


def test_the_folder_comes_from_the_environment_unless_it_is_given(small, tmp_path, monkeypatch):
    there, elsewhere = tmp_path / "there", tmp_path / "elsewhere"
    write_cifar(SMALL_CIFAR10, there / "cifar-10-batches-bin")
    monkeypatch.setenv("CONSEQUENT_DATA", str(there))
    assert load("cifar10").name == "cifar10"
    with pytest.raises(FileNotFoundError, match="elsewhere"):
        load("cifar10", elsewhere)
    monkeypatch.setenv("CONSEQUENT_DATA", "")
    assert datasets.data_folder(None) == Path("data")


def test_unknown_names_are_answered_with_the_known_ones():
    with pytest.raises(ValueError, match=r"no data set 'mnist'; there are cifar10, cifar100, fashion-mnist, digits"):
        load("mnist")


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


def cut(content):
    return content[: len(content) // 2]


def flip(content):
    return content[:-6] + bytes([content[-6] ^ 1]) + content[-5:]  # in the checksum


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut, "damaged"),
        (flip, "damaged.*CRC"),
        (lambda _: b"<html>", "damaged: Not a gzipped file"),
        (lambda content: gzip.compress(gzip.decompress(content)[:-1]), "unpacks to 47055 bytes instead of 47056 bytes"),
        (lambda content: gzip.compress(gzip.decompress(content) + bytes(9)), "unpacks to more instead of 47056 bytes"),
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
    inputs = prepared(dataset, normalisation, "cpu", flat=False).train_inputs
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
    for values, bytes_ in ((inputs.train_inputs, train), (inputs.test_inputs, test)):
        expected = (bytes_[:, 1:] - mean[1:]) / deviation[1:]
        torch.testing.assert_close(values[:, 1:].double(), expected, rtol=1e-5, atol=1e-6)
        assert torch.all(values[:, 0] == 0), "constant in the training set"


def test_prepared_shapes_and_labels():
    dataset = constant_corner()
    flat, square = (prepared(dataset, "unit", torch.device("cpu"), flat=flat) for flat in (True, False))
    assert (flat.train_inputs.shape, flat.test_inputs.shape) == ((50, 48), (20, 48))
    assert (square.train_inputs.shape, square.test_inputs.shape) == ((50, 3, 4, 4), (20, 3, 4, 4))
    assert torch.equal(flat.train_inputs.view(50, 3, 4, 4), square.train_inputs)
    assert torch.equal(flat.train_labels, dataset.train_labels)
    assert torch.equal(flat.test_labels, dataset.test_labels)


def test_unknown_normalisations_are_refused():
    with pytest.raises(ValueError, match="no normalisation 'z'; there are unit, centred, symmetric, features"):
        prepared(constant_corner(), "z", "cpu", flat=True)


# ---- downloading -------------------------------------------------------------------------------------------------


class Server:
    """A web server on this machine that serves `files`, and cuts, lies or ignores ranges if told.

    Attributes:
        files: contents by name.
        cuts: bytes after which the next answers end; an answer without an entry is complete.
        ranges: whether a Range header is heard.
        unsized: whether it keeps the length to itself.
        requests: name and Range header of what was asked for.
    """

    def __init__(self):
        self.files, self.cuts, self.ranges, self.unsized, self.requests = {}, [], True, False, []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                server.answer(self)

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self.thread.start()

    def answer(self, handler):
        name, asked = handler.path.lstrip("/"), handler.headers.get("Range")
        self.requests.append((name, asked))
        if name not in self.files:
            handler.send_error(404)
            return
        content, start = self.files[name], 0
        if asked and self.ranges:
            start = int(asked.removeprefix("bytes=").removesuffix("-"))
            handler.send_response(206)
            handler.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        else:
            handler.send_response(200)
        if not self.unsized:
            handler.send_header("Content-Length", str(len(content) - start))
        handler.end_headers()
        end = start + self.cuts.pop(0) if self.cuts else len(content)
        handler.wfile.write(content[start:end])

    def publish(self, name, content):
        """Serves the content; returns it as a published file with its true digest."""
        self.files[name] = content
        url = f"http://127.0.0.1:{self.http.server_port}/{name}"
        return Remote(url, len(content), hashlib.sha256(content).hexdigest())

    def close(self):
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(downloads, "PAUSE", 0.001)
    monkeypatch.setattr(downloads, "CHUNK", 999)
    monkeypatch.setenv("no_proxy", "*")
    one = Server()
    yield one
    one.close()


CONTENT = np.random.default_rng(0).bytes(10_000)


def silent(*_):
    pass


def test_a_file_is_downloaded_once(server, tmp_path):
    remote, seen = server.publish("file.bin", CONTENT), []
    path = fetch(remote, tmp_path / "new" / "folder", lambda *report: seen.append(report))
    assert path == tmp_path / "new" / "folder" / "file.bin"
    assert path.read_bytes() == CONTENT
    assert [entry.name for entry in path.parent.iterdir()] == ["file.bin"]
    assert seen[0] == ("file.bin", 0, 10_000)
    assert seen[-1] == ("file.bin", 10_000, 10_000)
    assert [here for _, here, _ in seen] == sorted(here for _, here, _ in seen)
    assert fetch(remote, path.parent, silent) == path
    assert server.requests == [("file.bin", None)]


def test_a_cut_connection_is_taken_up_where_it_ended(server, tmp_path):
    remote = server.publish("file.bin", CONTENT)
    server.cuts = [2500, 1, 4000]
    assert fetch(remote, tmp_path, silent).read_bytes() == CONTENT
    assert [asked for _, asked in server.requests] == [None, "bytes=2500-", "bytes=2501-", "bytes=6501-"]


def test_many_cuts_do_not_matter_while_something_arrives(server, tmp_path):
    remote = server.publish("file.bin", CONTENT)
    server.cuts = [500] * 19
    assert fetch(remote, tmp_path, silent).read_bytes() == CONTENT
    assert len(server.requests) == 20


def test_giving_up_keeps_what_has_arrived_and_the_next_call_goes_on(server, tmp_path):
    remote = server.publish("file.bin", CONTENT)
    server.cuts = [3000, 0, 0, 0, 0]
    with pytest.raises(
        DownloadError, match=r"3000 of 10000 bytes are kept in .*file.bin.part: run this again to go on"
    ):
        fetch(remote, tmp_path, silent)
    assert [path.name for path in tmp_path.iterdir()] == ["file.bin.part"]
    server.requests.clear()
    assert fetch(remote, tmp_path, silent).read_bytes() == CONTENT
    assert server.requests == [("file.bin", "bytes=3000-")]


def test_a_server_that_ignores_ranges_sends_everything_again(server, tmp_path):
    remote = server.publish("file.bin", CONTENT)
    server.ranges, server.cuts = False, [2500]
    assert fetch(remote, tmp_path, silent).read_bytes() == CONTENT
    assert len(server.requests) == 2


def test_a_complete_part_needs_no_request(server, tmp_path):
    remote = server.publish("file.bin", CONTENT)
    (tmp_path / "file.bin.part").write_bytes(CONTENT)
    assert fetch(remote, tmp_path, silent).read_bytes() == CONTENT
    assert server.requests == []


def test_a_part_that_is_too_long_is_started_over(server, tmp_path):
    remote = server.publish("file.bin", CONTENT)
    (tmp_path / "file.bin.part").write_bytes(CONTENT + b"more")
    assert fetch(remote, tmp_path, silent).read_bytes() == CONTENT


def test_a_wrong_digest_is_refused_and_does_not_stay(server, tmp_path):
    remote = server.publish("file.bin", CONTENT)
    server.files["file.bin"] = CONTENT[:-1] + bytes([CONTENT[-1] ^ 1])
    with pytest.raises(DownloadError, match=rf"not the file published at {remote.url}: .*{remote.sha256}"):
        fetch(remote, tmp_path, silent)
    assert list(tmp_path.iterdir()) == []


def test_a_part_of_something_else_is_found_by_the_digest(server, tmp_path):
    remote = server.publish("file.bin", CONTENT)
    (tmp_path / "file.bin.part").write_bytes(bytes(5000))
    with pytest.raises(DownloadError, match="start over"):
        fetch(remote, tmp_path, silent)
    assert fetch(remote, tmp_path, silent).read_bytes() == CONTENT


@pytest.mark.parametrize("offered", [b"<html>please log in</html>", CONTENT + b"more"])
def test_another_size_is_refused_before_it_is_downloaded(offered, server, tmp_path):
    remote = server.publish("file.bin", CONTENT)
    server.files["file.bin"] = offered
    with pytest.raises(
        DownloadError, match=rf"another file than the published one \('{len(offered)}' instead of '10000'"
    ):
        fetch(remote, tmp_path, silent)
    (tmp_path / "file.bin.part").write_bytes(CONTENT[:5])
    with pytest.raises(DownloadError, match=rf"'bytes 5-{len(offered) - 1}/{len(offered)}' instead of 'bytes 5-9999/1"):
        fetch(remote, tmp_path, silent)


def test_an_endless_answer_without_a_length_ends_at_the_published_size(server, tmp_path):
    remote = server.publish("file.bin", CONTENT)
    server.files["file.bin"], server.unsized = CONTENT + bytes(100_000), True
    assert fetch(remote, tmp_path, silent).read_bytes() == CONTENT


def test_a_file_that_is_there_but_is_another_is_not_touched(server, tmp_path):
    remote = server.publish("file.bin", CONTENT)
    (tmp_path / "file.bin").write_bytes(b"mine")
    with pytest.raises(DownloadError, match=r"remove .*file.bin and run this again"):
        fetch(remote, tmp_path, silent)
    assert (tmp_path / "file.bin").read_bytes() == b"mine"
    assert server.requests == []


def test_a_file_that_the_server_does_not_have(server, tmp_path):
    remote = replace(server.publish("file.bin", CONTENT), url=f"http://127.0.0.1:{server.http.server_port}/gone.bin")
    with pytest.raises(DownloadError, match=r"cannot download .*gone.bin \(Not Found\).*put it into"):
        fetch(remote, tmp_path, silent)


def unreachable():
    """An address where nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def test_offline_says_which_file_to_put_where(tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    remote = Remote(f"{unreachable()}/cifar-10-binary.tar.gz", 10, "")
    with pytest.raises(DownloadError) as caught:
        fetch(remote, tmp_path, silent)
    assert f"cannot download {remote.url} (" in str(caught.value)
    assert f"fetch cifar-10-binary.tar.gz elsewhere, put it into {tmp_path} and run this again" in str(caught.value)
    assert "kept" not in str(caught.value)
    (tmp_path / "cifar-10-binary.tar.gz.part").write_bytes(b"12345")
    with pytest.raises(DownloadError, match=r"What has arrived is kept in .*\.part"):
        fetch(remote, tmp_path, silent)


def test_a_full_disk_is_no_cut_connection(server, tmp_path, monkeypatch):
    remote = server.publish("file.bin", CONTENT)

    class Full(io.BytesIO):
        def write(self, _):
            raise OSError(28, "No space left on device")

    real = Path.open
    monkeypatch.setattr(Path, "open", lambda path, mode="r", *rest: Full() if mode == "wb" else real(path, mode, *rest))
    with pytest.raises(OSError, match="No space left"):
        fetch(remote, tmp_path, silent)
    assert len(server.requests) == 1


# ---- archives ----------------------------------------------------------------------------------------------------


def archive_of(folder, inner):
    """A .tar.gz with the folder's files in a folder `inner`, as CIFAR's archives are."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=1) as members:
        members.add(folder, arcname=inner)
    return packed.getvalue()


def archive_with(path, *members):
    """Writes an archive of (name, content or (type, link target))."""
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            if isinstance(content, bytes):
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
            else:
                info.type, info.linkname = content
                archive.addfile(info)
    return path


@pytest.mark.parametrize(
    "evil",
    [
        [("../outside", b"x")],
        [("inner/../../outside", b"x")],
        [("inner/link", (tarfile.SYMTYPE, "../../..")), ("inner/link/outside", b"x")],
        [("inner/link", (tarfile.SYMTYPE, "/etc/passwd"))],
        [("inner/hard", (tarfile.LNKTYPE, "../../outside"))],
        [("inner/device", (tarfile.CHRTYPE, ""))],
    ],
    ids=["parent", "deep parent", "through a link", "absolute link", "hard link", "device"],
)
def test_archives_that_write_elsewhere_are_refused(evil, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    archive = archive_with(folder / "evil.tar.gz", ("inner/good.bin", b"good"), *evil)
    with pytest.raises(DownloadError, match=r"evil.tar.gz cannot be unpacked"):
        unpack(archive, "inner", folder / "place", ["good.bin"])
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    assert sorted(path.name for path in folder.rglob("*")) == ["evil.tar.gz", "place"]


def test_a_link_in_place_of_a_file_is_refused(tmp_path):
    members = ("inner/real.bin", b"x"), ("inner/good.bin", (tarfile.SYMTYPE, "real.bin"))
    archive = archive_with(tmp_path / "a.tar.gz", *members)
    with pytest.raises(DownloadError, match=r"has no good.bin in its folder inner"):
        unpack(archive, "inner", tmp_path / "place", ["good.bin"])


def test_only_what_is_wanted_is_unpacked(tmp_path):
    archive = archive_with(tmp_path / "a.tar.gz", ("inner/a.bin", b"new a"), ("inner/b.bin", b"new b"))
    (tmp_path / "place").mkdir()
    (tmp_path / "place" / "a.bin").write_bytes(b"mine")
    unpack(archive, "inner", tmp_path / "place", ["b.bin"])
    assert {path.name: path.read_bytes() for path in (tmp_path / "place").iterdir()} == {
        "a.bin": b"mine",
        "b.bin": b"new b",
    }


@pytest.mark.parametrize("damage", [cut, lambda _: b"no archive", lambda _: b""])
def test_damaged_archives_are_named(damage, tmp_path):
    archive = archive_with(tmp_path / "a.tar.gz", ("inner/a.bin", CONTENT))
    archive.write_bytes(damage(archive.read_bytes()))
    with pytest.raises(DownloadError, match=r"a.tar.gz cannot be unpacked"):
        unpack(archive, "inner", tmp_path / "place", ["a.bin"])
    assert list((tmp_path / "place").iterdir()) == []


# ---- whole data sets ---------------------------------------------------------------------------------------------


@pytest.fixture
def published(server, small, tmp_path, monkeypatch):
    """Publishes the small data sets on the server; returns what is in them."""
    origin = tmp_path / "origin"
    truth = {}
    for layout in (SMALL_CIFAR10, SMALL_CIFAR100):
        truth[layout.name] = write_cifar(layout, origin / layout.name)
        official = SOURCES[layout.name]
        remote = server.publish(official.remotes[0].name, archive_of(origin / layout.name, official.archive_folder))
        monkeypatch.setitem(SOURCES, layout.name, Source((remote,), official.archive_folder))
    truth["fashion-mnist"] = write_fashion(SMALL_FASHION, origin / "fashion", packed=True)
    names = [remote.name for remote in SOURCES["fashion-mnist"].remotes]
    remotes = tuple(server.publish(name, (origin / "fashion" / name).read_bytes()) for name in names)
    monkeypatch.setitem(SOURCES, "fashion-mnist", Source(remotes))
    return truth


def test_the_official_sources_fit_the_layouts():
    for layout in LAYOUTS.values():
        source = SOURCES[layout.name]
        assert all(len(bytes.fromhex(remote.sha256)) == 32 for remote in source.remotes)
        if source.archive_folder is None:
            assert {remote.name for remote in source.remotes} == {f"{file}.gz" for file in layout.files}
        else:
            assert source.archive_folder == layout.places[0]


@pytest.mark.parametrize("name", list(SMALL))
def test_obtained_data_sets_are_read(name, published, server, tmp_path):
    folder = tmp_path / "data"
    obtain(SMALL[name], SOURCES[name], folder, silent)
    assert_same(load(name, folder), published[name])
    left = {path.relative_to(folder).parts[0] for path in folder.rglob("*") if path.is_file()}
    assert left == {Path(SMALL[name].places[0]).parts[0]}, "neither archive nor scratch stays"
    asked = len(server.requests)
    obtain(SMALL[name], SOURCES[name], folder, silent)
    assert len(server.requests) == asked, "nothing is missing any more"


def test_an_archive_put_there_by_hand_needs_no_network(published, server, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    name = SOURCES["cifar10"].remotes[0].name
    (folder / name).write_bytes(server.files[name])
    obtain(SMALL_CIFAR10, SOURCES["cifar10"], folder, silent)
    assert_same(load("cifar10", folder), published["cifar10"])
    assert (folder / name).exists(), "it is the user's"
    assert server.requests == []


def test_an_archive_with_another_digest_is_not_unpacked(published, tmp_path):
    folder = tmp_path / "data"
    write_cifar(SMALL_CIFAR10, tmp_path / "other")
    (tmp_path / "other" / "extra").write_bytes(b"")
    folder.mkdir()
    (folder / "cifar-10-binary.tar.gz").write_bytes(archive_of(tmp_path / "other", "cifar-10-batches-bin"))
    with pytest.raises(DownloadError, match="not the file published"):
        obtain(SMALL_CIFAR10, SOURCES["cifar10"], folder, silent)
    assert [path.name for path in folder.iterdir()] == ["cifar-10-binary.tar.gz"]


def test_only_missing_files_are_brought(published, server, tmp_path):
    write_fashion(SMALL_FASHION, tmp_path / "data")
    (tmp_path / "data" / "t10k-labels-idx1-ubyte").unlink()
    obtain(SMALL_FASHION, SOURCES["fashion-mnist"], tmp_path / "data", silent)
    assert server.requests == [("t10k-labels-idx1-ubyte.gz", None)]
    assert_same(load("fashion-mnist", tmp_path / "data"), published["fashion-mnist"])


# ---- the command -------------------------------------------------------------------------------------------------


def command(capsys, *arguments):
    status = cli.main(["data", *map(str, arguments)])
    shown = capsys.readouterr()
    return status, shown.out, " ".join(shown.err.split())


def line(output, name):
    return " ".join(next(line for line in output.splitlines() if line.split()[:1] == [name]).split())


def test_the_list_says_what_is_there(small, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CONSEQUENT_DATA", raising=False)
    write_cifar(SMALL_CIFAR100, Path("data/cifar-100-binary"))
    status, output, errors = command(capsys)
    assert (status, errors) == (0, "")
    assert line(output, "cifar10") == "cifar10 – – – missing"
    assert line(output, "cifar100") == "cifar100 data/cifar-100-binary 200 + 100 100 sizes, labels"
    assert line(output, "digits") == "digits in scikit-learn 1,440 + 357 10 –"
    assert "--download" in output


def test_the_list_names_what_is_damaged_and_what_is_incomplete(small, tmp_path, capsys):
    write_cifar(SMALL_CIFAR10, tmp_path / "cifar-10-batches-bin")
    (tmp_path / "cifar-10-batches-bin" / "test_batch.bin").write_bytes(b"short")
    write_fashion(SMALL_FASHION, tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    status, output, errors = command(capsys, "cifar10", "fashion-mnist", "--data", tmp_path)
    assert status == 1
    assert line(output, "cifar10").endswith("damaged")
    assert line(output, "fashion-mnist").endswith("incomplete")
    assert "cifar100" not in output
    assert "test_batch.bin has 5 bytes instead of 61460" in errors
    assert "has no t10k-labels-idx1-ubyte" in errors


def test_download_brings_everything(published, tmp_path, capsys):
    folder = tmp_path / "data [bold]"
    status, output, errors = command(capsys, "--data", folder, "--download")
    assert (status, errors) == (0, "")
    assert output.count("sizes, labels") == 3
    assert "missing" not in output
    assert "\x1b" not in output
    assert "cifar-100-binary.tar.gz: 0.9 of 0.9 MB" in output
    for name, truth in published.items():
        assert_same(load(name, folder), truth)


def test_one_failed_download_does_not_stop_the_others(published, server, tmp_path, capsys):
    del server.files["cifar-10-binary.tar.gz"]
    status, output, errors = command(capsys, "cifar10", "cifar100", "--data", tmp_path / "data", "--download")
    assert status == 1
    assert line(output, "cifar10").endswith("missing")
    assert line(output, "cifar100").endswith("sizes, labels")
    assert "consequent: cifar10: cannot download" in errors
    assert f"put it into {tmp_path}/data" in errors


def test_what_is_damaged_is_not_overwritten_by_a_download(published, server, tmp_path, capsys):
    write_cifar(SMALL_CIFAR10, tmp_path)
    (tmp_path / "test_batch.bin").write_bytes(b"short")
    status, _, errors = command(capsys, "cifar10", "--data", tmp_path, "--download")
    assert status == 1
    assert "test_batch.bin has 5 bytes" in errors
    assert "remove it to download it anew" in errors
    assert (tmp_path / "test_batch.bin").read_bytes() == b"short"
    assert server.requests == []


def test_a_terminal_gets_a_bar():
    screen = Console(file=io.StringIO(), force_terminal=True, width=100)
    with DownloadDisplay(screen) as display:
        for here in (0, 500_000, 1_000_000):
            display.show("file.bin", here, 1_000_000)
    assert "file.bin" in screen.file.getvalue()
    assert "1.0/1.0 MB" in screen.file.getvalue()


def test_help_and_names_on_the_command_line():
    run = [sys.executable, "-m", "consequent_lab.cli", "data"]
    shown = subprocess.run([*run, "--help"], capture_output=True, text=True, timeout=60)
    assert shown.returncode == 0
    assert "--download" in shown.stdout
    wrong = subprocess.run([*run, "imagenet"], capture_output=True, text=True, timeout=60)
    assert wrong.returncode == 2
    assert "cifar100" in wrong.stdout + wrong.stderr
