"""`consequent train` under torchrun: one run in one folder; with a plain optimiser it is the run of one process."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from consequent_lab.runs import RunFolder

pytestmark = pytest.mark.slow

SOURCE = Path(__file__).parents[2] / "src"
OPTIONS = "train --hidden 24 24 --log-every 5 --evaluate-every 10 --checkpoint-every 7 --device cpu"


def command(folder, *options, ranks=1):
    start = [sys.executable]
    if ranks > 1:
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [*start, "-m", "consequent_lab.cli", *OPTIONS.split(), "--runs", folder, "--name", "run", *options]


def environment():
    return {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}


def consequent(folder, *options, ranks=1):
    """Runs the command and returns the finished process."""
    return subprocess.run(
        command(folder, *options, ranks=ranks), capture_output=True, text=True, timeout=90, env=environment()
    )


def metrics(folder):
    lines = (folder / "train/run/seed0/metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_two_ranks_train_the_run_of_one_process(tmp_path):
    for name, ranks in (("one", 1), ("two", 2)):
        process = consequent(tmp_path / name, "--iterations", "20", "--no-consequentialist", ranks=ranks)
        assert process.returncode == 0, process.stderr
    one, two = metrics(tmp_path / "one"), metrics(tmp_path / "two")
    assert [line["iteration"] for line in two] == [line["iteration"] for line in one] == [0, 5, 10, 15, 20]
    for mine, theirs in zip(two, one, strict=True):
        for name in ("batch_loss", "running_loss", "train_loss", "test_loss"):
            assert mine.get(name) == (pytest.approx(theirs[name], rel=1e-4) if name in theirs else None)
    folder = tmp_path / "two/train/run/seed0"
    assert json.loads((folder / "done.json").read_text())["outcome"] == "finished"
    starts = json.loads((folder / "environment.json").read_text())["starts"]
    assert [start["ranks"] for start in starts] == [2]
    again = consequent(tmp_path / "two", "--iterations", "20", "--no-consequentialist", ranks=2)
    assert again.returncode == 0, again.stderr
    assert metrics(tmp_path / "two") == two


def test_ranks_that_are_corrected_learn(tmp_path):
    process = consequent(tmp_path, "--iterations", "60", ranks=2)
    assert process.returncode == 0, process.stderr
    first, *_, last = metrics(tmp_path)
    assert last["train_loss"] < first["train_loss"] / 4


def test_a_batch_that_cannot_be_shared_out(tmp_path):
    process = consequent(tmp_path, "--batch-size", "5", ranks=2)
    assert process.returncode != 0
    assert "batch_size 5 cannot be shared out equally among 2 ranks" in process.stderr


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for processes in /proc")
def test_a_rank_that_is_killed(tmp_path):
    """All ranks end, and the last checkpoint is whole; what was trained is not lost."""
    folder = RunFolder(tmp_path / "train/run/seed0")
    with subprocess.Popen(
        command(tmp_path, "--iterations", "100000", ranks=2),
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            end = time.monotonic() + 60
            while not (folder.path / "checkpoint.pt").exists():
                assert time.monotonic() < end
                assert process.poll() is None
                time.sleep(0.2)
            ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            os.kill(int(ranks[-1]), signal.SIGKILL)
            assert process.wait(timeout=60) != 0
        finally:
            process.kill()
    assert folder.outcome() is None
    assert folder.checkpoint()["iteration"] >= 7
    state = folder.resume()
    assert state["iteration"] % 7 == 0
    assert folder.metrics()[-1]["iteration"] <= state["iteration"]


def test_a_rank_that_never_comes_is_not_waited_for_for_long():
    code = """
from datetime import timedelta
from consequent_lab import rank_group
rank_group.TIMEOUT = timedelta(seconds=2)
with rank_group.joined("cpu"):
    print("met")
"""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment() | alone
    )
    assert ended.returncode == 1
    assert "imed out" in ended.stderr
    assert "met" not in ended.stdout
