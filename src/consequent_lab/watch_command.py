"""`consequent watch`: a run while it trains, or as it ended."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

if TYPE_CHECKING:
    from rich.console import RenderableType

    from consequent_lab.runs import RunFolder


@dataclass(frozen=True)
class Watch:
    """Show a run's loss, its speed, and how much each layer's outputs change against what was wanted.

    On a terminal it is live until the run ends or Ctrl-C is pressed; elsewhere it is shown once. The layers are there
    if the run was started with --foresight. Watching needs nothing but the run's folder and does not disturb it.
    """

    place: tyro.conf.Positional[Path] = Path("runs")
    """A run's folder, or one with runs in it: then the run that was written to last."""
    every: float = 1.0
    """Seconds between two looks."""
    once: bool = False
    """Look once, on a terminal too."""

    def __post_init__(self) -> None:
        if not 0.05 <= self.every < float("inf"):
            raise ValueError(f"--every must be at least 0.05 seconds, got {self.every}")

    def run(self) -> None:
        """Shows the run."""
        from rich.live import Live

        from consequent_lab.screen import console

        folder = latest_run(self.place)
        screen = console()
        picture, is_running = shown(folder)
        if self.once or not screen.is_terminal:
            screen.print(picture)
            return
        with Live(picture, console=screen, auto_refresh=False) as live:
            while is_running:
                time.sleep(self.every)
                picture, is_running = shown(folder)
                live.update(picture, refresh=True)


def latest_run(place: Path) -> "RunFolder":
    """Returns the run at a place, or the one among several that was written to last.

    Raises:
        ValueError: if there is none.
    """
    from consequent_lab.runs import RunFolder

    found = [path.parent for path in place.rglob("config.json")] if place.is_dir() else []
    if not found:
        raise ValueError(f"{place} has no runs: name the folder of a run (with config.json), or one with runs in it")
    return RunFolder(max(found, key=_written_at))


def _written_at(path: Path) -> float:
    metrics = path / "metrics.jsonl"
    return (metrics if metrics.exists() else path / "config.json").stat().st_mtime


def shown(folder: "RunFolder") -> "tuple[RenderableType, bool]":
    """Returns the run as it is now, and whether it may get on."""
    from consequent_lab.kept_runs import run_in
    from consequent_lab.run_picture import picture_of

    run = run_in(folder)
    return picture_of(run), not run.is_finished
