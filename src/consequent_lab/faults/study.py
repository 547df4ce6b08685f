"""All faults, a few times or many times each."""

from collections.abc import Callable
from pathlib import Path

import torch

from consequent_lab.faults.damage import damaged_compact_files, damaged_data, damaged_runs
from consequent_lab.faults.disk import full_disk
from consequent_lab.faults.kills import kills
from consequent_lab.faults.numbers import numbers
from consequent_lab.faults.soak import Soak, soak
from consequent_lab.faults.strangers import strangers
from consequent_lab.faults.trial import Trial


def study(folder: Path, *, quick: bool, report: Callable[[str], None]) -> tuple[list[Trial], Soak]:
    """Tries everything.

    Args:
        folder: for files; empty.
        quick: few attempts.
        report: is told what is being tried.
    """
    few, many = (2, 4) if quick else (20, 100)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the runs that are killed: sums of several threads may differ in their last digit
    try:
        trials = []
        report("numbers")
        trials += numbers(few)
        report("damaged files")
        trials += damaged_runs(folder / "damage", few)
        trials += [damaged_compact_files(folder / "compact", many), damaged_data(folder / "data", few)]
        report("a full disk")
        trials.append(full_disk(folder / "full", few))
        report("files from strangers")
        trials += strangers(folder / "strangers")
        report("kills")
        trials += kills(folder / "kills", many)
        report("a long run")
        return trials, soak(2_000 if quick else 200_000)
    finally:
        torch.set_num_threads(threads)
