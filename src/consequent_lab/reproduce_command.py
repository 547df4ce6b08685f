"""`consequent reproduce`: the paper's experiments, from the runs to a verdict on each statement."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro
from rich.console import Console

from consequent_lab.pool import start_importing
from consequent_lab.progress import ProgressBoard, shown_seconds
from consequent_lab.records import cores
from consequent_lab.screen import console
from consequent_lab.train_command import chosen_device

if TYPE_CHECKING:  # The command line reads this file for its options; torch is imported when needed.
    from consequent_lab.paper.archive import Archive
    from consequent_lab.paper.findings import Finding
    from consequent_lab.paper.recipes import Job, Recipe

Name = Literal[
    "loss-surface", "output-paths", "filters", "mlp", "resnet20", "learning-rates", "inside", "digits", "all"
]
WORKERS_OF_A_GPU = 4
MACHINERY = (
    "This was the machinery on the digits: it shows that everything works, and gives no verdicts on the paper. Those "
    "are made from full runs (leave out --quick)."
)


@dataclass(frozen=True)
class Reproduce:
    """Run experiments of the paper and say what becomes of its statements.

    Learning rates are searched first, on one grid with one budget for every contestant. Finished runs are skipped;
    those that were interrupted, in whatever way, go on from their last checkpoint when the same command is given again.
    """

    names: tyro.conf.Positional[tuple[Name, ...]]
    """Which experiments; all of them: all."""
    quick: bool = False
    """A small version on the digits, which need no download, in minutes on a CPU; in run folders of its own."""
    data: Path | None = None
    """The folder of the data sets; None: the environment's CONSEQUENT_DATA, else data."""
    runs: Path = Path("runs")
    """Where run folders are."""
    known: Path | None = None
    """A folder of compact results, as `consequent collect` writes: what is finished there is not run again."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; auto takes a GPU if there is one."""
    workers: int | None = None
    """Runs at a time; None: 4 on a GPU; on a CPU one for each core, with one thread each."""
    steps: tuple[Literal["search", "train", "timing"], ...] = ("search", "train", "timing")
    """Of the experiments that train: the search for learning rates, the runs, the time of an iteration by itself."""
    seeds: tuple[int, ...] = ()
    """Instead of the experiments' own seeds."""
    variants: tuple[str, ...] = ()
    """Only these contestants, such as c-sgd or 'cifar10-*'."""
    minutes: float | None = None
    """Stop after so many; runs that are not finished go on from their last checkpoint the next time."""

    def __post_init__(self) -> None:
        if not self.names:
            raise ValueError("name at least one experiment, or all")
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"--workers must be at least 1, got {self.workers}")
        if self.minutes is not None and not 0 < self.minutes < float("inf"):
            raise ValueError(f"--minutes must be positive and finite, got {self.minutes}")
        if any(seed < 0 for seed in self.seeds):
            raise ValueError(f"--seeds must not be negative, got {self.seeds}")
        if not self.steps:
            raise ValueError("--steps: name at least one of search, train and timing")
        if self.known is not None and not self.known.is_dir():
            raise ValueError(f"--known {self.known} is no folder")

    def run(self) -> None:
        """Runs what is missing, shows the verdicts, and raises if a run failed."""
        begun = time.time()
        from consequent_lab.datasets import load
        from consequent_lab.paper.archive import Archive
        from consequent_lab.paper.experiments import experiments, find
        from consequent_lab.paper.schedule import Setup, train_runs

        known = experiments()
        names = [name for name in known if name in self.names or "all" in self.names]
        recipes = self._selected([recipe for name in names for recipe in known[name].recipes(self.quick)])
        screen = console()
        device = chosen_device(self.device)
        workers = self.workers or (cores() if device == "cpu" else WORKERS_OF_A_GPU)
        deadline = None if self.minutes is None else begun + 60 * self.minutes
        roots = [self.runs, *([self.known] if self.known else [])]
        archive = Archive(*roots)

        def ready() -> "list[Job]":
            return [job for recipe in recipes for job in recipe.jobs(archive, self.steps)]

        failures: dict[str, str] = {}
        if missing := ready():
            for name in sorted({job.config.dataset for job in missing}):
                load(name, self.data)  # raises before anything is run if a data set is not there
            self._say_how_long(screen, recipes, archive, device, workers)
            if workers > 1:
                start_importing("consequent_lab.trainer")
            with ProgressBoard(screen) as board:
                summary = train_runs(ready, Setup(self.runs, device, self.data, workers, deadline), board)
            failures, left = summary.failed, len(ready())
            text = f"{len(summary.done)} runs done"
            text += f", {len(failures)} failed" if failures else ""
            text += f"; at least {left} are left: give the same command again to go on" if left else ""
            screen.print(f"{text}.")
        for finding in find(names, *roots):
            _show(screen, finding, with_verdicts=not (self.quick or finding.is_small))
        if self.quick:
            screen.print(f"\n{MACHINERY}", soft_wrap=True)
        if failures:
            listed = "\n".join(f"  {name}: {text}" for name, text in failures.items())
            raise ValueError(f"{len(failures)} run(s) failed:\n{listed}")

    def _selected(self, recipes: "list[Recipe]") -> "list[Recipe]":
        """Returns the recipes, cut down as asked."""
        from consequent_lab.paper.recipes import matches

        variants = sorted({one.variant for recipe in recipes for one in recipe.contestants})
        for pattern in self.variants:
            if not any(matches(variant, (pattern,)) for variant in variants):
                raise ValueError(f"--variants {pattern} matches none of {', '.join(variants) or 'no variants at all'}")
        return [recipe.select(self.variants, self.seeds) for recipe in recipes]

    def _say_how_long(
        self, screen: Console, recipes: "list[Recipe]", archive: "Archive", device: str, workers: int
    ) -> None:
        from consequent_lab.forecast import expected_jobs, forecast, measured_cost

        jobs = expected_jobs(recipes, archive, self.steps)
        seconds = forecast(jobs, workers, measured_cost(device, self.data))
        beside = f", {workers} at a time" if workers > 1 else ""
        text = f"{len(jobs)} runs{beside}: about {shown_seconds(seconds)} here, by a short timing"
        if any(job.recipe.endswith("-search") for job in jobs):
            text += "; a search may need some more"
        screen.print(f"{text}.", soft_wrap=True)


def _show(screen: Console, finding: "Finding", with_verdicts: bool) -> None:
    screen.print(f"\n{finding.title}", style="bold")
    if not with_verdicts:
        screen.print(f"  {finding.summary}", soft_wrap=True)
        return
    for statement in finding.statements:
        share = f" ({statement.share})" if statement.share else ""
        whose = "a control, not the paper's: " if statement.kind == "control" else ""
        screen.print(f"  {statement.verdict.upper()}{share}: {whose}{statement.paper}", soft_wrap=True)
        for text in (statement.measure, statement.measured, statement.circumstances):
            if text:
                screen.print(f"    {text}", soft_wrap=True)
