"""Downloads that go wrong, and archives that are not what they should be."""

import io
import socket
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from download_server import silent
from small_datasets import cut

from consequent_lab.downloads import DownloadError, Remote, fetch, unpack

CONTENT = np.random.default_rng(0).bytes(10_000)


# ---- one file ----------------------------------------------------------------------------------------------------


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
