"""Whole data sets, brought by `obtain` and by the command `consequent data`."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from download_server import archive_of, silent
from small_datasets import SMALL, SMALL_CIFAR10, SMALL_CIFAR100, SMALL_FASHION, assert_same, write_cifar, write_fashion

from consequent_lab import cli
from consequent_lab.datasets import LAYOUTS, load
from consequent_lab.downloads import DownloadError, obtain

# ---- whole data sets ---------------------------------------------------------------------------------------------


def test_the_official_sources_fit_the_layouts():
    for layout in LAYOUTS.values():
        assert all(len(bytes.fromhex(digest)) == 32 for digest in layout.digests.values())
        if not any(name.endswith(".tar.gz") for name in layout.digests):
            assert set(layout.digests) == {f"{file}.gz" for file in layout.files}


@pytest.mark.parametrize("name", list(SMALL))
def test_obtained_data_sets_are_read(name, published, server, tmp_path):
    folder = tmp_path / "data"
    obtain(LAYOUTS[name], folder, silent())
    assert_same(load(name, folder), published[name])
    left = {path.relative_to(folder).parts[0] for path in folder.rglob("*") if path.is_file()}
    assert left == {Path(SMALL[name].places[0]).parts[0]}, "neither archive nor scratch stays"
    asked = len(server.requests)
    obtain(LAYOUTS[name], folder, silent())
    assert len(server.requests) == asked, "nothing is missing any more"


def test_an_archive_put_there_by_hand_needs_no_network(published, server, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    (name,) = LAYOUTS["cifar10"].digests
    (folder / name).write_bytes(server.files[name])
    obtain(LAYOUTS["cifar10"], folder, silent())
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
        obtain(LAYOUTS["cifar10"], folder, silent())
    assert [path.name for path in folder.iterdir()] == ["cifar-10-binary.tar.gz"]


def test_only_missing_files_are_brought(published, server, tmp_path):
    write_fashion(SMALL_FASHION, tmp_path / "data")
    (tmp_path / "data" / "t10k-labels-idx1-ubyte").unlink()
    obtain(LAYOUTS["fashion-mnist"], tmp_path / "data", silent())
    assert server.requests == ["t10k-labels-idx1-ubyte.gz"]
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
    assert re.search(
        r"cifar-100-binary\.tar\.gz .* 9\d\d\.\d/9\d\d\.\d kB|cifar-100-binary\.tar\.gz .* 0\.9/0\.9 MB", output
    )
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


def test_help_and_names_on_the_command_line():
    run = [sys.executable, "-m", "consequent_lab.cli", "data"]
    shown = subprocess.run([*run, "--help"], capture_output=True, text=True, timeout=60)
    assert shown.returncode == 0
    assert "--download" in shown.stdout
    wrong = subprocess.run([*run, "imagenet"], capture_output=True, text=True, timeout=60)
    assert wrong.returncode == 2
    assert "cifar100" in wrong.stdout + wrong.stderr
