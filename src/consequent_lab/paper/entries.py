"""A contestant with all that is kept of it: its search, its runs at the chosen rate, its seconds per iteration."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from statistics import fmean, median

from consequent_lab.paper.archive import Archive, KeptRun
from consequent_lab.paper.findings import Axis, Figure, Number, Panel, Series, Table
from consequent_lab.paper.measures import Curve
from consequent_lab.paper.rates import Chosen, Searched, rate_at, variant_at
from consequent_lab.paper.recipes import Contestant, Race

WARM_UP = 0.25  # of the timed iterations
DRAWN_UP_TO = 10.0  # loss: four times that of guessing among ten classes; beyond it nothing was learnt
NOT_MEASURED = "The runs are missing."
NOT_TIMED = "The runs are missing, or an iteration was not timed with nothing beside it."


@dataclass(frozen=True)
class Entry:
    """A contestant and what is kept of it."""

    contestant: Contestant
    search: Searched
    choice: Chosen | None
    runs: list[KeptRun]  # at the chosen rate, by seed
    seconds_per_iteration: float | None = None  # timed alone
    timed_as: str = ""  # CUDA graph or eager, and the device

    @property
    def label(self) -> str:
        """The contestant's name in figures."""
        return self.contestant.label

    def curves(self, reading: str, by: str = "iteration") -> list[Curve]:
        """Returns a reading of every run, by iterations or by seconds; runs without it are left out.

        By seconds there are none unless the contestant was timed: the runs' own depend on what ran beside them, which
        is good enough for a figure that says so, and not for a verdict.
        """
        if by == "seconds" and self.seconds_per_iteration is None:
            return []
        curves = [run.curve(reading) if by == "iteration" else self._by_seconds(run, reading) for run in self.runs]
        return [curve for curve in curves if len(curve) > 1]

    def _by_seconds(self, run: KeptRun, reading: str) -> Curve:
        return [(self.seconds(line), line[reading]) for line in run.lines if line.get(reading) is not None]

    def seconds(self, line: dict[str, float]) -> float:
        """Returns the seconds of training up to a reading."""
        if self.seconds_per_iteration is None:
            return line["seconds"]
        return line["iteration"] * self.seconds_per_iteration

    def series(self, columns: Sequence[str]) -> list[Series]:
        """Returns a curve for every run, of the lines that have all of these readings, by iterations and by seconds."""
        found = []
        for run in self.runs:
            lines = [line for line in run.lines if all(line.get(name) is not None for name in columns)]
            values: dict[str, list[Number]] = {name: [float(line[name]) for line in lines] for name in columns}
            values["iteration"] = [float(line["iteration"]) for line in lines]
            values["seconds"] = [float(f"{self.seconds(line):.5g}") for line in lines]
            found.append(Series(f"{self.label}, seed {run.seed}", values, group=self.label))
        return found


def small_note(race: Race, name: str) -> str:
    """Returns what to say first if only the small version of an experiment is kept."""
    return "" if race.name == name else "Only a small version on the digits was run, to see that everything works. "


def race_kept(make: Callable[[bool], Race], archive: Archive) -> Race:
    """Returns the race of which something is kept: the full one, else the small one, else the full one, empty."""
    full, small = make(False), make(True)
    kept = set(archive.recipes())
    small_alone = {small.name, f"{small.name}-search"} & kept and not {full.name, f"{full.name}-search"} & kept
    return small if small_alone else full


def entries_of(race: Race, archive: Archive) -> dict[str, Entry]:
    """Returns the contestants of a race by their variants' names."""
    return {contestant.variant: _entry(race, contestant, archive) for contestant in race.contestants}


def _entry(race: Race, contestant: Contestant, archive: Archive) -> Entry:
    search, choice = race.searched(contestant, archive), race.chosen(contestant, archive)
    runs = [] if choice is None else archive.runs(race.name, variant_at(contestant.variant, choice.rung))
    timed = [run for run in archive.runs(f"{race.name}-timing", contestant.timing_variant) if run.is_finished]
    if not timed:
        return Entry(contestant, search, choice, runs)
    start = timed[0].starts[-1]
    how = "CUDA graph" if start.get("graph") else "eager"
    return Entry(contestant, search, choice, runs, seconds_of(timed[0]), f"{how}, {start['device']['name']}")


def seconds_of(run: KeptRun) -> float:
    """Returns the median seconds per iteration of a run, its first quarter left out."""
    lines = [line for line in run.lines if line["iteration"] >= WARM_UP * run.outcome["iteration"]]
    pieces: list[float] = [
        (after["seconds"] - before["seconds"]) / (after["iteration"] - before["iteration"])
        for before, after in pairwise(lines)
    ]
    return median(pieces)


# ---- over seeds --------------------------------------------------------------------------------------------------


def mean_of(curves: Iterable[Curve], measure: Callable[[Curve], float | None]) -> float | None:
    """Returns the mean of a measure over curves; None if there is no curve, or one has no such measure."""
    values = [measure(curve) for curve in curves]
    return fmean(value for value in values if value is not None) if values and None not in values else None


def mean_over_pairs(
    curves: Sequence[Curve], others: Sequence[Curve], measure: Callable[[Curve, Curve], float | None]
) -> float | None:
    """Returns the mean of a measure over all pairs of curves; None if there is no pair, or one has no such measure."""
    values = [measure(curve, other) for curve, other in product(curves, others)]
    return fmean(value for value in values if value is not None) if values and None not in values else None


def spread(values: Sequence[float | None], form: str = ",.0f", of: str = "seeds") -> str:
    """Returns mean and range as in a sentence.

    Args:
        values: one for each seed, or pair of seeds; None is one that has none.
        form: how a number is written.
        of: what the values are of.

    >>> spread([1000, 3000]), spread([5.0]), spread([1.0, None]), spread([])
    ('2,000 (1,000–3,000; 2 seeds)', '5', 'not in all seeds (1 of 2)', 'not measured')
    """
    known = [value for value in values if value is not None]
    if not values:
        return "not measured"
    if len(known) < len(values):
        return "never" if not known else f"not in all {of} ({len(known)} of {len(values)})"
    if len(known) == 1:
        return format(known[0], form)
    return f"{fmean(known):{form}} ({min(known):{form}}–{max(known):{form}}; {len(known)} {of})"


# ---- figures and tables of every race ----------------------------------------------------------------------------

ITERATIONS_OR_SECONDS = [Axis("iteration", "iterations"), Axis("seconds", "seconds of training")]


def seconds_note(entries: Iterable[Entry]) -> str:
    """Returns where the seconds of a figure come from."""
    present = [entry for entry in entries if entry.runs]
    alone = [entry for entry in present if entry.seconds_per_iteration is not None]
    if not alone:
        return "Seconds: the runs' own, several side by side on one device, evaluations left out."
    modes = ", ".join(sorted({entry.timed_as for entry in alone}))
    note = f"Seconds: iterations × the median seconds of an iteration, timed with nothing beside it ({modes})"
    others = [entry.label for entry in present if entry.seconds_per_iteration is None]
    return f"{note}; of {', '.join(others)} the runs' own." if others else f"{note}."


def search_figure(name: str, race: Race, panels: dict[str, list[Entry]]) -> Figure:
    """Returns the loss of every rate that was tried.

    Args:
        name: of the figure.
        race: whose search it was.
        panels: the contestants of each panel, by title.
    """
    extended = [entry.contestant.variant for some in panels.values() for entry in some if entry.search.extended]
    abandoned = [
        f"{entry.contestant.variant} at {', '.join(f'{rate_at(rung):g}' for rung in entry.choice.abandoned)}"
        for some in panels.values()
        for entry in some
        if entry.choice is not None and entry.choice.abandoned
    ]
    caption = f"{race.search.describe()} A rate without a point diverged, or ended with a loss above {DRAWN_UP_TO:g}."
    if extended:
        caption += f" The best was at the edge of the grid, which was extended, for {', '.join(extended)}."
    if abandoned:
        caption += (
            f" Full runs failed with the search's choice, and the next lower rate was taken: {'; '.join(abandoned)}."
        )
    return Figure(
        name,
        "The search for learning rates",
        caption,
        [
            Panel(
                title,
                [_search_series(entry) for entry in some if entry.search.losses],
                [Axis("rate", "learning rate", log=True)],
                [Axis("loss", "loss over the last epoch of the search", log=True)],
            )
            for title, some in panels.items()
        ],
    )


def _search_series(entry: Entry) -> Series:
    losses = sorted(entry.search.losses.items())
    columns: dict[str, list[Number]] = {
        "rate": [rate_at(rung) for rung, _ in losses],
        "loss": [loss if loss <= DRAWN_UP_TO else None for _, loss in losses],
    }
    return Series(entry.label, columns, style="line+markers")


def rates_table(entries: Iterable[Entry]) -> Table:
    """Returns the learning rate of every contestant, and how it was found."""
    rows: list[list[str | Number]] = []
    for entry in entries:
        if entry.search.losses:
            best, choice = entry.search.best, entry.choice
            rows.append(
                [
                    entry.contestant.variant,
                    None if best is None else rate_at(best),
                    None if best is None else entry.search.losses[best],
                    float(len(entry.search.losses)),
                    "yes" if entry.search.extended else "no",
                    ", ".join(f"{rate_at(rung):g}" for rung in choice.abandoned) if choice else "",
                    None if choice is None else choice.rate,
                ]
            )
    columns = [
        "contestant",
        "best rate of the search",
        "its loss there",
        "rates tried",
        "grid extended",
        "abandoned after a full run failed",
        "rate of the runs",
    ]
    return Table("Learning rates", columns, rows)


def runs_table(title: str, entries: Iterable[Entry]) -> Table:
    """Returns a row for every run."""
    rows: list[list[str | Number]] = [
        [
            entry.contestant.variant,
            float(run.seed),
            run.config.lr,
            run.outcome["outcome"],
            float(run.outcome["iteration"]),
            run.last("epoch_loss"),
            run.last("train_loss"),
            run.last("epoch_accuracy"),
            run.last("batch_accuracy"),
            run.last("train_accuracy"),
            run.last("test_accuracy"),
            float(sum(value for _, value in run.curve("forgotten"))),
            None if entry.seconds_per_iteration is None else 1000 * entry.seconds_per_iteration,
            entry.timed_as,
        ]
        for entry in entries
        for run in entry.runs
    ]
    columns = [
        "contestant",
        "seed",
        "learning rate",
        "outcome",
        "iterations",
        "loss over the last epoch",
        "loss on the training set",
        "accuracy over the last epoch",
        "accuracy of the last mini-batch",
        "accuracy on the training set",
        "test accuracy",
        "samples forgotten, in all",
        "ms per iteration, alone",
        "timed as",
    ]
    return Table(title, columns, rows)
