"""Runs of any kind beside each other: as a table, as a figure, as lines of CSV, as scalars of TensorBoard.

A run is read from its folder, from a compact file of `consequent collect`, or from the finals of `consequent race`.
Runs that differ by their seed alone are one row of the table.
"""

import csv
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from rich.box import SIMPLE_HEAD
from rich.table import Table

from consequent_lab.kept_runs import KeptRun, Line, run_in
from consequent_lab.numbers import three_digits
from consequent_lab.paper.findings import Axis, Figure, Number, Panel, Series
from consequent_lab.progress import shown_seconds
from consequent_lab.race.curves import unpacked
from consequent_lab.runs import RunFolder

TRAINING_LOSS = ("train_loss", "epoch_loss", "running_loss", "batch_loss")
TEST_ACCURACY = ("test_accuracy", "validation_accuracy")
TEST_LOSS = ("test_loss", "validation_loss")


# ---- reading -----------------------------------------------------------------------------------------------------


def runs_at(paths: Sequence[Path]) -> list[KeptRun]:
    """Returns all runs at these places: run folders, folders with such in them, or files of JSON lines.

    Raises:
        ValueError: if there is none at one of them; says what is looked for.
    """
    runs: list[KeptRun] = []
    for path in paths:
        if path.is_file():
            found = list(_in_file(path))
        else:
            configs = sorted(path.rglob("config.json")) if path.is_dir() else []
            found = [run_in(RunFolder(config.parent)) for config in configs]
        if not found:
            raise ValueError(
                f"{path} has no runs: name a run's folder (with config.json), a folder of such, or a file of "
                "`consequent collect` or `consequent race`"
            )
        runs += found
    return runs


def _in_file(path: Path) -> Iterator[KeptRun]:
    from consequent_lab.race.results import read_lines

    lines = read_lines(path) if path.suffix in (".jsonl", ".gz") else []
    if lines and "kind" in lines[0]:
        yield from finals_of(lines)
        return
    if path.suffix == ".jsonl":
        from consequent_lab.paper.archive import read_compact

        yield from read_compact(path)


def finals_of(lines: Sequence[Line]) -> Iterator[KeptRun]:
    """Yields the finals among the lines of a race, in seconds as well where eager steps were timed."""
    from consequent_lab.race.results import seconds_until

    timed = {line["contestant"]: line for line in lines if line["kind"] == "time" and "eager" in line["milliseconds"]}
    for final in lines:
        if final["kind"] != "final":
            continue
        curve: list[Line] = unpacked(final["curve"])
        has_ended = all(value == value for value in curve[-1].values())
        if (steps := timed.get(final["contestant"])) is not None:
            curve = [{**line, "seconds": seconds_until(line["iteration"], steps, "eager")} for line in curve]
        outcome = {"outcome": "finished" if has_ended else "diverged", "seconds": final["seconds"]}
        yield KeptRun(final["recipe"]["task"], final["contestant"], final["seed"], outcome, curve)


def by_label(runs: Sequence[KeptRun]) -> dict[str, list[KeptRun]]:
    """Returns the runs that differ by their seeds alone together."""
    groups: dict[str, list[KeptRun]] = {}
    for run in runs:
        groups.setdefault(run.label, []).append(run)
    return groups


# ---- showing -----------------------------------------------------------------------------------------------------


def terminal_table(runs: Sequence[KeptRun]) -> Table:
    """Returns a row for all runs of a label: medians over seeds, and from the lowest to the highest.

    Runs that diverged have no values in it; the last column says how many did.
    """
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("run", overflow="fold")
    for heading in ("seeds", "iterations", "training\ntime", "training\nloss", "test\naccuracy", "test\nloss", "state"):
        table.add_column(heading, justify="right")
    for label, group in by_label(runs).items():
        ended = [run for run in group if not run.diverged]
        table.add_row(
            label,
            str(len(group)),
            f"{statistics.median(run.iterations for run in group):,.0f}",
            shown_seconds(statistics.median(run.outcome["seconds"] for run in group)),
            _spread([run.last(*TRAINING_LOSS) for run in ended]),
            _spread([run.last(*TEST_ACCURACY) for run in ended], percent=True),
            _spread([run.last(*TEST_LOSS) for run in ended]),
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


def _states(group: list[KeptRun]) -> str:
    counts = Counter(run.outcome["outcome"] for run in group)
    return next(iter(counts)) if len(counts) == 1 else "\n".join(f"{counts[state]} {state}" for state in sorted(counts))


def figure_of(runs: Sequence[KeptRun]) -> Figure:
    """Returns training loss against iterations and seconds, and what the test set says against iterations."""
    iterations, seconds = Axis("iteration", "iterations"), Axis("seconds", "seconds of training")
    loss = Axis("value", "training loss", log=True)
    has_accuracy = any(run.curve(*TEST_ACCURACY) for run in runs)
    test = Axis("value", "test accuracy") if has_accuracy else Axis("value", "test loss", log=True)
    training = [_series(run, TRAINING_LOSS) for run in runs]
    tested = [_series(run, TEST_ACCURACY if has_accuracy else TEST_LOSS) for run in runs]
    panels = [Panel("", training, axes, [loss]) for axes in ([iterations, seconds], [seconds, iterations])]
    return Figure("comparison", "", "", [*panels, Panel("", tested, [iterations], [test])])


def _series(run: KeptRun, metrics: Sequence[str]) -> Series:
    curve = run.curve(*metrics)
    clock: dict[float, Number] = {line["iteration"]: line.get("seconds") for line in run.lines}
    columns = {"iteration": [at for at, _ in curve], "value": [value for _, value in curve]}
    return Series(f"{run.label}, seed {run.seed}", columns | {"seconds": [clock[at] for at, _ in curve]}, run.label)


# ---- numbers for other programs ----------------------------------------------------------------------------------


def scalars(line: Line) -> dict[str, float]:
    """Returns all numbers of a reading by name, those of layers with the names of these.

    >>> scalars({"iteration": 3, "gradient_norms": {"applied": {"0": 0.5}}, "test_loss": None})
    {'iteration': 3, 'gradient_norms/applied/0': 0.5}
    """
    found: dict[str, float] = {}
    for name, value in line.items():
        if isinstance(value, dict):
            found |= {f"{name}/{inner}": number for inner, number in scalars(value).items()}
        elif isinstance(value, int | float):
            found[name] = value
    return found


def write_csv(file: IO[str], runs: Sequence[KeptRun]) -> None:
    """Writes a row for every reading of every run; what a reading has not is empty."""
    rows = [{"run": run.label, "seed": run.seed, **scalars(line)} for run in runs for line in run.lines]
    names = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(file, names)
    writer.writeheader()
    writer.writerows(rows)


def write_tensorboard(folder: Path, runs: Sequence[KeptRun]) -> None:
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
