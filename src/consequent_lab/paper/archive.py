"""Runs as they are kept: in their folders, or all of a recipe in one compact file. Both read as the same objects.

    <root>/<recipe>/<variant>/seed<k>/   a run folder
    <root>/<recipe>.jsonl                all runs of a recipe, compact, one after the other

A run's first line in a compact file says what was asked for, on what it ran, by which command, how it ended, and how
many lines of metrics follow. These are thinned: what can be derived is left out, an epoch's mean stands once,
gradients' norms on a few lines; numbers have six digits. A run folder is thinned in the same way when it is read.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from consequent_lab.kept_runs import TrainedRun, run_in
from consequent_lab.records import DIGITS, plain_numbers, write_atomically
from consequent_lab.runs import DamagedFileError, RunFolder, config_from, parsed, sealed, unsealed
from consequent_lab.train_config import TrainConfig

LINES_WITH_NORMS = 20
LEFT_OUT = {"lr", "running_loss", "running_accuracy"}


class Archive:
    """Runs under some folders; of a run that is finished in several, the first one counts. A run is read once.

    Folders are of run folders, of compact files, or of both; one that is not there is empty. Unfinished runs, as far as
    they got, count if asked for.
    """

    def __init__(self, *roots: Path, unfinished: bool = False) -> None:
        self._roots = roots
        self._unfinished = unfinished
        self._read: dict[tuple[str, str, int], TrainedRun] = {}
        self._compact: dict[Path, dict[tuple[str, int], TrainedRun]] = {}

    def run(self, recipe: str, variant: str, seed: int) -> TrainedRun | None:
        """Returns a run, or None if there is none yet."""
        key = recipe, variant, seed
        if key not in self._read:
            found = [run for root in self._roots if (run := self._in(root, *key)) is not None]
            found = [run for run in found if run.is_finished] or found[:1]
            if found and (found[0].is_finished or self._unfinished):
                self._read[key] = found[0]
        return self._read.get(key)

    def runs(self, recipe: str, variant: str) -> list[TrainedRun]:
        """Returns the runs of a variant, by seed."""
        names = {path.name for root in self._roots for path in (root / recipe / variant).glob("seed*")}
        seeds = {int(number) for name in names if (number := name.removeprefix("seed")).isdigit()}
        seeds |= {seed for compact in self._compact_of(recipe) for known, seed in compact if known == variant}
        return [run for seed in sorted(seeds) if (run := self.run(recipe, variant, seed))]

    def variants(self, recipe: str) -> list[str]:
        """Returns the variants of a recipe that something is kept of."""
        found = {path.name for root in self._roots for path in (root / recipe).glob("*/")}
        return sorted(found | {variant for compact in self._compact_of(recipe) for variant, _ in compact})

    def _in(self, root: Path, recipe: str, variant: str, seed: int) -> TrainedRun | None:
        folder = RunFolder.of(root, recipe, variant, seed)
        outcome = folder.outcome()
        if outcome is None and (kept := self._compact_in(root, recipe).get((variant, seed))) is not None:
            return kept
        if outcome is None and not (self._unfinished and folder.metrics()):
            return None
        run = run_in(folder)
        return replace(run, outcome=plain_numbers(run.outcome, DIGITS), lines=list(thinned(run.lines)))

    def _compact_of(self, recipe: str) -> list[dict[tuple[str, int], TrainedRun]]:
        return [self._compact_in(root, recipe) for root in self._roots]

    def _compact_in(self, root: Path, recipe: str) -> dict[tuple[str, int], TrainedRun]:
        path = root / f"{recipe}.jsonl"
        if path not in self._compact:
            self._compact[path] = {(run.variant, run.seed): run for run in read_compact(path)} if path.exists() else {}
        return self._compact[path]


# ---- compact files -----------------------------------------------------------------------------------------------


def write_compact(runs: Sequence[TrainedRun], root: Path) -> Path:
    """Writes the runs of one recipe to its compact file, beside those that are there already; returns its path."""
    (recipe,) = {run.recipe for run in runs}
    path = root / f"{recipe}.jsonl"
    texts = {(run.variant, run.seed): text for run, text in (_pieces(path) if path.exists() else ())}
    texts |= {(run.variant, run.seed): _text(run) for run in runs}
    write_atomically(path, lambda file: file.write(b"".join(texts[key] for key in sorted(texts))))
    return path


def _text(run: TrainedRun) -> bytes:
    metrics = b"".join(map(_line, run.lines))
    return _line(sealed({**asdict(run), "lines": len(run.lines)}, metrics)) + metrics


def read_compact(path: Path) -> list[TrainedRun]:
    """Returns the runs that a compact file holds.

    Raises:
        DamagedFileError: if the file is not what was written.
    """
    return [run for run, _ in _pieces(path)]


def _pieces(path: Path) -> Iterator[tuple[TrainedRun, bytes]]:
    """Yields the runs of a compact file, each with its text."""
    lines = path.read_bytes().splitlines(keepends=True)
    place = 0
    while place < max(1, len(lines)):  # an empty file has a first line, which is damaged
        where = f"{path}, line {place + 1},"
        head = parsed(lines[place] if lines else b"", where)
        count = head.get("lines")
        metrics = lines[place + 1 : place + 1 + count] if isinstance(count, int) else []
        head = unsealed(head, where, b"".join(metrics))
        numbered = enumerate(metrics, start=place + 2)
        found = [parsed(line, f"{path}, line {number},") for number, line in numbered]
        try:
            config = config_from(head.pop("config"), TrainConfig, where)
            run = TrainedRun(config=config, **head | {"lines": found})
        except (KeyError, TypeError) as error:
            raise DamagedFileError(f"{where} is damaged: it does not describe a run ({error})") from error
        if run.recipe != path.stem:
            raise DamagedFileError(f"{where} holds {run.name}: it is not where it belongs")
        yield run, b"".join(lines[place : place + 1 + len(metrics)])
        place += 1 + len(metrics)


def _line(values: dict[str, Any]) -> bytes:
    return json.dumps(values, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n"


# ---- thinning ----------------------------------------------------------------------------------------------------


def thinned(lines: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields lines of metrics as they are kept."""
    with_norms = [number for number, line in enumerate(lines) if "gradient_norms" in line]
    stride = max(1, math.ceil(len(with_norms) / LINES_WITH_NORMS))
    kept_norms = {*with_norms[::stride], *with_norms[-1:]}
    complete_epochs = 0
    for number, line in enumerate(lines):
        left_out = set(LEFT_OUT)
        if number not in kept_norms:
            left_out.add("gradient_norms")
        if number < len(lines) - 1:
            left_out |= {"failed", "counters"}  # the latter in runs of former versions
        if math.floor(line["epoch"] + 1e-6) > complete_epochs:
            complete_epochs = math.floor(line["epoch"] + 1e-6)
        else:
            left_out |= {"epoch_loss", "epoch_accuracy"}  # they stand on an earlier line
        yield plain_numbers({key: value for key, value in line.items() if key not in left_out}, DIGITS)
