"""Runs of any kind beside each other: as a table, as lines of CSV, as scalars of TensorBoard.

A run is read from its folder, from a compact file of `consequent collect`, or from the finals of `consequent race`.
Runs that differ by their seed alone are one row of the table.
"""

import csv
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from consequent_lab.numbers import three_digits
from consequent_lab.progress import shown_seconds
from consequent_lab.race.curves import unpacked
from consequent_lab.runs import RunFolder
from consequent_lab.train_config import TrainConfig

Line = dict[str, Any]


@dataclass(frozen=True)
class SeenRun:
    """A run as it is compared."""

    label: str  # up to its seed
    seed: int
    outcome: str  # "finished", "diverged" or "running"
    lines: list[Line]  # of metrics, each with an iteration
    seconds: float | None  # of training so far, where it was measured

    @property
    def iterations(self) -> int:
        """Iterations so far."""
        return int(self.lines[-1]["iteration"]) if self.lines else 0

    def curve(self, *metrics: str, by: str = "iteration") -> list[tuple[float, float]]:
        """Returns the first of these metrics that the run has, against iterations or seconds."""
        for metric in metrics:
            found = [(line[by], line[metric]) for line in self.lines if _has(line, by) and _has(line, metric)]
            if found:
                return found
        return []

    def last(self, *metrics: str) -> float | None:
        """Returns the last value of the first of these metrics that the run has; None of one that diverged."""
        curve = self.curve(*metrics)
        return curve[-1][1] if curve and self.outcome != "diverged" else None


def _has(line: Line, name: str) -> bool:
    value = line.get(name)
    return value is not None and value == value


TRAINING_LOSS = ("train_loss", "epoch_loss", "running_loss", "batch_loss")
TEST_ACCURACY = ("test_accuracy", "validation_accuracy")
TEST_LOSS = ("test_loss", "validation_loss")


# ---- reading -----------------------------------------------------------------------------------------------------


def seen_runs(paths: Sequence[Path]) -> list[SeenRun]:
    """Returns all runs at these places: run folders, folders with such in them, or files of JSON lines.

    Raises:
        ValueError: if there is none at one of them; says what is looked for.
    """
    runs: list[SeenRun] = []
    for path in paths:
        if path.is_file():
            found = list(_in_file(path))
        else:
            configs = sorted(path.rglob("config.json")) if path.is_dir() else []
            found = [run_in_folder(config.parent) for config in configs]
        if not found:
            raise ValueError(
                f"{path} has no runs: name a run's folder (with config.json), a folder of such, or a file of "
                "`consequent collect` or `consequent race`"
            )
        runs += found
    return runs


def run_in_folder(path: Path) -> SeenRun:
    """Returns the run of a folder, as far as it got."""
    folder = RunFolder(path)
    outcome, lines = folder.outcome(), folder.metrics()
    recipe, variant = path.parent.parent.name, path.parent.name
    label = variant if recipe == "train" else f"{recipe}/{variant}"
    seconds = lines[-1]["seconds"] if lines else 0.0
    state = "running" if outcome is None else str(outcome["outcome"])
    return SeenRun(label, folder.config(TrainConfig).seed, state, lines, seconds)


def _in_file(path: Path) -> Iterator[SeenRun]:
    from consequent_lab.race.results import read_lines

    lines = read_lines(path) if path.suffix in (".jsonl", ".gz") else []
    if lines and "kind" in lines[0]:
        yield from finals_of(lines)
        return
    if path.suffix == ".jsonl":
        from consequent_lab.paper.archive import UNFINISHED, read_compact

        for run in read_compact(path):
            outcome = run.outcome["outcome"]
            state = "running" if outcome == UNFINISHED else outcome
            yield SeenRun(f"{run.recipe}/{run.variant}", run.seed, state, run.lines, run.outcome["seconds"])


def finals_of(lines: Sequence[Line]) -> Iterator[SeenRun]:
    """Yields the finals among the lines of a race, in seconds as well where eager steps were timed."""
    timed = {line["contestant"]: line["milliseconds"] for line in lines if line["kind"] == "time"}
    for final in lines:
        if final["kind"] != "final":
            continue
        curve: list[Line] = unpacked(final["curve"])
        outcome = "diverged" if any(value != value for value in curve[-1].values()) else "finished"
        if "eager" in (milliseconds := timed.get(final["contestant"], {})):
            pace = milliseconds["eager"]["median"] / 1e3
            curve = [{**line, "seconds": pace * line["iteration"]} for line in curve]
        label = f"{final['recipe']['task']}/{final['contestant']}"
        yield SeenRun(label, final["seed"], outcome, curve, final["seconds"])


def by_label(runs: Sequence[SeenRun]) -> dict[str, list[SeenRun]]:
    """Returns the runs that differ by their seeds alone together."""
    groups: dict[str, list[SeenRun]] = {}
    for run in runs:
        groups.setdefault(run.label, []).append(run)
    return groups


# ---- showing -----------------------------------------------------------------------------------------------------


def terminal_table(runs: Sequence[SeenRun]) -> Table:
    """Returns a row for all runs of a label: medians over seeds, and from the lowest to the highest.

    Runs that diverged have no values in it; the last column says how many did.
    """
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("run", overflow="fold")
    for heading in ("seeds", "iterations", "training\ntime", "training\nloss", "test\naccuracy", "test\nloss", "state"):
        table.add_column(heading, justify="right")
    for label, group in by_label(runs).items():
        times = [run.seconds for run in group if run.seconds is not None]
        table.add_row(
            Text(label),
            str(len(group)),
            f"{statistics.median(run.iterations for run in group):,.0f}",
            shown_seconds(statistics.median(times)) if times else "–",
            _spread([run.last(*TRAINING_LOSS) for run in group]),
            _spread([run.last(*TEST_ACCURACY) for run in group], percent=True),
            _spread([run.last(*TEST_LOSS) for run in group]),
            _states(group),
        )
    return table


def _spread(values: list[float | None], percent: bool = False) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "–"

    def shown(value: float) -> str:
        return f"{100 * value:.2f}" if percent else three_digits(value)

    unit = " %" if percent else ""
    middle = f"{shown(statistics.median(known))}{unit}"
    return middle if len(known) == 1 else f"{middle}\n({shown(min(known))}–{shown(max(known))})"


def _states(group: list[SeenRun]) -> str:
    states = {run.outcome for run in group}
    if len(states) == 1:
        return states.pop()
    return "\n".join(f"{sum(run.outcome == state for run in group)} {state}" for state in sorted(states))


# ---- numbers for other programs ----------------------------------------------------------------------------------


def scalars(line: Line) -> dict[str, float]:
    """Returns all numbers of a reading by name, those of layers with the names of these.

    >>> scalars({"iteration": 3, "foresight": {"0": {"cosine": 0.5}}, "test_loss": None})
    {'iteration': 3, 'foresight/0/cosine': 0.5}
    """
    found: dict[str, float] = {}
    for name, value in line.items():
        if isinstance(value, dict):
            found |= {f"{name}/{inner}": number for inner, number in scalars(value).items()}
        elif isinstance(value, int | float):
            found[name] = value
    return found


def write_csv(file: IO[str], runs: Sequence[SeenRun]) -> None:
    """Writes a row for every reading of every run; what a reading has not is empty."""
    rows = [{"run": run.label, "seed": run.seed, **scalars(line)} for run in runs for line in run.lines]
    names = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(file, names)
    writer.writeheader()
    writer.writerows(rows)


def write_tensorboard(folder: Path, runs: Sequence[SeenRun]) -> None:
    """Writes every reading of every run as scalars, a folder for each run.

    Raises:
        ValueError: if TensorBoard is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ValueError(f"--tensorboard {folder} needs the package tensorboard: pip install tensorboard") from error
    for run in runs:
        with SummaryWriter(folder / run.label / f"seed{run.seed}") as writer:
            for line in run.lines:
                for name, value in scalars(line).items():
                    if name not in ("iteration", "diverged"):
                        writer.add_scalar(name, value, line["iteration"])
