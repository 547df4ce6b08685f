"""`consequent demo`: plain optimisers against their C- versions, on data that needs no download, in under a minute."""

import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # The command line reads this file for its options; torch and matplotlib are imported when needed.
    from consequent_lab.demo_race import Result, Rules
    from consequent_lab.summary import Summary

LEARNING_RATES = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)


@dataclass(frozen=True)
class Demo:
    """Race SGD, Nesterov and Adam against their C- versions on scikit-learn's handwritten digits.

    The network is the paper's in small: eight hidden layers, ReLU, Kaiming's initialisation, mini-batches of 32. Every
    optimiser searches the same learning rates for the one with which the slowest of three seeds is first at the target,
    then runs with it on seeds that the search has not seen.
    """

    seeds: int = 3
    """Runs of every optimiser after its search."""
    epochs: int = 10
    """Epochs of every run, and the most that a learning rate gets in the search."""
    target_loss: float = 0.01
    """The training loss to reach."""
    damping: float | None = None
    """The ridge λ of the C- versions, not searched; or"""
    relative_damping: float | None = None
    """λ as a fraction of the inputs' mean eigenvalue (default: the library's own)."""
    output: Path = Path("demo.png")
    """The picture; the numbers go to a JSON file of the same name beside it."""
    workers: int | None = None
    """Runs at a time, one thread each (default: the number of cores, at most 6)."""
    quick: bool = False
    """A tiny race that only shows that everything works; overrides seeds, epochs and target loss."""

    def __post_init__(self) -> None:
        for name, lowest in (("seeds", 1), ("epochs", 1), ("workers", 1)):
            value = getattr(self, name)
            if value is not None and value < lowest:
                raise ValueError(f"--{name} must be at least {lowest}, got {value}")
        for name in ("target_loss", "damping", "relative_damping"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"--{name.replace('_', '-')} must be positive and finite, got {value}")
        if self.damping is not None and self.relative_damping is not None:
            raise ValueError("give --damping or --relative-damping, not both")
        if self.output.suffix != ".png":
            raise ValueError(f"--output must end in .png, got {self.output}")

    def rules(self) -> "Rules":
        """Returns the rules of the race."""
        from consequent.maths.damping import DEFAULT, Damping
        from consequent_lab.demo_race import Rules

        chosen = Damping.chosen(self.damping, self.relative_damping) or DEFAULT  # to be written down with the numbers
        rules = Rules(
            LEARNING_RATES,
            self.epochs,
            self.target_loss,
            None if chosen.relative else chosen.value,
            search_seeds=(100, 101, 102),
            seeds=tuple(range(self.seeds)),
            relative_damping=chosen.value if chosen.relative else None,
        )
        if self.quick:
            tiny = replace(rules, learning_rates=(0.003, 0.01), epochs=2, target_loss=1.0, hidden=(64, 64))
            return replace(tiny, search_seeds=(100,), seeds=(0,))
        return rules

    def run(self) -> None:
        """Runs the race, shows it, and writes the picture and the numbers."""
        from consequent_lab.pool import start_importing
        from consequent_lab.records import cores

        start = time.perf_counter()
        self.output.parent.mkdir(parents=True, exist_ok=True)  # Better fail now than after the race.
        workers = self.workers or min(cores(), 6)
        if workers > 1:
            start_importing("consequent_lab.demo_race")
        from consequent_lab.contestants import CONTESTANTS
        from consequent_lab.demo_race import race, work
        from consequent_lab.display import ProgressDisplay, results_table
        from consequent_lab.figures import draw_race
        from consequent_lab.screen import console
        from consequent_lab.summary import summarise, verdicts

        rules = self.rules()
        screen = console()
        screen.print(_introduction(rules, workers))
        with ProgressDisplay(screen, [contestant.name for contestant in CONTESTANTS], work(rules)) as display:
            results = race(rules, workers, display.show)
        summaries = [summarise(result, rules.target_loss) for result in results]
        sentences = verdicts(summaries, rules.target_loss)
        screen.print(results_table(summaries, rules.target_loss, len(rules.seeds)))
        for warning in sorted({message for result in results for run in result.runs for message in run.warnings}):
            screen.print(f"Warning: {warning}")
        if any(summary.at_edge for summary in summaries):
            screen.print("* the smallest or largest learning rate tried; a better one may lie beyond")
        for sentence in sentences:
            screen.print(sentence)
        numbers = self.output.with_suffix(".json")
        draw_race(self.output, results, rules.target_loss)
        _write_record(numbers, rules, workers, results, summaries, sentences)
        screen.print(f"Picture: {self.output}   Numbers: {numbers}   Time: {time.perf_counter() - start:.0f} s")


def _introduction(rules: "Rules", workers: int) -> str:
    rates = ", ".join(f"{rate:g}" for rate in rules.learning_rates)
    damping = (
        f"damping {rules.damping:g}" if rules.damping is not None else f"relative damping {rules.relative_damping:g}"
    )
    return (
        f"Handwritten digits, {len(rules.hidden)} hidden layers of {rules.hidden[0]}, mini-batches of "
        f"{rules.batch_size}, {rules.epochs} epochs, {damping}.\n"
        f"Learning rates tried by every optimiser, on {len(rules.search_seeds)} seeds: {rates}.\n"
        f"Then seeds {', '.join(map(str, rules.seeds))} at the best of them, {workers} at a time on one thread each.\n"
    )


def _write_record(
    path: Path,
    rules: "Rules",
    workers: int,
    results: "list[Result]",
    summaries: "list[Summary]",
    sentences: list[str],
) -> None:
    from consequent_lab.records import provenance, write_json

    contestants: list[dict[str, Any]] = []
    for result, summary in zip(results, summaries, strict=True):
        runs = [
            {
                "seed": run.seed,
                "test_accuracy": run.test_accuracy,
                "warnings": run.warnings,
                "curve": {key: [getattr(point, key) for point in run.curve] for key in ("epoch", "seconds", "loss")},
            }
            for run in result.runs
        ]
        trials = [asdict(trial) for trial in result.trials]
        contestants.append({**asdict(summary), "trials": trials, "runs": runs})
    record = {**provenance(workers), "rules": asdict(rules), "contestants": contestants, "verdicts": sentences}
    write_json(path, record)
