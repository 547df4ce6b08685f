"""Tables of what the runs came to, in Markdown. The measure is defined in the package's docstring."""

import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from benchmarks.defaults.contestants import (
    AVERAGES,
    CONTESTANTS,
    KNOWN,
    WITH_MEMORY,
    damping_for,
    unbounded,
    with_bounds,
)
from benchmarks.defaults.study import (
    LAST_SEEDS,
    LATER_SEEDS,
    NEXT_SEEDS,
    TUNING_SEED,
    Record,
    Results,
    Run,
    Scope,
    stress,
)

LARGEST_RATIO = 100.0
OWN_DAMPINGS = ("relative 0.1", "relative 0.3", "relative 1", "relative 3")  # of C-Adam
CORRECTED = tuple(name for name, contestant in CONTESTANTS.items() if contestant.is_corrected)


def tuned_plain(scope: Scope, results: Results, task: str, names: Sequence[str]) -> tuple[str, float] | None:
    """The plain optimiser, among these, and its rate with the lowest final loss at the tuning seed."""
    found = []
    for name in names:
        rate = results.best_rate(scope, task, name, "")
        if rate is not None:
            found.append((results.records[Run(task, name, "", rate, TUNING_SEED, scope.steps)]["final"], name, rate))
    return min(found)[1:] if found else None


def log_ratio(record: Record, plain: Record) -> float:
    """The logarithm of a run's ratio to the tuned plain one."""
    if record["diverged"]:
        return math.log(LARGEST_RATIO)
    floor = max(record["floor"], 1e-30)
    of_plain = plain["initial"] if plain["diverged"] else plain["final"]
    ratio = max(record["final"], floor) / max(of_plain, floor)
    return math.log(min(max(ratio, 1 / LARGEST_RATIO), LARGEST_RATIO))


def log_paired_ratio(upper: Record, lower: Record, of: str = "final") -> float | None:
    """The logarithm of the ratio of two runs with the same task and seed; None where the task has no such loss.

    Args:
        upper: one of them.
        lower: the other.
        of: ``"final"`` or ``"test"``.
    """
    if upper["diverged"] or lower["diverged"]:
        return math.log(LARGEST_RATIO) * (upper["diverged"] - lower["diverged"])
    if upper[of] is None:
        return None
    floor = max(upper["floor"] if of == "final" else 0.0, 1e-30)
    ratio = max(upper[of], floor) / max(lower[of], floor)
    return math.log(min(max(ratio, 1 / LARGEST_RATIO), LARGEST_RATIO))


class Paired(NamedTuple):
    """The geometric mean of ratios of pairs over tasks and seeds, and the factor of one standard error, by seeds."""

    mean: float
    noise: float

    def __str__(self) -> str:
        return f"**{self.mean:.2f}** ×/÷ {self.noise:.3f}"


class Verdict:
    """Ratios of one contestant over tasks and seeds."""

    def __init__(self) -> None:
        self.of_task: dict[str, list[float]] = {}
        self.diverged = 0
        self.missing = 0  # runs that should be there and were not made yet

    def add(self, record: Record, plain: Record) -> None:
        """Take a run into account."""
        self.of_task.setdefault(record["task"], []).append(log_ratio(record, plain))
        self.diverged += record["diverged"]

    @property
    def runs(self) -> int:
        """How many runs were taken into account."""
        return sum(map(len, self.of_task.values()))

    @property
    def mean(self) -> float:
        """The geometric mean over seeds and tasks."""
        return math.exp(statistics.fmean(map(statistics.fmean, self.of_task.values())))

    @property
    def worst(self) -> tuple[float, str]:
        """The worst task's ratio, and its name."""
        return max((math.exp(statistics.fmean(ratios)), task) for task, ratios in self.of_task.items())

    @property
    def noise(self) -> float | None:
        """The factor by which the mean is uncertain, since there are few seeds: one standard error.

        Seeds of the last run only: that another tuning seed might have chosen other rates is not in it.
        """
        if not self.of_task or min(map(len, self.of_task.values())) < 2:
            return None
        squares = [statistics.variance(ratios) / len(ratios) for ratios in self.of_task.values()]
        return math.exp(math.sqrt(sum(squares)) / len(squares))

    def __str__(self) -> str:
        if not self.of_task:
            return "–"
        ratio, task = self.worst
        noise = f" ×/÷ {self.noise:.2f}" if self.noise is not None else ""
        diverged = f", {self.diverged} of {self.runs} diverged" if self.diverged else ""
        missing = f", **{self.missing} runs missing**" if self.missing else ""
        return f"**{self.mean:.2f}**{noise} ({ratio:.2g} {task}{diverged}{missing})"


class Judge:
    """Finds the runs that are to be compared."""

    def __init__(self, scope: Scope, results: Results) -> None:
        self.scope, self.results = scope, results

    def record(self, task: str, contestant: str, damping: str, rate: float | None, seed: int) -> Record | None:
        """A run that was made, if it was."""
        if rate is None:
            return None
        return self.results.records.get(Run(task, contestant, damping, rate, seed, self.scope.steps))

    def tuned_rate(self, task: str, contestant: str, damping: str) -> float:
        """The best rate at the tuning seed; the lowest if all diverged."""
        return self.results.best_rate(self.scope, task, contestant, damping) or self.scope.rates(contestant)[0]

    def verdict(
        self, contestant: str, damping: str, rate: float | None, seeds: Sequence[int], tasks: Sequence[str] = ()
    ) -> Verdict:
        """All tasks with one rate, or each with its best one if that is None."""
        found = Verdict()
        names = KNOWN[contestant].plain
        for task in tasks or self.scope.tasks:
            best_plain = tuned_plain(self.scope, self.results, task, names)
            if best_plain is None:
                found.missing += len(seeds)
                continue
            chosen = self.tuned_rate(task, contestant, damping) if rate is None else rate
            for seed in seeds:
                record = self.record(task, contestant, damping, chosen, seed)
                plain = self.record(task, best_plain[0], "", best_plain[1], seed)
                if record is not None and plain is not None:
                    found.add(record, plain)
                else:
                    found.missing += 1
        return found

    def paired(
        self, upper: tuple[str, str], lower: tuple[str, str], rate: float, seeds: Sequence[int], of: str = "final"
    ) -> Paired | None:
        """Two contestants with their dampings and one rate; None if a run was not made."""
        means = []
        for seed in seeds:
            logarithms = []
            for task in self.scope.tasks:
                one, other = (self.record(task, *who, rate, seed) for who in (upper, lower))
                if one is None or other is None:
                    return None
                logarithm = log_paired_ratio(one, other, of)
                logarithms += [] if logarithm is None else [logarithm]
            means.append(statistics.fmean(logarithms))
        return Paired(math.exp(statistics.fmean(means)), math.exp(statistics.stdev(means) / math.sqrt(len(means))))


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def by_damping(judge: Judge, rates: dict[str, float] | None, seeds: Sequence[int]) -> str:
    """The verdicts: a row for each damping, a column for each contestant, and their geometric mean."""

    def row(title: str, cases: Iterable[tuple[str, str]]) -> list[object]:
        found = [judge.verdict(name, damping, rates and rates[name], seeds) for name, damping in cases]
        means = [verdict.mean for verdict in found if verdict.of_task]
        return [title, *found, f"{statistics.geometric_mean(means):.2f}" if len(means) == len(found) else "–"]

    rows = [
        row(damping, [(name, damping_for(name, damping)) for name in CORRECTED]) for damping in judge.scope.dampings
    ]
    if rates is not None:
        rows.append(row("plain", [(CONTESTANTS[name].kin, "") for name in CORRECTED]))
    return table(["damping", *CORRECTED, "all four"], rows)


def by_rate(judge: Judge, contestant: str) -> str:
    """One rate for all tasks, at the tuning seed: a row for each damping, a column for each rate."""
    rates = judge.scope.rates(contestant)

    def cell(damping: str, rate: float) -> str:
        found = judge.verdict(contestant, damping, rate, [TUNING_SEED])
        return f"{found.mean:.2f} ({found.worst[0]:.2g}; {found.diverged})" if found.of_task else "–"

    dampings = dict.fromkeys(damping_for(contestant, damping) for damping in judge.scope.dampings)
    rows = [[damping or "plain", *(cell(damping, rate) for rate in rates)] for damping in dampings]
    return table([contestant, *(f"{rate:g}" for rate in rates)], rows)


def loss_text(records: Sequence[Record | None]) -> str:
    """The geometric mean of final losses."""
    found = [record for record in records if record is not None]
    finals = [record["final"] for record in found if not record["diverged"]]
    if len(found) < len(records):
        return f"{len(records) - len(found)} of {len(records)} missing"
    if len(finals) < len(records):
        return f"{len(records) - len(finals)} of {len(records)} diverged"
    return f"{math.exp(statistics.fmean(math.log(max(final, 1e-30)) for final in finals)):.3g}"


def by_task(judge: Judge, damping: str, rates: dict[str, float] | None) -> str:
    """Final losses and ratios, with one rate for all tasks or each with its tuned ones: geometric means over seeds."""
    rows = []
    for task in judge.scope.tasks:
        row = [task]
        for name, contestant in CONTESTANTS.items():
            of_case = damping_for(name, damping)
            rate = judge.tuned_rate(task, name, of_case) if rates is None else rates[name]
            text = loss_text([judge.record(task, name, of_case, rate, seed) for seed in judge.scope.seeds])
            if contestant.is_corrected:
                found = judge.verdict(name, of_case, rate, judge.scope.seeds, [task])
                text += f" (× {found.mean:.2f})" if found.of_task else ""
            row.append(text)
        rows.append(row)
    return table(["task", *CONTESTANTS], rows)


def behind(judge: Judge, damping: str, rates: dict[str, float]) -> str:
    """Where the C- versions lose to tuned plain: each task whose ratio is above 1, the worst first."""

    def cell(name: str, damping: str, rate: float | None) -> str:
        of_case = damping_for(name, damping)
        found = [(task, judge.verdict(name, of_case, rate, judge.scope.seeds, [task])) for task in judge.scope.tasks]
        lost = sorted(
            ((verdict.mean, verdict.noise, task) for task, verdict in found if verdict.of_task and verdict.mean > 1),
            reverse=True,
        )
        texts = [f"{task} {mean:.2f}" + (f" ×/÷ {noise:.2f}" if noise else "") for mean, noise, task in lost]
        return f"{len(lost)} of {len(found)}: {', '.join(texts)}" if texts else f"none of {len(found)}"

    rows = [[name, cell(name, unbounded(damping), None), cell(name, damping, rates[name])] for name in CORRECTED]
    return table(["", f"each with its best rate, {unbounded(damping)}", f"one rate for all, {damping}"], rows)


def learning_rates(judge: Judge, damping: str) -> str:
    """The best rates at the tuning seed, plain → corrected, and the median of their quotient."""
    rows: list[list[str]] = []
    quotients: dict[str, list[float]] = {name: [] for name in CORRECTED}
    at_an_end = dict.fromkeys(CORRECTED, 0)
    for task in judge.scope.tasks:
        row = [task]
        for name in CORRECTED:
            plain = judge.results.best_rate(judge.scope, task, CONTESTANTS[name].kin, "")
            own = judge.results.best_rate(judge.scope, task, name, damping_for(name, damping))
            if plain is None or own is None:
                row.append("–")
                continue
            quotients[name].append(own / plain)
            at_an_end[name] += own in (judge.scope.rates(name)[0], judge.scope.rates(name)[-1])
            row.append(f"{plain:g} → {own:g}")
        rows.append(row)
    medians = [f"× {statistics.median(found):.2g}" if found else "–" for found in quotients.values()]
    rows.append(["**median of the quotient**", *medians])
    rows.append(["best rate at an end of its grid", *map(str, at_an_end.values())])
    return table(["task", *(f"{CONTESTANTS[name].kin} → {name}" for name in CORRECTED)], rows)


def with_each_bound(judge: Judge, rates: dict[str, float], damping: str) -> str:
    """One rate for all tasks, without a bound and with each that was tried."""
    scope = dataclasses.replace(judge.scope, dampings=with_bounds(damping))
    return by_damping(Judge(scope, judge.results), rates, scope.seeds)


def under_stress(judge: Judge, damping: str) -> str:
    """Ten times the best rate: how many runs ended in NaN or infinity, diverged, or still learned."""
    rows: list[list[object]] = []
    for name in CORRECTED:
        for chosen in with_bounds(damping):
            runs = [run for run in stress(judge.scope, judge.results, chosen) if run.contestant == name]
            records = [judge.results.records[run] for run in runs if run in judge.results.records]
            if not records:
                continue
            not_finite = sum(record["final"] is None for record in records)
            diverged = sum(record["diverged"] for record in records)
            learned = sum(not record["diverged"] and record["final"] < record["initial"] for record in records)
            above = len(records) - diverged - learned
            rows.append([name, chosen, len(records), not_finite, diverged - not_finite, above, learned])
    losses = ["NaN or infinite", "more than 10 × the first loss", "above the first loss", "below it"]
    return table(["", "damping", "runs", *losses], rows)


def by_memory(judge: Judge, damping: str, rates: Sequence[float]) -> str:
    """How long Adam remembers squares: each task with its best rate, and one rate for all tasks."""
    rows: list[list[object]] = []
    for name in ("adam", "c-adam"):
        for beta, contestant in ((0.999, name), *((other.split()[1], other) for other in _of_kind(name))):
            of_case = damping_for(contestant, damping)
            found = [judge.verdict(contestant, of_case, rate, judge.scope.seeds) for rate in (None, *rates)]
            rows.append([name, beta, *found])
    return table(["", "β₂", "each with its best rate", *(f"{rate:g} for all" for rate in rates)], rows)


def by_averages(judge: Judge, damping: str, rates: dict[str, Sequence[float]]) -> str:
    """Averages over batches, with and without the bound: each task with its best rate, and one rate for all tasks."""
    columns = max(map(len, rates.values()))
    rows: list[list[object]] = []
    for name, of_name in rates.items():
        bound = damping_for(name, damping).removeprefix(unbounded(damping))
        for averages in ("", *(f", {one}" for one in AVERAGES)):
            for of_bound in dict.fromkeys(["", bound]):
                of_case = unbounded(damping) + averages + of_bound
                tuned = judge.verdict(name, of_case, None, judge.scope.seeds)
                single = [judge.verdict(name, of_case, rate, judge.scope.seeds) for rate in of_name]
                cells = [
                    f"{rate:g}: {one}" if not one.missing else "" for rate, one in zip(of_name, single, strict=True)
                ]
                if tuned.of_task:
                    title = (averages + of_bound).removeprefix(", ") or "none"
                    rows.append([name, title, tuned, *cells, *[""] * (columns - len(cells))])
    return table(["", "averages", "each with its best rate", *["one rate for all"] * columns], rows)


def by_own_damping(judge: Judge, dampings: Sequence[str], rates: Sequence[float], seeds: Sequence[int]) -> str:
    """Dampings of C-Adam: each task with its best rate, and one rate for all tasks; seeds that came later."""
    cases = [*(("c-adam", damping) for damping in dampings), ("adam", "")]
    rows = [
        [damping or "plain", *(judge.verdict(name, damping, rate, seeds) for rate in (None, *rates))]
        for name, damping in cases
    ]
    return table(["c-adam", "each with its best rate", *(f"{rate:g} for all" for rate in rates)], rows)


def in_pairs(judge: Judge, rates: Sequence[float], seeds: Sequence[int]) -> str:
    """C-Adam with ρ = 1 and with 0.1 and plain Adam, in pairs with the same task and seed."""
    plain, usual, more = ("adam", ""), ("c-adam", "relative 0.1"), ("c-adam", "relative 1")
    cases = ((more, plain, "final"), (more, usual, "final"), (usual, plain, "final"), (more, usual, "test"))
    rows = [
        [f"{rate:g}", *(judge.paired(upper, lower, rate, seeds, of) or "–" for upper, lower, of in cases)]
        for rate in rates
    ]
    heads = ["ρ = 1 ÷ Adam", "ρ = 1 ÷ ρ = 0.1", "ρ = 0.1 ÷ Adam", "test losses, ρ = 1 ÷ ρ = 0.1"]
    return table(["rate for all", *heads], rows)


def _of_kind(name: str) -> list[str]:
    return [other for other in WITH_MEMORY if other.split()[0] == name]


def seconds(judge: Judge) -> str:
    """Seconds for each run, medians."""
    rows = []
    for task in judge.scope.tasks:
        row = [task]
        for corrected in (False, True):
            found = [
                record["seconds"]
                for record in judge.results.records.values()
                if record["task"] == task
                and record["steps"] == judge.scope.steps
                and record["contestant"] in CONTESTANTS
                and CONTESTANTS[record["contestant"]].is_corrected == corrected
            ]
            row.append(f"{statistics.median(found):.2f}" if found else "–")
        rows.append(row)
    return table(["task", "plain", "C-"], rows)


def tables(scope: Scope, results: Results, rates: dict[str, float], damping: str) -> str:
    """The whole summary. Rates are searched without a bound, and what has tuned rates has none."""
    judge = Judge(scope, results)
    searched = unbounded(damping)
    seeds = ", ".join(map(str, scope.seeds))
    advised = ", ".join(f"{name} {rate:g}" for name, rate in rates.items())
    parts = [
        f"## Each task with its best rate, seeds {seeds}",
        "Final loss ÷ tuned plain: geometric mean ×/÷ noise of seeds (worst task).",
        by_damping(judge, None, scope.seeds),
        f"## One rate for all tasks ({advised}), seeds {seeds}",
        by_damping(judge, rates, scope.seeds),
        f"## One rate for all tasks, tuning seed {TUNING_SEED}\n\nGeometric mean (worst task; how many diverged).",
        *(by_rate(judge, name) for name in CONTESTANTS),
        f"## By task, {searched}, each with its best rate, seeds {seeds}\n\nFinal losses (÷ tuned plain).",
        by_task(judge, searched, None),
        f"## By task, {damping}, one rate for all tasks, seeds {seeds}\n\nFinal losses (÷ tuned plain).",
        by_task(judge, damping, rates),
        f"## Where C- versions lose to tuned plain, seeds {seeds}",
        behind(judge, damping, rates),
        f"## Learning rates, {searched}, tuning seed {TUNING_SEED}",
        learning_rates(judge, searched),
        f"## The bound, one rate for all tasks, {searched}, seeds {seeds}",
        with_each_bound(judge, rates, damping),
        f"## Ten times the best rate without a bound, {searched}, seeds {seeds}",
        under_stress(judge, damping),
        f"## How long Adam remembers squares (β₂), {searched}, seeds {seeds}",
        by_memory(judge, searched, (1e-3, 3e-3)),
        f"## Averages over batches, {damping}, seeds {seeds}",
        by_averages(judge, damping, {"c-adam": (1e-3, 3e-3), "c-sgd": (0.1,)}),
        f"## Dampings of C-Adam, seeds {', '.join(map(str, LATER_SEEDS))}",
        by_own_damping(judge, OWN_DAMPINGS, (1e-3, 3e-3), LATER_SEEDS),
        f"## The same, seeds {', '.join(map(str, NEXT_SEEDS))}",
        by_own_damping(judge, ("relative 0.1", "relative 1"), (1e-3, 3e-3), NEXT_SEEDS),
        f"## In pairs, seeds {', '.join(map(str, LAST_SEEDS))}",
        in_pairs(judge, (1e-3, 3e-3), LAST_SEEDS),
        "## Seconds for each run, medians",
        seconds(judge),
    ]
    return "\n\n".join(parts)
