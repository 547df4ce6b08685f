"""`consequent race`: the method beside today's optimisers, each with the same number of trials."""

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro
from rich.console import Console

from consequent_lab.screen import console
from consequent_lab.train_command import chosen_device

if TYPE_CHECKING:
    from consequent_lab.race.task import Task

SETS = ("cifar10", "cifar100", "fashion-mnist", "pictures", "tables", "sources")


@dataclass(frozen=True)
class Race:
    """Race optimisers on a task: a search for each with the same number of trials, then finals with other seeds.

    Every result is written to the output folder as it comes; the same command goes on where the last one was stopped.

    Without tasks they are listed, with what is done of them. "race times TASKS" measures how long a step takes, and is
    to be run alone; "race table TASKS" prints tables in Markdown, of all tasks with results if none is named; "race
    data SETS" writes files to carry (cifar10, cifar100, fashion-mnist, pictures, tables, sources).
    """

    words: tyro.conf.Positional[tuple[str, ...]] = ()
    """Tasks; or times, table or data, and what it is for."""
    contestants: str = ""
    """Only these, separated by commas; none: all of the task."""
    trials: int = 12
    """Of every contestant's search."""
    seeds: int = 5
    """Finals of every contestant; 0: searches alone."""
    epochs: int | None = None
    """Of a run, if others than the task's; the results then have a name of their own."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; auto takes a GPU if there is one."""
    workers: int = 1
    """Runs side by side, a process each; step times are measured by "times" alone."""
    data: Path | None = None
    """The folder (or file) with .npz files of "data", or with official layouts."""
    output: Path = Path("results/race")
    """Where results are kept, or the files of "data" are written."""
    minutes: float | None = None
    """Stop after so long, cleanly."""
    eager: bool = False
    """No CUDA graphs in training."""
    tiny: bool = False
    """Tiny forms of the tasks, which only show that everything runs."""
    images: tuple[int, int] = (16_000, 4_000)
    """Training and test images that "data" writes."""

    def __post_init__(self) -> None:
        if self.seeds < 0:
            raise ValueError(f"--seeds must not be negative, got {self.seeds}")
        for name in ("trials", "workers", "epochs", "minutes"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"--{name} must be positive, got {value}")

    def run(self) -> None:
        """Runs what is asked for."""
        from consequent_lab.race.results import Results
        from consequent_lab.race.tasks import TASKS, task_named

        screen = console()
        stage, names = "race", self.words
        if names and names[0] in ("times", "table", "data"):
            stage, names = names[0], names[1:]
        if stage == "data":
            self._write_data(names or SETS, screen)
            return
        if not names:
            known = [Results.of(task, self.output) for task in TASKS.values()]
            if stage != "table":
                screen.print(f"Results in {self.output.resolve()}:", soft_wrap=True)
                for results in known:
                    screen.print(f"{results.task.name:26} {results.state(self.trials, self.seeds)}", soft_wrap=True)
                return
            names = tuple(results.task.name for results in known if results.lines)
        if stage == "table" and not names:
            raise ValueError(f"there are no results in {self.output.resolve()}: name another --output")
        device = "cpu" if stage == "table" else chosen_device(self.device)  # raises if it is not there
        for name in names:
            self._chosen(task_named(name))  # raises before the first of them has run for hours
        deadline = None if self.minutes is None else time.time() + 60 * self.minutes
        for name in names:
            self._run_task(stage, name, device, deadline, screen)

    def _run_task(self, stage: str, name: str, device: str, deadline: float | None, screen: Console) -> None:
        from rich.markdown import Markdown

        from consequent_lab.race.results import Results
        from consequent_lab.race.running import Conditions, race
        from consequent_lab.race.table import markdown_table
        from consequent_lab.race.tasks import task_named

        conditions = Conditions(
            name,
            self.tiny,
            self.epochs,
            self.data,
            device,
            graph=not self.eager,
            trials=self.trials,
            deadline=deadline,
        )
        task = conditions.the_task()
        names = self._chosen(task)
        results = Results.of(task, self.output)
        say = partial(screen.print, soft_wrap=True)
        if stage == "race":
            base = task.settings_from
            searched = results
            if base is not None:
                searched = Results.of(task_named(base.removesuffix("-tiny"), tiny=self.tiny), self.output)
            say(f"{task.name}: {task.title}")
            is_whole = race(conditions, names, self.seeds, self.workers, results, searched, say)
            say("All is done." if is_whole else "Something is left: the same command goes on with it.")
        elif stage == "times":
            from consequent_lab.race.times import times

            times(conditions, names, results, say)
        table = markdown_table(results)
        if stage == "table":
            print(table)
        else:
            screen.print(Markdown(table))

    def _chosen(self, task: "Task") -> list[str]:
        """Returns the names of the contestants that are asked for, in their order; all of the task's, if none are."""
        from consequent_lab.race.contestants import contestant_named

        wanted = [word.strip() for word in self.contestants.split(",") if word.strip()]
        names = [contestant_named(word).name for word in wanted] or list(task.contestants)
        others = [name for name in names if name not in task.contestants]
        if others:
            raise ValueError(f"{' and '.join(others)}: no part in {task.name}, which has {', '.join(task.contestants)}")
        return names

    def _write_data(self, names: tuple[str, ...], screen: Console) -> None:
        from consequent_lab.race.files import write_arrays, write_images
        from consequent_lab.race.sources import arrays_of

        for name in names:
            if name not in SETS:
                raise ValueError(f"there is no set {name!r}; there are {', '.join(SETS)}")
            arrays = arrays_of(name, self.data)
            if "train_x" in arrays:
                paths = write_images(self.output, name, arrays, *self.images)
            else:
                paths = [self.output / f"{name}.npz"]
                write_arrays(paths[0], arrays)
            for path in paths:
                screen.print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")
