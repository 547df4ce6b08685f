"""All faults, or some kinds of them, a few times or many times each."""

from collections.abc import Callable, Collection
from pathlib import Path

import torch

from faults.damage import damaged_compact_files, damaged_data, damaged_runs
from faults.disk import full_disk
from faults.kills import kills
from faults.lost_ranks import lost_ranks
from faults.numbers import numbers
from faults.one_rank import one_rank
from faults.soak import Soak, soak
from faults.trial import Trial
from faults.untrusted_files import untrusted_files


def study(
    folder: Path, kinds: Collection[str], *, quick: bool, report: Callable[[str], None]
) -> tuple[list[Trial], Soak | None]:
    """Tries them.

    Args:
        folder: for files; empty.
        kinds: of faults, as in the command's options.
        quick: few attempts.
        report: is told what is being tried.

    Returns:
        what was tried, and the long run if it was asked for.
    """
    few, many = (2, 4) if quick else (20, 100)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the runs that are killed: sums of several threads may differ in their last digit
    try:
        trials = []
        if "numbers" in kinds:
            report("numbers")
            trials += numbers(few)
        if "damage" in kinds:
            report("damaged files")
            trials += damaged_runs(folder / "damage", few)
            trials += [damaged_compact_files(folder / "compact", many), damaged_data(folder / "data", few)]
        if "disk" in kinds:
            report("a full disk")
            trials.append(full_disk(folder / "full", few))
        if "untrusted" in kinds:
            report("untrusted files")
            trials += untrusted_files(folder / "untrusted")
        if "kills" in kinds:
            report("kills")
            trials += kills(folder / "kills", many)
        if "ranks" in kinds:
            report("ranks")
            trials += lost_ranks(folder / "lost", 2 * few)
            trials += one_rank(folder / "ranks", few)
        if "soak" not in kinds:
            return trials, None
        report("a long run")
        return trials, soak(2_000 if quick else 200_000)
    finally:
        torch.set_num_threads(threads)
