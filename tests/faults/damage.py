"""Files that were cut short or had a bit flipped: of a run, of its compact form, of the data."""

import os
import random
import shutil
from pathlib import Path
from unittest.mock import patch

from consequent_lab.runs import RunFolder
from consequent_lab.train_config import TrainConfig
from faults.comparison import differences
from faults.trial import Trial, require

CONFIG = TrainConfig(hidden=(16,), iterations=60, log_every=10, evaluate_every=20, checkpoint_every=20)
FILES = ("config.json", "environment.json", "metrics.jsonl", "checkpoint.pt", "done.json")


class _Stopped(BaseException):
    """Ends a run in the middle."""


def damaged_runs(folder: Path, count: int, seed: int = 0) -> list[Trial]:
    """Damages a file of a run that was stopped half-way, then goes on with it.

    Args:
        folder: for the runs.
        count: attempts for each kind of damage and file.
        seed: of the places.
    """
    from consequent_lab.trainer import train

    whole, half = RunFolder(folder / "whole"), RunFolder(folder / "half")
    train(CONFIG, whole)
    _train_half(half)
    places = random.Random(seed)
    trials = []
    for name in FILES:
        source = whole if name == "done.json" else half
        for kind, damage in (("cut short", _cut), ("with a flipped bit", _flip)):
            trial = Trial(f"{name} {kind}", "an error that names the file, or the same result as without the damage")
            for number in range(count):
                copy = folder / "copy"
                shutil.rmtree(copy, ignore_errors=True)
                shutil.copytree(source.path, copy)
                what = damage(copy / name, places)
                with trial.attempt(f"{name}, {what}, attempt {number}"):
                    _goes_on_or_names(RunFolder(copy), name, whole)
            trials.append(trial)
    return trials


def damaged_compact_files(folder: Path, count: int, seed: int = 0) -> Trial:
    """Damages a run's compact file, then reads it."""
    from consequent_lab.paper.archive import Archive, write_compact
    from consequent_lab.trainer import train

    run = RunFolder.of(folder, "recipe", "variant", 0)
    train(CONFIG, run)
    kept = Archive(folder).run("recipe", "variant", 0)
    assert kept is not None
    path = write_compact([kept], folder / "compact")
    contents, places = path.read_bytes(), random.Random(seed)
    trial = Trial("a compact file of results, damaged", "an error that names the file, or the same readings")
    for number in range(count):
        path.write_bytes(contents)
        what = (_cut, _flip)[number % 2](path, places)
        with trial.attempt(what):
            try:
                read = Archive(folder / "compact").run("recipe", "variant", 0)
            except ValueError as error:
                require(path.name in str(error), f"the message does not name the file: {error}")
            else:
                require(read == kept, "other readings, and no error")
    return trial


def damaged_data(folder: Path, count: int, seed: int = 0) -> Trial:
    """Damages the data of a run that was stopped half-way, then goes on with it."""
    import torch

    from consequent_lab import trainer
    from consequent_lab.datasets import Dataset, load

    digits, places = load("digits", None), random.Random(seed)
    half = RunFolder(folder / "half")
    _train_half(half)
    trial = Trial("a bit of the data flipped under a run", "the run is not continued: it was trained on other data")
    for number in range(count):
        images, labels = digits.train_images.clone(), digits.train_labels.clone()
        flat = images.view(-1)
        place = places.randrange(len(flat))
        flat[place] ^= torch.tensor(1 << places.randrange(8), dtype=torch.uint8)
        changed = Dataset(digits.name, images, labels, digits.test_images, digits.test_labels, digits.classes)
        copy = folder / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(half.path, copy)
        with patch.object(trainer, "load", return_value=changed), trial.attempt(f"pixel {place}, attempt {number}"):
            _must_refuse(RunFolder(copy), "other data")
    return trial


def _train_half(folder: RunFolder) -> None:
    from consequent_lab.trainer import train

    def stop(event: str, *arguments: object) -> None:
        if (event, *arguments) == ("advanced", 50):
            raise _Stopped

    try:
        train(CONFIG, folder, watcher=stop)
    except _Stopped:
        return
    raise AssertionError("the run was not stopped")


def _goes_on_or_names(folder: RunFolder, name: str, undisturbed: RunFolder) -> None:
    from consequent_lab.trainer import train

    try:
        train(CONFIG, folder)
        found = differences(undisturbed, folder)
        folder.environment()
    except ValueError as error:
        require(name in str(error) or "another config" in str(error), f"the message does not name the file: {error}")
    else:
        require(not found, f"no error, and the run differs: {found}")


def _must_refuse(folder: RunFolder, text: str) -> None:
    from consequent_lab.trainer import train

    try:
        train(CONFIG, folder)
    except ValueError as error:
        require(text in str(error), f"another error: {error}")
    else:
        raise AssertionError("nothing was noticed")


def _cut(path: Path, places: random.Random) -> str:
    length = places.randrange(path.stat().st_size)
    os.truncate(path, length)
    return f"cut to {length} bytes"


def _flip(path: Path, places: random.Random) -> str:
    data = bytearray(path.read_bytes())
    place, bit = places.randrange(len(data)), places.randrange(8)
    data[place] ^= 1 << bit
    path.write_bytes(data)
    return f"bit {bit} of byte {place}"
