"""A run's folder survives what it is said to survive, and names what is damaged."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from consequent_lab import records, runs
from consequent_lab.records import device_name
from consequent_lab.runs import DamagedFileError, RunFolder, environment, sealed


@dataclass(frozen=True)
class Config:
    lr: float = 0.1
    hidden: tuple[int, ...] = (3, 2)
    name: str | None = None


@dataclass(frozen=True)
class LaterConfig(Config):
    momentum: float = 0.9


STATE = {"weights": torch.arange(1000.0), "iteration": 7, "nothing": None, "list": [{"step": torch.tensor(2.0)}]}


@pytest.fixture
def folder(tmp_path):
    """An opened folder with two lines of metrics, a checkpoint, and two lines after it."""
    folder = RunFolder.of(tmp_path, "recipe", "variant", 3)
    with folder.opened(Config()):
        assert folder.resume() is None
        for iteration in range(4):
            folder.append({"iteration": iteration, "loss": 1 / 3})
            if iteration == 1:
                folder.save_checkpoint(STATE)
    return folder


def file(folder, name):
    return folder.path / name


def resumed(folder):
    again = RunFolder(folder.path)
    with again.opened(Config()):
        return again, again.resume()


# ---- config and environment --------------------------------------------------------------------------------------


def test_config_is_read_back_as_it_was_written(folder):
    assert folder.path.parts[-3:] == ("recipe", "variant", "seed3")
    assert folder.config(Config) == Config()
    written = json.loads(file(folder, "config.json").read_text())
    assert {name: written[name] for name in written if name != "sha256"} == {"lr": 0.1, "hidden": [3, 2], "name": None}


def test_another_config_is_refused_and_the_difference_named(folder):
    difference = r"lr is 0\.1 there and 0\.2 now; hidden is \(3, 2\) there and \(3,\) now"
    with pytest.raises(ValueError, match=difference), folder.opened(Config(lr=0.2, hidden=(3,))):
        pytest.fail("opened")
    assert folder.config(Config) == Config()


def test_an_option_that_came_later_has_its_default(folder):
    assert folder.config(LaterConfig) == LaterConfig()
    with folder.opened(LaterConfig()):
        pass
    with (
        pytest.raises(ValueError, match=r"momentum is 0\.9 there and 0\.5 now"),
        folder.opened(LaterConfig(momentum=0.5)),
    ):
        pytest.fail("opened")


def test_an_option_that_is_gone_is_named(folder):
    file(folder, "config.json").write_text(json.dumps(sealed({"lr": 0.1, "warmth": 3})))
    with pytest.raises(ValueError, match=r"config\.json: warmth is no option of Config"):
        folder.config(Config)


@pytest.mark.parametrize("text", ["", '{"lr": 0.', "[1]", "\0\0\0", '{"lr": 0.1}'])
def test_damaged_config_is_named(folder, text):
    file(folder, "config.json").write_text(text)
    with pytest.raises(DamagedFileError, match=r"config\.json is damaged"), folder.opened(Config()):
        pytest.fail("opened")


def test_environment_lists_every_start(folder):
    for iteration in (0, 7):
        folder.add_environment({"iteration": iteration} | environment("cpu"))
    starts = folder.environment()
    assert [start["iteration"] for start in starts] == [0, 7]
    assert starts[0]["versions"]["torch"] == torch.__version__
    assert starts[0]["device"] == {"type": "cpu", "name": device_name("cpu"), "threads": torch.get_num_threads()}


def test_commit_is_that_of_the_checkout_or_none(tmp_path):
    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    assert runs._commit.__wrapped__(package) is None
    git("init")
    assert runs._commit.__wrapped__(package) is None  # an installed copy below somebody else's repository
    git("add", "-A")
    git("commit", "-m", "first")
    commit = runs._commit.__wrapped__(package)
    assert len(commit) == 40
    (package / "__init__.py").write_text("changed = True\n")
    assert runs._commit.__wrapped__(package) == f"{commit}+"


# ---- metrics -----------------------------------------------------------------------------------------------------


def test_metrics_are_read_back_with_null_for_what_is_not_finite(tmp_path):
    folder = RunFolder(tmp_path / "run")
    with folder.opened(Config()):
        folder.append({"loss": float("nan"), "norms": {"0": float("inf"), "1": 1.0}, "diverged": True})
    assert folder.metrics() == [{"loss": None, "norms": {"0": None, "1": 1.0}, "diverged": True}]


def test_a_torn_last_line_is_left_out_by_readers_and_cut_off_on_resume(folder):
    with file(folder, "metrics.jsonl").open("ab") as metrics:
        metrics.write(b'{"iteration": 4, "lo')
    assert [line["iteration"] for line in folder.metrics()] == [0, 1, 2, 3]
    again, state = resumed(folder)
    assert state["iteration"] == 7
    assert [line["iteration"] for line in again.metrics()] == [0, 1]
    assert file(folder, "metrics.jsonl").read_bytes().endswith(b"}\n")


def test_what_is_appended_after_resuming_is_part_of_the_next_checkpoint(folder):
    again = RunFolder(folder.path)
    with again.opened(Config()):
        again.resume()
        again.append({"iteration": 2})
        again.save_checkpoint({"iteration": 2})
        again.append({"iteration": 3})
    again, state = resumed(folder)
    assert state == {"iteration": 2}
    assert [line["iteration"] for line in again.metrics()] == [0, 1, 2]


def test_without_a_checkpoint_a_run_starts_again_from_nothing(tmp_path):
    folder = RunFolder(tmp_path / "run")
    with folder.opened(Config()):
        folder.append({"iteration": 0})
    again, state = resumed(folder)
    assert state is None
    assert again.metrics() == []


def test_damaged_metrics_are_named_and_left_as_they_are(folder):
    path = file(folder, "metrics.jsonl")
    whole = path.read_bytes()
    for damaged in (whole[:30], whole.replace(b"0.333", b"0.433", 1), b""):
        path.write_bytes(damaged)
        with pytest.raises(DamagedFileError, match=r"metrics\.jsonl is damaged.*at the last checkpoint"):
            resumed(folder)
        assert path.read_bytes() == damaged
    path.write_bytes(whole.replace(b'"iteration": 1', b'"iteration; 1'))
    with pytest.raises(DamagedFileError, match=r"metrics\.jsonl, line 2, is damaged"):
        folder.metrics()


def test_metrics_of_a_finished_run_are_those_it_finished_with(folder):
    with folder.opened(Config()):
        folder.resume()
        folder.append({"iteration": 2})
        folder.finish({"outcome": "finished"})
    assert len(folder.metrics()) == 3
    path = file(folder, "metrics.jsonl")
    whole = path.read_bytes()
    for damaged in (whole[:-10], whole + b"{}\n", whole.replace(b"0.3", b"0.4")):
        path.write_bytes(damaged)
        with pytest.raises(DamagedFileError, match=r"metrics\.jsonl is damaged.*the run was finished"):
            folder.metrics()


# ---- checkpoints -------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_read_back(folder):
    state = folder.checkpoint()
    assert torch.equal(state["weights"], STATE["weights"])
    assert {key: state[key] for key in ("iteration", "nothing", "list")} == {
        "iteration": 7,
        "nothing": None,
        "list": STATE["list"],
    }


def test_a_truncated_checkpoint_is_named(folder):
    path = file(folder, "checkpoint.pt")
    whole = path.read_bytes()
    for length in (0, 10, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(DamagedFileError, match=r"checkpoint\.pt is damaged"):
            resumed(folder)
    assert len(folder.metrics()) == 4, "nothing was cut off"


def test_a_flipped_bit_is_named_wherever_it_is(folder):
    path = file(folder, "checkpoint.pt")
    whole = path.read_bytes()
    for place in (0, 40, 100, len(whole) // 3, len(whole) // 2, len(whole) - 1):
        damaged = bytearray(whole)
        damaged[place] ^= 0x10
        path.write_bytes(damaged)
        with pytest.raises(DamagedFileError, match=r"checkpoint\.pt is damaged"):
            folder.checkpoint()


def test_checkpoints_are_not_unpickled(folder):
    class Malicious:
        def __reduce__(self):
            return os.system, ("true",)

    with folder.opened(Config()):
        folder.resume()
        folder.save_checkpoint({"iteration": Malicious()})
    with pytest.raises(Exception, match=r"[Ww]eights[ _]only"):
        folder.checkpoint()


@pytest.mark.parametrize("failing", ["fsync", "replace", "write"])
def test_the_last_checkpoint_stays_until_the_next_is_complete(folder, monkeypatch, failing):
    def fail(*_):
        raise OSError("no space left")

    with folder.opened(Config()):
        folder.resume()
        with monkeypatch.context() as patch:
            if failing == "fsync":
                patch.setattr(runs.os, "fsync", fail)
            elif failing == "replace":
                patch.setattr(Path, "replace", fail)
            else:
                patch.setattr(runs, "write_atomically", lambda path, write: records.write_atomically(path, fail))
            with pytest.raises(OSError, match="no space left"):
                folder.save_checkpoint({"iteration": 8})
    assert resumed(folder)[1]["iteration"] == 7


def test_unfinished_files_of_a_killed_writer_are_removed(folder):
    for name in (".checkpoint.pt.123", ".done.json.77"):
        file(folder, name).write_bytes(b"half")
    resumed(folder)
    assert sorted(path.name for path in folder.path.iterdir()) == [
        ".lock",
        "checkpoint.pt",
        "config.json",
        "metrics.jsonl",
    ]


# ---- whole folders -----------------------------------------------------------------------------------------------


def test_two_processes_do_not_write_to_one_folder(folder):
    pytest.importorskip("fcntl")
    other = RunFolder(folder.path)
    with folder.opened(Config()), pytest.raises(BlockingIOError, match="another process"), other.opened(Config()):
        pytest.fail("opened")
    with folder.opened(Config()):
        pass


def test_a_damaged_outcome_is_named(folder):
    assert folder.outcome() is None
    for text in ("", '{"outcome": "finished"}'):
        file(folder, "done.json").write_text(text)
        with pytest.raises(DamagedFileError, match=r"done\.json is damaged"):
            folder.outcome()


def test_reading_needs_no_torch(folder):
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from pathlib import Path; from consequent_lab.runs import RunFolder\n"
        f"run = RunFolder(Path({str(folder.path)!r}))\n"
        "print(len(run.metrics()), run.outcome())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["4", "None"], done.stderr


def test_a_run_that_never_began_leaves_nothing(tmp_path):
    (tmp_path / "runs").mkdir()
    folder = RunFolder(tmp_path / "runs" / "mlp" / "seed0")
    with pytest.raises(RuntimeError, match="no data"), folder.opened(Config()):
        raise RuntimeError("no data")
    assert list((tmp_path / "runs").iterdir()) == []
    with folder.opened(Config()):
        folder.append({"iteration": 0})
    with pytest.raises(RuntimeError, match="no data"), folder.opened(Config()):
        raise RuntimeError("no data")
    assert (folder.path / "config.json").exists()
