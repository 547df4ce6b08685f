"""A contestant with all that is kept of it: its search, its runs at the chosen rate, its seconds per iteration."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from statistics import fmean, median

from consequent_lab.paper.archive import Archive, KeptRun
from consequent_lab.paper.findings import Axis, Figure, Finding, Lead, Number, Panel, Series, Statement, Table
from consequent_lab.paper.measures import Curve, advantage
from consequent_lab.paper.rates import Chosen, Searched, rate_at, variant_at
from consequent_lab.paper.recipes import Contestant, Race

WARM_UP = 0.25  # of the timed iterations
DRAWN_UP_TO = 10.0  # loss: four times that of guessing among ten classes; beyond it nothing was learnt


@dataclass(frozen=True)
class KeptContestant:
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

    @property
    def full_label(self) -> str:
        """Its name where panels do not say the rest."""
        return f"{self.contestant.setting} {self.label}".strip()

    def curves(self, quantity: str, by: str = "iteration") -> list[Curve]:
        """Returns a quantity of every run, by iterations or by seconds; runs without it are left out.

        By seconds there are none unless the contestant was timed: the runs' own depend on what ran beside them, which
        is good enough for a figure that says so, and not for a verdict.
        """
        if by == "seconds" and self.seconds_per_iteration is None:
            return []
        place = self.seconds if by == "seconds" else (lambda line: line["iteration"])
        curves = [
            [(place(line), line[quantity]) for line in run.lines if line.get(quantity) is not None] for run in self.runs
        ]
        return [curve for curve in curves if len(curve) > 1]

    def seconds(self, line: dict[str, float]) -> float:
        """Returns the seconds of training up to a line of metrics."""
        if self.seconds_per_iteration is None:
            return line["seconds"]
        return line["iteration"] * self.seconds_per_iteration

    def series(self, columns: Sequence[str], until: float = math.inf, *, logged: bool = False) -> list[Series]:
        """Returns a curve for every run, of the lines that have all of these columns, by iterations and by seconds.

        Args:
            columns: metrics.
            until: the last iteration.
            logged: leave out lines that are there for the end of an epoch alone.
        """
        found = []
        for run in self.runs:
            lines = [
                line
                for line in run.lines
                if all(line.get(name) is not None for name in columns)
                and line["iteration"] <= until
                and not (logged and line["iteration"] % run.config.log_every)
            ]
            values: dict[str, list[Number]] = {name: [float(line[name]) for line in lines] for name in columns}
            values["iteration"] = [float(line["iteration"]) for line in lines]
            values["seconds"] = [float(f"{self.seconds(line):.5g}") for line in lines]
            found.append(Series(f"{self.label}, seed {run.seed}", values, group=self.label))
        return found


def small_note(race: Race) -> str:
    """Returns what a small version of an experiment ran."""
    contestants, config = race.contestants, race.contestants[0].config
    seeds = sorted({seed for contestant in contestants for seed in contestant.seeds})
    length = f"{config.epochs} epochs" if config.epochs else f"{config.iterations} iterations"
    network = f"{len(config.hidden)} hidden layers of {config.hidden[0]}"
    if config.model != "mlp":
        network = f"a residual network of {len(config.widths) * 2 * config.blocks + 2} layers"
    return (
        f"This shows the machinery on the digits and says nothing about the paper: {network}, mini-batches of "
        f"{config.batch_size}, {length} or more, {len(contestants)} contestants, {len(seeds)} seed(s). "
        f"{race.search.describe()} No verdicts are given."
    )


def race_kept(make: Callable[[bool], Race], archive: Archive) -> Race:
    """Returns the race of which something is kept: the full one, else the small one, else the full one, empty."""
    full, small = make(False), make(True)
    kept = set(archive.recipes())
    small_alone = {small.name, f"{small.name}-search"} & kept and not {full.name, f"{full.name}-search"} & kept
    return small if small_alone else full


def kept_race(make: Callable[[bool], Race], runs: Sequence[Path]) -> tuple[Race, list[KeptContestant]]:
    """Returns a race and its contestants, from folders of runs; the small one if nothing is kept of the full one."""
    archive = Archive(*runs, unfinished=True)
    race = race_kept(make, archive)
    return race, [_kept(race, contestant, archive) for contestant in race.contestants]


def _kept(race: Race, contestant: Contestant, archive: Archive) -> KeptContestant:
    search, choice = race.searched(contestant, archive), race.chosen(contestant, archive)
    runs = [] if choice is None else archive.runs(race.name, variant_at(contestant.variant, choice.rung))
    timed = [run for run in archive.runs(f"{race.name}-timing", contestant.timing_variant) if run.is_finished]
    if not timed:
        return KeptContestant(contestant, search, choice, runs)
    start = timed[0].starts[-1]
    how = "CUDA graph" if start.get("graph") else "eager"
    return KeptContestant(contestant, search, choice, runs, seconds_of(timed[0]), f"{how}, {start['device']['name']}")


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


def lowered(
    one: KeptContestant,
    other: KeptContestant,
    by: str = "iteration",
    quantity: str = "epoch_loss",
    measure: Callable[[Curve, Curve], float | None] = advantage,
) -> list[float]:
    """Returns by how many decades a loss is lower on average, for every pair of runs.

    Args:
        one: whose loss should be lower.
        other: than whose.
        by: compares at equal iterations, or seconds.
        quantity: which loss.
        measure: another measure of two curves.
    """
    pairs = product(one.curves(quantity, by), other.curves(quantity, by))
    return [value for mine, yours in pairs if (value := measure(mine, yours)) is not None]


def all_above(values: Sequence[float], limit: float = 0.0) -> bool | None:
    """Returns whether every pair of runs says so; None if there is none."""
    return all(value > limit for value in values) if values else None


def spread(
    values: Sequence[float | None],
    form: str = ",.0f",
    of: str = "seeds",
    within: float | None = None,
    *,
    counted: bool = True,
) -> str:
    """Returns mean and range as in a sentence.

    Args:
        values: one for each seed, or pair of seeds; None is one that has none.
        form: how a number is written.
        of: what the values are of.
        within: how far was looked for one.
        counted: say how many there are.

    >>> spread([1000, 3000]), spread([1000, 3000], counted=False), spread([5.0]), spread([])
    ('2,000 (1,000–3,000; 2 seeds)', '2,000 (1,000–3,000)', '5', 'not measured')
    >>> spread([1.0, None]), spread([None, None], within=10_000)
    ('not in all seeds (1 of 2)', 'not within 10,000')
    """
    known = [value for value in values if value is not None]
    if not values:
        return "not measured"
    if len(known) < len(values):
        never = "none" if within is None else f"not within {within:,.0f}"
        return never if not known else f"not in all {of} ({len(known)} of {len(values)})"
    if len(known) == 1:
        return format(known[0], form)
    count = f"; {len(known)} {of}" if counted else ""
    return f"{fmean(known):{form}} ({min(known):{form}}–{max(known):{form}}{count})"


def circumstances(race: Race, contestants: Iterable[KeptContestant], at: float | None = None) -> str:
    """Returns what belongs beside every verdict on trained networks: test accuracy, seeds, the size of the search.

    Args:
        race: whose rules the search followed.
        contestants: whom the verdict is on.
        at: the iteration whose test accuracy counts; by default the last.
    """
    shown: dict[str, list[str]] = {}
    rates, seeds = set(), set()
    for one in contestants:
        found = [run.last("test_accuracy") if at is None else run.at("test_accuracy", at) for run in one.runs]
        values = [100 * value for value in found if value is not None]
        if values:
            ends = f" ({min(values):.1f}–{max(values):.1f})" if len(values) > 1 else ""
            shown.setdefault(one.contestant.setting, []).append(f"{one.label} {fmean(values):.1f}{ends}")
            rates.add(len(one.search.losses))
            seeds.add(len(values))
    if not shown:
        return ""
    accuracies = "; ".join(
        f"{setting}: {', '.join(some)}" if setting else ", ".join(some) for setting, some in shown.items()
    )
    when = "at the end" if at is None else f"at iteration {at:,.0f}"
    tried, counted = (" or ".join(map(str, sorted(counts))) for counts in (rates, seeds))
    return (
        f"Test accuracy in % {when}: {accuracies}. Seeds: {counted}. Search: {tried} learning rates each, one seed, "
        f"{race.search.epochs} epochs."
    )


# ---- figures and tables of every race ----------------------------------------------------------------------------

ITERATIONS_OR_SECONDS = [Axis("iteration", "iterations"), Axis("seconds", "seconds of training")]


def seconds_note(contestants: Iterable[KeptContestant]) -> str:
    """Returns where the seconds of a figure come from."""
    present = [one for one in contestants if one.runs]
    alone = [one for one in present if one.seconds_per_iteration is not None]
    if not alone:
        return "Seconds: the runs' own, several side by side on one device, evaluations left out."
    modes = ", ".join(sorted({one.timed_as for one in alone}))
    note = f"Seconds: iterations × the median seconds of an iteration, timed with nothing beside it ({modes})"
    others = [one.label for one in present if one.seconds_per_iteration is None]
    return f"{note}; of {', '.join(others)} the runs' own." if others else f"{note}."


def search_figure(name: str, race: Race, panels: dict[str, list[KeptContestant]]) -> Figure:
    """Returns the loss of every rate that was tried.

    Args:
        name: of the figure.
        race: whose search it was.
        panels: the contestants of each panel, by title.
    """
    extended = [one.contestant.variant for some in panels.values() for one in some if one.search.extended]
    abandoned = [
        f"{one.contestant.variant} at {', '.join(f'{rate_at(rung):g}' for rung in one.choice.abandoned)}"
        for some in panels.values()
        for one in some
        if one.choice is not None and one.choice.abandoned
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
                [_search_series(one) for one in some if one.search.losses],
                [Axis("rate", "learning rate", log=True)],
                [Axis("loss", "loss over the last epoch of the search", log=True)],
            )
            for title, some in panels.items()
        ],
    )


def _search_series(one: KeptContestant) -> Series:
    losses = sorted(one.search.losses.items())
    columns: dict[str, list[Number]] = {
        "rate": [rate_at(rung) for rung, _ in losses],
        "loss": [loss if loss <= DRAWN_UP_TO else None for _, loss in losses],
    }
    return Series(one.label, columns, style="line+markers")


def rates_table(contestants: Iterable[KeptContestant]) -> Table:
    """Returns the learning rate of every contestant, and how it was found."""
    rows: list[list[str | Number]] = []
    for one in contestants:
        best, choice = one.search.best, one.choice
        if best is not None:
            abandoned = ", ".join(f"{rate_at(rung):g}" for rung in choice.abandoned) if choice else ""
            tried = f"{len(one.search.losses)}{', grid extended' if one.search.extended else ''}"
            chosen = None if choice is None else choice.rate
            rows.append([one.full_label, tried, rate_at(best), one.search.losses[best], chosen, abandoned])
    columns = ["contestant", "rates tried", "best rate", "its loss", "rate taken", "abandoned after a full run failed"]
    if not any(row[-1] for row in rows):
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    return Table("Learning rates", columns, rows)


def runs_table(contestants: Iterable[KeptContestant]) -> Table:
    """Returns a row for every run."""
    rows: list[list[str | Number]] = [
        [
            one.full_label,
            float(run.seed),
            run.config.lr,
            float(run.outcome["iteration"]) if run.outcome["outcome"] == "finished" else run.outcome["outcome"],
            run.last("train_loss"),
            run.last("train_accuracy"),
            run.last("test_accuracy"),
            float(sum(value for _, value in run.curve("forgotten"))),
            None if one.seconds_per_iteration is None else 1000 * one.seconds_per_iteration,
        ]
        for one in contestants
        for run in one.runs
    ]
    columns = [
        "contestant", "seed", "learning rate", "iterations", "training loss", "training accuracy", "test accuracy",
        "samples forgotten, in all", "ms per iteration, alone",
    ]  # fmt: skip
    return Table("Every run", columns, rows)


def race_finding(
    name: str,
    title: str,
    summary: str,
    kept: tuple[Race, Sequence[KeptContestant]],
    figures: list[Figure],
    statements: Callable[[], list[Statement]],
    tables: Sequence[Table] = (),
    lead: Callable[[], Lead | None] = lambda: None,
) -> Finding:
    """Returns the finding of a race; a small one shows the machinery, and has neither statements nor a lead."""
    race, contestants = kept
    is_small = race.name != name
    return Finding(
        name=name,
        title=title,
        summary=small_note(race) if is_small else summary,
        commands=[f"consequent reproduce {name}{' --quick' if is_small else ''}"],
        figures=figures,
        statements=[] if is_small else statements(),
        tables=[*tables, rates_table(contestants), runs_table(contestants)],
        lead=None if is_small else lead(),
        is_small=is_small,
    )
