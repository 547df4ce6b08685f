"""A disk that is full in the middle of a run."""

import random
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from consequent_lab.runs import RunFolder
from faults.comparison import differences
from faults.damage import CONFIG
from faults.trial import Trial, require

SIZE = 2**20


def full_disk(folder: Path, count: int, seed: int = 0) -> Trial:
    """Trains on a small disk of its own until it is full, makes place, and goes on.

    Args:
        folder: the disk is mounted in it.
        count: attempts.
        seed: of how much place there is.
    """
    from consequent_lab.trainer import train

    expected = "an error; once there is place, the run goes on and ends as if nothing had happened"
    trial = Trial("the disk is full", expected)
    config = replace(CONFIG, hidden=(64,))
    undisturbed = RunFolder(folder / "undisturbed")
    train(config, undisturbed)
    used = sum(path.stat().st_size for path in undisturbed.path.iterdir())
    place = random.Random(seed)
    try:
        with _disk(folder / "disk") as disk:
            for number in range(count):
                left = place.randrange(used)
                for path in disk.iterdir():
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
                filler = disk / "filler"
                filler.write_bytes(bytes(shutil.disk_usage(disk).free - left))
                with trial.attempt(f"{left} bytes left, attempt {number}"):
                    run = RunFolder(disk / "run")
                    failed = False
                    try:
                        train(config, run)
                    except OSError:
                        failed = True
                    require(failed, "the disk was not full, or nobody noticed")
                    filler.unlink()
                    train(config, RunFolder(disk / "run"))
                    found = differences(undisturbed, run)
                    require(not found, f"the run differs: {found}")
    except (subprocess.CalledProcessError, FileNotFoundError) as error:
        trial.not_tried = f"a small disk cannot be mounted here ({error})"
    return trial


@contextmanager
def _disk(path: Path) -> Iterator[Path]:
    path.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(path)]
    subprocess.run(mount, check=True, capture_output=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True, capture_output=True)
