"""`consequent watch`: a run while it trains, or as it ended."""

import os
import re
from dataclasses import replace
from io import StringIO

from rich.console import Console
from test_trainer import SMALL, run

from consequent_lab import cli, watch_command
from consequent_lab.kept_runs import TrainedRun
from consequent_lab.runs import RunFolder

FAST = replace(SMALL, hidden=(12,), iterations=30)


def shown(outcome, lines, config, width=100):
    console = Console(file=StringIO(), width=width)
    console.print(watch_command.picture_of(TrainedRun("train", "mine", 0, {"outcome": outcome}, lines, config, [])))
    return console.file.getvalue()


def line(iteration, **readings):
    return {"iteration": iteration, "epoch": iteration / 45, "seconds": iteration / 20, **readings}


def test_a_running_run_shows_loss_and_speed():
    lines = [line(0, train_loss=2.0), line(10, batch_loss=1.0), line(20, train_loss=0.5)]
    text = shown("unfinished", lines, replace(FAST, iterations=None, epochs=2))
    assert "20 of 90" in text
    assert "20 iterations per second, 3.5 s left" in text
    assert re.search("training loss  █▁  0.5", text)


def test_a_run_without_readings_is_shown():
    assert "0 of 30" in shown("unfinished", [], FAST)


def test_a_finished_run_is_shown_once(tmp_path, capsys):
    folder = run(FAST, tmp_path / "train" / "mine" / "seed0")
    run(FAST, tmp_path / "train" / "older" / "seed0")
    os.utime(tmp_path / "train" / "older" / "seed0" / "metrics.jsonl", (1, 1))
    for place in (folder.path, tmp_path):  # of several runs, the one that was written to last
        assert cli.main(["watch", str(place)]) == 0
        text = capsys.readouterr().out
        assert "30 of 30, finished" in text
        *_, last = folder.metrics()
        assert f"{100 * last['test_accuracy']:.2f} %" in text


def test_a_terminal_is_live_until_the_run_ends(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path / "run")
    console = Console(file=StringIO(), width=100, force_terminal=True)
    monkeypatch.setattr(watch_command, "console", lambda: console)
    steps = iter([lambda: folder.append(line(10, train_loss=0.25)), lambda: folder.finish({"outcome": "finished"})])
    with folder.opened(FAST):
        folder.append(line(0, train_loss=2.0))
        monkeypatch.setattr(watch_command.time, "sleep", lambda seconds: next(steps)())
        assert cli.main(["watch", str(folder.path)]) == 0
    text = console.file.getvalue()
    assert text.index("0 of 30") < text.index("10 of 30") < text.index("finished")
    assert next(steps, None) is None


def test_what_is_no_run_is_named(tmp_path, capsys):
    assert cli.main(["watch", str(tmp_path)]) == 1
    assert "has no runs: name the folder of a run" in capsys.readouterr().err
