"""What the findings of all races have in common: what stands beside verdicts, figures of the search, tables."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean

from consequent_lab.paper.findings import Axis, Figure, Finding, Lead, Number, Panel, Series, Statement, Table
from consequent_lab.paper.kept_contestants import KeptContestant
from consequent_lab.paper.rates import rate_at
from consequent_lab.paper.recipes import Race

DRAWN_UP_TO = 10.0  # loss: four times that of guessing among ten classes; beyond it nothing was learnt
ITERATIONS_OR_SECONDS = [Axis("iteration", "iterations"), Axis("seconds", "seconds of training")]


def circumstances(race: Race, contestants: Iterable[KeptContestant], at: float | None = None) -> str:
    """Returns what belongs beside every verdict on trained networks: test accuracy, seeds, the size of the search.

    Of the contestants that the verdict is on, at an iteration, by default the last.
    """
    shown: dict[str, list[str]] = {}
    rates, seeds = set(), set()
    for one in contestants:
        found = [run.last("test_accuracy") if at is None else run.at("test_accuracy", at) for run in one.runs]
        values = [100 * value for value in found if value is not None]
        if values:
            ends = f" ({min(values):.1f}–{max(values):.1f})" if len(values) > 1 else ""
            shown.setdefault(one.setting, []).append(f"{one.label} {fmean(values):.1f}{ends}")
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


def rate_panels(panels: dict[str, dict[str, dict[int, float]]], axis: str) -> list[Panel]:
    """Returns losses against the learning rate, given by rung, of every label, by title."""
    return [
        Panel(
            title,
            [_rate_series(label, losses) for label, losses in by_label.items() if losses],
            [Axis("rate", "learning rate", log=True)],
            [Axis("loss", axis, log=True)],
        )
        for title, by_label in panels.items()
    ]


def _rate_series(label: str, losses: dict[int, float]) -> Series:
    drawn = {rate_at(rung): loss if loss <= DRAWN_UP_TO else None for rung, loss in sorted(losses.items())}
    return Series(label, {"rate": [*drawn], "loss": [*drawn.values()]}, style="line+markers")


def curve_panels(
    panels: Mapping[str, Iterable[KeptContestant]], y: Sequence[Axis], x: Sequence[Axis] = ITERATIONS_OR_SECONDS
) -> list[Panel]:
    """Returns a curve for every run of the contestants of each panel, given by its title."""
    columns = [axis.column for axis in y]
    return [
        Panel(title, [series for one in some for series in one.series(columns)], x, y) for title, some in panels.items()
    ]


def search_figure(name: str, race: Race, panels: dict[str, list[KeptContestant]]) -> Figure:
    """Returns the loss of every rate that was tried, for the contestants of each panel, given by its title."""
    every = [one for some in panels.values() for one in some]
    extended = [one.variant for one in every if one.search.extended]
    abandoned = [
        f"{one.variant} at {one.choice.abandoned_rates}"
        for one in every
        if one.choice is not None and one.choice.abandoned
    ]
    caption = f"{race.search.describe()} A rate without a point diverged, or ended with a loss above {DRAWN_UP_TO:g}."
    if extended:
        caption += f" The best was at the edge of the grid, which was extended, for {', '.join(extended)}."
    if abandoned:
        caption += " Full runs failed with the search's choice, and the next lower rate was taken: "
        caption += f"{'; '.join(abandoned)}."
    losses = {title: {one.label: one.search.losses for one in some} for title, some in panels.items()}
    shown = rate_panels(losses, "loss over the last epoch of the search")
    return Figure(name, "The search for learning rates", caption, shown)


def rates_table(contestants: Iterable[KeptContestant]) -> Table:
    """Returns the learning rate of every contestant, and how it was found."""
    rows: list[list[str | Number]] = []
    for one in contestants:
        best, choice = one.search.best, one.choice
        if best is not None:
            abandoned = choice.abandoned_rates if choice else ""
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
        figures=figures,
        statements=[] if is_small else statements(),
        tables=[*tables, rates_table(contestants), runs_table(contestants)],
        lead=None if is_small else lead(),
        is_small=is_small,
    )
