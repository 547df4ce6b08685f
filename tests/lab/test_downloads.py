"""Downloads that go wrong."""

import errno
import io
import os
import socket
from pathlib import Path

import numpy as np
import pytest
from download_server import archive_of, silent

from consequent_lab.downloads import RETRIES, DownloadError, fetch, unpack

CONTENT = np.random.default_rng(0).bytes(10_000)


def test_a_file_is_downloaded_once_and_its_progress_has_a_total(server, tmp_path):
    source, bars = server.publish_file(CONTENT), silent()
    path = fetch(*source, tmp_path / "new" / "folder", bars)
    assert path == tmp_path / "new" / "folder" / "file.bin"
    assert path.read_bytes() == CONTENT
    assert [file.name for file in path.parent.iterdir()] == ["file.bin"]
    assert [(task.description, task.completed, task.total) for task in bars.tasks] == [("file.bin", 10_000, 10_000)]
    assert fetch(*source, path.parent, bars) == path
    assert server.requests == ["file.bin"]


def test_a_download_that_is_cut_off_starts_over(server, tmp_path):
    source, bars = server.publish_file(CONTENT), silent()
    server.cuts = [2500, 0, 9999]
    assert fetch(*source, tmp_path, bars).read_bytes() == CONTENT
    assert len(server.requests) == 4
    assert bars.tasks[0].completed == 10_000


def test_giving_up_leaves_nothing_and_the_next_call_tries_again(server, tmp_path):
    source = server.publish_file(CONTENT)
    server.cuts = [3000] * (1 + RETRIES)
    with pytest.raises(DownloadError, match=r"cannot download .*file.bin .*put it into .* and run this again"):
        fetch(*source, tmp_path, silent())
    assert list(tmp_path.iterdir()) == []
    assert fetch(*source, tmp_path, silent()).read_bytes() == CONTENT


@pytest.mark.parametrize(
    "offered", [CONTENT[:-1] + bytes([CONTENT[-1] ^ 1]), b"<html>please log in</html>", CONTENT + b"more"]
)
def test_another_file_is_refused_by_its_digest_and_does_not_stay(offered, server, tmp_path):
    source = server.publish_file(CONTENT)
    server.files["file.bin"] = offered
    with pytest.raises(DownloadError, match=rf"cannot download {source[0]} .*{source[1]}"):
        fetch(*source, tmp_path, silent())
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_there_but_is_another_is_not_touched(server, tmp_path):
    source = server.publish_file(CONTENT)
    (tmp_path / "file.bin").write_bytes(b"mine")
    with pytest.raises(DownloadError, match=rf"{source[1]}; remove .*file.bin and run this again"):
        fetch(*source, tmp_path, silent())
    assert (tmp_path / "file.bin").read_bytes() == b"mine"
    assert server.requests == []


def test_a_file_that_the_server_does_not_have(server, tmp_path):
    source = server.publish_file(CONTENT)
    server.files.clear()
    with pytest.raises(DownloadError, match=r"cannot download .*file.bin \(404 .*Not Found.*put it into"):
        fetch(*source, tmp_path, silent())


def unreachable():
    """An address where nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def test_offline_says_which_file_to_put_where(server, tmp_path):
    url = f"{unreachable()}/cifar-10-binary.tar.gz"
    with pytest.raises(DownloadError) as caught:
        fetch(url, "", tmp_path, silent())
    assert f"cannot download {url} (" in str(caught.value)
    assert f"fetch cifar-10-binary.tar.gz elsewhere, put it into {tmp_path} and run this again" in str(caught.value)


def test_a_full_disk_is_no_cut_connection(server, tmp_path, monkeypatch):
    source = server.publish_file(CONTENT)

    class Full(io.BytesIO):
        def write(self, _):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "open", lambda *_: Full())
    with pytest.raises(OSError, match="No space left"):
        fetch(*source, tmp_path, silent())
    assert len(server.requests) == 1
    assert list(tmp_path.iterdir()) == []


def test_only_what_is_wanted_is_unpacked(tmp_path):
    (tmp_path / "packed").mkdir()
    for name in "ab":
        (tmp_path / "packed" / f"{name}.bin").write_text(f"new {name}")
    (tmp_path / "a.tar.gz").write_bytes(archive_of(tmp_path / "packed", "inner"))
    (tmp_path / "place").mkdir()
    (tmp_path / "place" / "a.bin").write_text("mine")
    unpack(tmp_path / "a.tar.gz", "inner", tmp_path / "place", ["b.bin"])
    assert {path.name: path.read_text() for path in (tmp_path / "place").iterdir()} == {
        "a.bin": "mine",
        "b.bin": "new b",
    }
