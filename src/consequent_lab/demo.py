"""`consequent demo`: the finals of a small race on data that needs no download, in half a minute on two cores."""

import time
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress

from consequent_lab.pool import one_thread, start_importing
from consequent_lab.records import cores, provenance, write_json
from consequent_lab.screen import console

if TYPE_CHECKING:  # The command line reads this file for its options; torch and matplotlib are imported when needed.
    from consequent_lab.race.results import Results
    from consequent_lab.race.running import Conditions

# The best of 12 trials each, to three digits: `consequent race demo`, kept in results/race/demo.jsonl
SETTINGS = {
    "Muon": {"lr": 2.24e-3, "other_lr": 2.78e-3},
    "C-Adam": {"lr": 1.61e-3, "relative_damping": 0.75},
    "C-SGD": {"lr": 1.1, "relative_damping": 0.921},
    "Adam": {"lr": 1.17e-3},
    "SGD": {"lr": 0.084},
}


@dataclass(frozen=True)
class Demo:
    """Race SGD, Adam and Muon against C-SGD and C-Adam on scikit-learn's handwritten digits.

    The network is the paper's in small: eight hidden layers, ReLU, no normalisation, mini-batches of 32. Each optimiser
    has the best settings of its 12 trials in `consequent race demo`, and runs on seeds that this search has not seen.
    """

    seeds: int = 3
    """Runs of every optimiser."""
    output: Path = Path("demo.png")
    """The picture; the numbers go to a JSON file of the same name beside it."""
    workers: int | None = None
    """Runs at a time, one thread each; None: as many as there are cores, at most 5."""
    quick: bool = False
    """A tiny race that only shows that everything works."""

    def __post_init__(self) -> None:
        for name in ("seeds", "workers"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name} must be at least 1, got {value}")
        if self.output.suffix != ".png":
            raise ValueError(f"--output must end in .png, got {self.output}")

    def run(self) -> None:
        """Runs the race, shows it, and writes the picture and the numbers."""
        start = time.perf_counter()
        self.output.parent.mkdir(parents=True, exist_ok=True)  # Better fail now than after the race.
        workers = self.workers or min(cores(), 5)
        if workers > 1:
            start_importing("consequent_lab.race.running")
        from rich.markdown import Markdown

        from consequent_lab.comparison import figure_of, finals_of
        from consequent_lab.race.results import Results
        from consequent_lab.race.running import Conditions
        from consequent_lab.race.table import markdown_table
        from consequent_lab.race.tasks import DEMO
        from consequent_lab.report.static import draw_once

        screen = console()
        conditions = Conditions(DEMO, tiny=self.quick)
        task = conditions.the_task()
        screen.print(
            f"{task.title[0].upper()}{task.title[1:]}, {task.epochs} epochs.\n{len(SETTINGS)} optimisers, each with "
            f"the best settings of 12 trials; {self.seeds} seeds, {workers} runs at a time on one thread each.",
            soft_wrap=True,
        )
        with TemporaryDirectory() as folder:
            results = Results.of(task, Path(folder))
            self._race(conditions, workers, results, screen)
        results.task = replace(task, settings_from="`consequent race demo`")
        screen.print(Markdown(markdown_table(results)))
        numbers = self.output.with_suffix(".json")
        runs = [replace(run, recipe="") for run in finals_of(results.lines)]
        draw_once(figure_of(runs), [self.output])
        write_json(numbers, {**provenance(workers), "title": task.title, "lines": results.lines})
        screen.print(f"Picture: {self.output}   Numbers: {numbers}   Time: {time.perf_counter() - start:.0f} s")

    def _race(self, conditions: "Conditions", workers: int, results: "Results", screen: Console) -> None:
        """Runs the finals, and then measures how long steps take, with nothing of ours beside them."""
        from consequent_lab.race.results import Results, line_of
        from consequent_lab.race.running import race
        from consequent_lab.race.times import DEMO_PLAN, times

        task, names = results.task, list(SETTINGS)
        best = [
            line_of(task, "trial", name, settings=settings, number=0, state="complete", score=0.0)
            for name, settings in SETTINGS.items()
        ]
        said: list[str] = []
        bars = Progress(console=screen, transient=True, disable=not screen.is_terminal)
        bar = bars.add_task("training", total=len(names) * self.seeds)

        def say(text: str) -> None:
            said.append(text)
            bars.advance(bar)
            if not screen.is_terminal:
                screen.print(text, soft_wrap=True)

        with bars:
            if not race(conditions, names, self.seeds, workers, results, Results(task, Path(), best), say):
                raise RuntimeError("the race did not come to its end:\n" + "\n".join(said))
        with one_thread():
            times(conditions, names, results, lambda text: None, DEMO_PLAN, first=0)
