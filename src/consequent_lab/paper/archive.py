"""Runs as they are kept: in their folders, or each in one compact file of JSON lines. Both read as the same objects.

    <root>/<recipe>/<variant>/seed<k>/          a run folder
    <root>/<recipe>/<variant>/seed<k>.jsonl     the same run, compact

A compact file's first line says what was asked for, on what it ran, by which command, and how it ended; every other
line is a reading. Readings are thinned: what can be derived is left out, an epoch's mean stands once, gradients' norms
on a few lines; numbers have six digits. A run folder is thinned in the same way when it is read.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from consequent_lab.paper.measures import Curve
from consequent_lab.records import DIGITS, plain_numbers, write_atomically
from consequent_lab.runs import DamagedFileError, RunFolder, config_from, parsed, sealed, unsealed
from consequent_lab.train_config import TrainConfig

LINES_WITH_NORMS = 20
UNFINISHED = "unfinished"
LEFT_OUT = {"lr", "running_loss", "running_accuracy"}


@dataclass(frozen=True)
class KeptRun:
    """A run: a finished one, or as far as it got."""

    recipe: str
    variant: str
    seed: int
    config: TrainConfig
    starts: list[dict[str, Any]]  # what it ran on, every time it was started
    outcome: dict[str, Any]
    lines: list[dict[str, Any]]

    @property
    def name(self) -> str:
        """As in messages."""
        return f"{self.recipe}/{self.variant}/seed{self.seed}"

    @property
    def is_finished(self) -> bool:
        """Whether it came to an end, good or bad."""
        return bool(self.outcome["outcome"] != UNFINISHED)

    @property
    def diverged(self) -> bool:
        """Whether its loss stopped being finite."""
        return bool(self.outcome["outcome"] == "diverged")

    def curve(self, reading: str) -> Curve:
        """Returns a reading by iterations."""
        return [(line["iteration"], line[reading]) for line in self.lines if line.get(reading) is not None]

    def last(self, reading: str) -> float | None:
        """Returns the last value of a reading, or None if there is none."""
        curve = self.curve(reading)
        return curve[-1][1] if curve else None

    def at(self, reading: str, iteration: float) -> float | None:
        """Returns the value of a reading at an iteration, or None if there is none."""
        return dict(self.curve(reading)).get(iteration)


class Archive:
    """Runs under some folders; of a run that is finished in several, the first one counts. A run is read once.

    Args:
        roots: folders of run folders, of compact files, or of both; one that is not there is empty.
        unfinished: count runs that are not finished as well, as far as they got.
    """

    def __init__(self, *roots: Path, unfinished: bool = False) -> None:
        self._roots = roots
        self._unfinished = unfinished
        self._read: dict[tuple[str, str, int], KeptRun] = {}

    def run(self, recipe: str, variant: str, seed: int) -> KeptRun | None:
        """Returns a run, or None if there is none yet."""
        key = recipe, variant, seed
        if key not in self._read:
            found = [run for root in self._roots if (run := _read(root, *key, self._unfinished)) is not None]
            found = [run for run in found if run.is_finished] or found[:1]
            if found and (found[0].is_finished or self._unfinished):
                self._read[key] = found[0]
        return self._read.get(key)

    def runs(self, recipe: str, variant: str) -> list[KeptRun]:
        """Returns the runs of a variant, by seed."""
        return [run for seed in sorted(self._seeds(recipe, variant)) if (run := self.run(recipe, variant, seed))]

    def variants(self, recipe: str) -> list[str]:
        """Returns the variants of a recipe that something is kept of."""
        folders = (root / recipe for root in self._roots)
        return sorted(
            {path.name for folder in folders if folder.is_dir() for path in folder.iterdir() if path.is_dir()}
        )

    def recipes(self) -> list[str]:
        """Returns the recipes that something is kept of."""
        return sorted({path.name for root in self._roots if root.is_dir() for path in root.iterdir() if path.is_dir()})

    def _seeds(self, recipe: str, variant: str) -> set[int]:
        names = {path.name for root in self._roots for path in (root / recipe / variant).glob("seed*")}
        numbers = {name.removeprefix("seed").removesuffix(".jsonl") for name in names}
        return {int(number) for number in numbers if number.isdigit()}


def _read(root: Path, recipe: str, variant: str, seed: int, unfinished: bool) -> KeptRun | None:
    folder = RunFolder.of(root, recipe, variant, seed)
    outcome = folder.outcome()
    compact = compact_path(root, recipe, variant, seed)
    if outcome is None and compact.exists():
        return read_compact(compact)
    if outcome is None and not (unfinished and folder.has_metrics):
        return None
    lines = list(thinned(folder.metrics()))
    if outcome is None:
        outcome = {"outcome": UNFINISHED, **{key: lines[-1][key] for key in ("iteration", "seconds")}}
    kept = {key: value for key, value in outcome.items() if key != "metrics"}
    config = folder.config(TrainConfig)
    return KeptRun(recipe, variant, seed, config, folder.environment(), plain_numbers(kept, DIGITS), lines)


# ---- compact files -----------------------------------------------------------------------------------------------


def compact_path(root: Path, recipe: str, variant: str, seed: int) -> Path:
    """Returns where a run's compact file is."""
    return root / recipe / variant / f"seed{seed}.jsonl"


def write_compact(run: KeptRun, root: Path) -> Path:
    """Writes a run's compact file and returns its path."""
    readings = "".join(_line(entry) for entry in run.lines).encode()
    head = sealed({**asdict(run), "lines": len(run.lines)}, readings)
    path = compact_path(root, run.recipe, run.variant, run.seed)
    write_atomically(path, lambda file: file.write(_line(head).encode() + readings))
    return path


def read_compact(path: Path) -> KeptRun:
    """Returns the run that a compact file holds.

    Raises:
        DamagedFileError: if the file is not what was written.
    """
    first, _, readings = path.read_bytes().partition(b"\n")
    head = unsealed(parsed(first, f"{path}, line 1,"), str(path), readings)
    lines = [parsed(line, f"{path}, line {number},") for number, line in enumerate(readings.splitlines(), start=2)]
    try:
        head.pop("lines")
        config = config_from(head.pop("config"), TrainConfig, str(path))
        run = KeptRun(config=config, lines=lines, **head)
    except (KeyError, TypeError) as error:
        raise DamagedFileError(f"{path} is damaged: its first line does not describe a run ({error})") from error
    if path != compact_path(path.parents[2], run.recipe, run.variant, run.seed):
        raise DamagedFileError(f"{path} holds {run.name}: it is not where it belongs")
    return run


def _line(entry: dict[str, Any]) -> str:
    return json.dumps(entry, ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n"


# ---- thinning ----------------------------------------------------------------------------------------------------


def thinned(lines: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields the readings as they are kept."""
    with_norms = [number for number, line in enumerate(lines) if "gradient_norms" in line]
    stride = max(1, math.ceil(len(with_norms) / LINES_WITH_NORMS))
    kept_norms = {*with_norms[::stride], *with_norms[-1:]}
    complete_epochs = 0
    for number, line in enumerate(lines):
        left_out = set(LEFT_OUT)
        if number not in kept_norms:
            left_out.add("gradient_norms")
        if number < len(lines) - 1:
            left_out.add("counters")
        if math.floor(line["epoch"] + 1e-6) > complete_epochs:
            complete_epochs = math.floor(line["epoch"] + 1e-6)
        else:
            left_out |= {"epoch_loss", "epoch_accuracy"}  # they stand on an earlier line
        yield plain_numbers({key: value for key, value in line.items() if key not in left_out}, DIGITS)
