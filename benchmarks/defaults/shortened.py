"""Can it be told from the steps that the bound shortens that a learning rate is too high?

    export OMP_NUM_THREADS=1 PYTHONPATH=src
    python -m benchmarks.defaults.shortened run --seeds 0 1    # about half an hour on one core
    python -m benchmarks.defaults.shortened judge

A user took C-SGD at the advised rate for a network with five residual blocks. It ended six times worse than plain SGD,
and with a third of the rate twenty times better. The bound had shortened 17 % of the updates, which is counted, but who
looks at a counter? Should there be a warning?

Each run is a line of JSON in ``--results`` (default: runs/shortened.jsonl), with the layers that were shortened at each
step. A run whose line is there is not repeated. The runs that were made are kept in results/shortened.jsonl.gz.

Fixed before any of these runs (but not before the user's own were known, nor before trial runs of the residual networks
below, C-SGD alone, in which a run at 0.1 ended 17 times worse than at 0.03 with 0.3 % of its updates shortened):

* Runs: C-SGD, C-Momentum and C-Nesterov with the defaults, ρ = 0.1 and a bound of 0.2, on the 16 tasks. Rates are those
  of a ladder 0.001, 0.003, 0.01, …: the best one of the search without a bound, one place below it, one and two above,
  and the one that the README advises. Two seeds. For the residual networks, which were not searched, five rates.
* The *best* run is the one with the lowest final loss of those that differ in their rate alone. A run is *good* if its
  final loss is at most 1.2 times that, and *bad* if its rate is higher and its loss at least twice that, or if it
  diverged. Others are neither. (In classification a loss below 0.002 counts as 0.002.)
* Rules: after the first F steps (0, 50, 100) windows of K steps (20, 50, 100) are looked at one after the other. There
  is an alarm where in one of them the share of updates that were shortened (layers × steps) is above s (from 0.5 % to
  90 %). Beside that, the same with the share of the layer that is shortened most; it has to be counted by layer,
  which costs more, and is taken only if it finds at least a tenth more of the bad runs.
* Choice, on every other task of the list: of the rules with an alarm in at most 5 % of the good runs, the one with
  alarms in most of the bad ones; then the one with fewer alarms in good ones, the higher s, the larger K, the larger F.
* Check, on the other tasks: at most 5 % of the good runs and at least half of the bad ones. Otherwise there will be no
  warning. The residual networks are looked at apart: they are what the question came from.
* Told as well: alarms at rates below the best one, where the advice to take a lower rate would be wrong; and how many
  of the runs with an alarm did better with the next lower rate that was run.

What came out is in docs/defaults.md: none of the rules passes, and there is no warning. After the runs it was seen that
the number of layers had been noted too low on six tasks (some layers say only where they are too long that they are
bounded); these were run again, with the same losses. That a lower rate may also do much worse, and the last table, were
thought of when the rules had failed.
"""

import argparse
import contextlib
import functools
import itertools
import json
import os
import pathlib
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import torch
from torch import Tensor, nn

import consequent
from benchmarks.defaults import study
from benchmarks.defaults.contestants import KNOWN
from benchmarks.defaults.residual import RESIDUAL
from benchmarks.defaults.tasks import TASKS
from consequent.engines import step as engine
from consequent.engines.bounding import Bounded
from consequent.reports.errors import StandstillError

SEARCHED = pathlib.Path(__file__).parents[2] / "results" / "defaults.jsonl.gz"
DAMPING = "relative 0.1"
LADDER = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
ADVISED = {"c-sgd": 0.1, "c-momentum": 0.03, "c-nesterov": 0.03}  # by the README
RESIDUAL_RATES = {"c-sgd": (0.003, 0.01, 0.03, 0.1, 0.3)} | dict.fromkeys(
    ("c-momentum", "c-nesterov"), (0.001, 0.003, 0.01, 0.03, 0.1)
)

FIRST = (0, 50, 100)  # F
WINDOWS = (20, 50, 100)  # K
SHARES = (0.005, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7, 0.9)  # s
GOOD, BAD = 1.2, 2.0  # times the best final loss
EDGES = (-1.0, 0.0, 0.01, 0.1, 0.3, 1.0)  # of the share in a whole run
MOST_FALSE, FEWEST_FOUND, WORTH_COUNTING_LAYERS = 0.05, 0.5, 0.1

Record = dict[str, Any]


ALL_TASKS = TASKS | RESIDUAL
CHOOSING, CHECKING = tuple(TASKS)[::2], tuple(TASKS)[1::2]


# ---- runs -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def noting_shortened(model: nn.Module, noted: list[set[int]]) -> Iterator[set[int]]:
    """Add to ``noted`` for each step the weights that were shortened, by number; gives those that could have been."""
    numbers = {id(parameter): number for number, parameter in enumerate(model.parameters())}
    solved: set[int] = set()
    shorten, solutions_of = engine.shorten, engine.Rewriter._solutions_of

    def noting_all(rewriter: engine.Rewriter, records: list[engine.Record], *args: Any, **options: Any) -> Any:
        solved.update(numbers[id(record.weight)] for record in records)
        return solutions_of(rewriter, records, *args, **options)

    def noting(cases: Sequence[Bounded]) -> list[int | Tensor]:
        before = [case.solution.scale for case in cases]
        counts = shorten(cases)
        changed = [case for case, scale in zip(cases, before, strict=True) if case.solution.scale != scale]
        noted.append({numbers[id(case.solution.record.weight)] for case in changed})
        return counts

    with mock.patch.object(engine, "shorten", noting), mock.patch.object(engine.Rewriter, "_solutions_of", noting_all):
        yield solved


def train(task_name: str, contestant: str, rate: float, seed: int) -> Record:
    """The record of a run, with the layers that were shortened at each step as bits of a hexadecimal number."""
    torch.set_num_threads(1)
    task = ALL_TASKS[task_name](seed)
    optimizer = KNOWN[contestant].optimiser(task.model, rate)
    correction = consequent.attach(optimizer, task.model, loss_reduction=task.loss_reduction)
    started = time.process_time()
    initial = study.measured(task, task.measure)
    assert initial is not None
    noted: list[set[int]] = []
    with warnings.catch_warnings(), noting_shortened(task.model, noted) as solved:
        warnings.simplefilter("ignore", consequent.ConsequentWarning)
        for step in range(1, task.steps + 1):
            optimizer.zero_grad()
            task.loss(*next(task.batches)).backward()
            with contextlib.suppress(StandstillError):
                optimizer.step()
            if task.after_step is not None:
                task.after_step(step)
    final = study.measured(task, task.measure)
    layers = sorted(solved)
    counters = correction.counters
    if not counters.skipped:
        assert counters.bounded == sum(map(len, noted))
    return {
        "task": task_name,
        "contestant": contestant,
        "rate": rate,
        "seed": seed,
        "initial": initial,
        "final": final,
        "floor": task.floor,
        "test": None if task.test is None else study.measured(task, task.test),
        "diverged": final is None or final > 10 * initial,
        "skipped": counters.skipped,
        "layers": len(layers),
        "shortened": " ".join(f"{sum(1 << layers.index(number) for number in step):x}" for step in noted),
        "seconds": round(time.process_time() - started, 2),
    }


def rates_of(searched: study.Results, task: str, contestant: str) -> list[float]:
    """The rates that are run."""
    if task in RESIDUAL:
        return list(RESIDUAL_RATES[contestant])
    best = searched.best_rate(study.FULL, task, contestant, DAMPING) or LADDER[0]
    place = LADDER.index(best)
    return sorted({*LADDER[max(place - 1, 0) : place + 3], ADVISED[contestant]})


def key_of(record: Record) -> tuple[Any, ...]:
    return tuple(record[name] for name in ("task", "contestant", "rate", "seed"))


def run(path: pathlib.Path, seeds: Sequence[int]) -> None:
    """Make the runs that are not there yet."""
    searched, results = study.Results(SEARCHED), Records(path)
    missing = [
        (task, contestant, rate, seed)
        for seed in seeds
        for task in (*RESIDUAL, *TASKS)
        for contestant in ADVISED
        for rate in rates_of(searched, task, contestant)
        if (task, contestant, rate, seed) not in results.records
    ]
    started = time.perf_counter()
    results.append({"command": f"run {' '.join(map(str, seeds))}"} | study.provenance())
    for done, wanted in enumerate(missing, 1):
        results.append(train(*wanted))
        if done % 20 == 0 or done == len(missing):
            print(f"{done} of {len(missing)} after {time.perf_counter() - started:.0f} s", flush=True)


class Records:
    """Lines of JSON in a file, by what was run."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        found = [json.loads(line) for line in study.lines_of(path)]
        self.records = {key_of(record): record for record in found if "task" in record}

    def append(self, record: Record) -> None:
        """Write one more."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        if "task" in record:
            self.records[key_of(record)] = record


# ---- the verdict ------------------------------------------------------------------------------------------------


class Rule(NamedTuple):
    """An alarm where in a window of K steps, after the first F, more than this share was shortened."""

    share: float
    window: int
    first: int
    of_layer: bool  # the layer that is shortened most, instead of all updates

    def __str__(self) -> str:
        what = "of a layer's updates" if self.of_layer else "of all updates"
        return f"more than {self.share:.1%} {what} in {self.window} steps, after the first {self.first}"


RULES = [Rule(*numbers) for numbers in itertools.product(SHARES, WINDOWS, FIRST, (False, True))]


@functools.cache
def bits_of(shortened: str, layers: int) -> Tensor:
    """Whether a layer was shortened at a step, ``[steps, layers]``."""
    masks = torch.tensor([int(mask, 16) for mask in shortened.split()])
    return masks[:, None] >> torch.arange(layers) & 1


def whole_share(record: Record) -> float:
    """The share of updates that were shortened in the whole run."""
    bits = bits_of(record["shortened"], record["layers"])
    return int(bits.sum()) / bits.numel()


@functools.cache
def _highest(shortened: str, layers: int, window: int, first: int, of_layer: bool) -> float:
    bits = bits_of(shortened, layers)[first:]
    counts = bits[: len(bits) // window * window].view(-1, window, layers).sum(1)  # [windows, layers]
    if not len(counts):
        return 0.0
    return int(counts.max()) / window if of_layer else int(counts.sum(1).max()) / (window * layers)


def highest_share(record: Record, window: int, first: int, *, of_layer: bool) -> float:
    """Of all windows the highest share of updates that were shortened, or of the layer that was shortened most."""
    return _highest(record["shortened"], record["layers"], window, first, of_layer)


class Judged(NamedTuple):
    """A run, and how it ended beside those that differ in their rate alone."""

    record: Record
    ratio: float  # to the best final loss
    is_above: bool  # whether its rate is higher than the best one
    is_below: bool
    next_below: float | None  # the final loss at the next lower rate, divided by its own; None if there is none

    @property
    def is_good(self) -> bool:
        """Whether an alarm would be false."""
        return self.ratio <= GOOD

    @property
    def is_bad(self) -> bool:
        """Whether there should be an alarm."""
        return self.is_above and self.ratio >= BAD


def judged(records: Sequence[Record]) -> list[Judged]:
    """All runs, each beside its like."""
    found = []
    alike: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        alike.setdefault((record["task"], record["contestant"], record["seed"]), []).append(record)
    for group in alike.values():
        group.sort(key=lambda record: record["rate"])
        losses = [float("inf") if one["diverged"] else max(one["final"], one["floor"]) for one in group]
        best = losses.index(min(losses))
        for number, (record, loss) in enumerate(zip(group, losses, strict=True)):
            next_below = None if number == 0 else losses[number - 1] / loss
            found.append(Judged(record, loss / losses[best], number > best, number < best, next_below))
    return found


class Verdict(NamedTuple):
    """How many runs of each kind there are, and in how many there is an alarm."""

    rule: Rule
    good: int
    false: int
    bad: int
    found: int
    below: int
    misled: int
    alarms: int
    helped: int
    harmed: int

    @property
    def false_share(self) -> float:
        """Of the good runs."""
        return self.false / max(self.good, 1)

    @property
    def found_share(self) -> float:
        """Of the bad runs."""
        return self.found / max(self.bad, 1)

    def __str__(self) -> str:
        return (
            f"{self.rule}: alarms in {self.false} of {self.good} good runs ({self.false_share:.0%}), in {self.found} "
            f"of {self.bad} bad ones ({self.found_share:.0%}), in {self.misled} of {self.below} below the best rate; "
            f"of {self.alarms} runs with an alarm the next lower rate was better for {self.helped}, "
            f"and for {self.harmed} worse by more than {GOOD:g}"
        )


def verdict(rule: Rule, runs: Sequence[Judged]) -> Verdict:
    """Of a rule on these runs."""
    alarms = [
        one for one in runs if highest_share(one.record, rule.window, rule.first, of_layer=rule.of_layer) > rule.share
    ]
    return Verdict(
        rule,
        sum(one.is_good for one in runs),
        sum(one.is_good for one in alarms),
        sum(one.is_bad for one in runs),
        sum(one.is_bad for one in alarms),
        sum(one.is_below for one in runs),
        sum(one.is_below for one in alarms),
        len(alarms),
        sum(one.next_below is not None and one.next_below < 1 for one in alarms),
        sum(one.next_below is not None and one.next_below > GOOD for one in alarms),
    )


def chosen(verdicts: Sequence[Verdict]) -> Verdict | None:
    """The rule that finds most of the bad runs, of those with few enough false alarms."""
    allowed = [one for one in verdicts if one.false_share <= MOST_FALSE]
    of_all, of_layer = ([one for one in allowed if one.rule.of_layer is kind] for kind in (False, True))

    def order(one: Verdict) -> tuple[float, ...]:
        return one.found, -one.false, one.rule.share, one.rule.window, one.rule.first

    best, other = max(of_all, key=order, default=None), max(of_layer, key=order, default=None)
    if best is None or other is None:
        return best or other
    return other if other.found_share >= best.found_share + WORTH_COUNTING_LAYERS else best


class Band(NamedTuple):
    """Runs with a share of shortened updates from ``low``, which does not belong to it, to ``high``."""

    kind: str
    low: float
    high: float
    runs: int
    good: int
    bad: int
    with_lower: int  # of which the next lower rate was run, too
    lower_is_better: int
    lower_is_worse: int  # by more than 1.2


class Study:
    """The runs in their parts."""

    def __init__(self, path: pathlib.Path) -> None:
        self.runs = judged(list(Records(path).records.values()))
        parts = {"choosing": CHOOSING, "checking": CHECKING, "residual": tuple(RESIDUAL)}
        self.parts = {part: [one for one in self.runs if one.record["task"] in parts[part]] for part in parts}

    def verdicts(self, rule: Rule) -> dict[str, Verdict]:
        """Of a rule, on each part."""
        return {part: verdict(rule, runs) for part, runs in self.parts.items()}

    def choice(self) -> Verdict | None:
        """The rule that is chosen, and its verdict where it was."""
        return chosen([verdict(rule, self.parts["choosing"]) for rule in RULES])

    def bands(self) -> Iterator[Band]:
        """All runs by the share of updates that were shortened in the whole run."""
        kinds = {"tasks": [*self.parts["choosing"], *self.parts["checking"]], "residual": self.parts["residual"]}
        for (kind, runs), (low, high) in itertools.product(kinds.items(), itertools.pairwise(EDGES)):
            its = [one for one in runs if low < whole_share(one.record) <= high]
            below = [one.next_below for one in its if one.next_below is not None]
            yield Band(
                kind,
                max(low, 0),
                high,
                len(its),
                sum(one.is_good for one in its),
                sum(one.is_bad for one in its),
                len(below),
                sum(ratio < 1 for ratio in below),
                sum(ratio > GOOD for ratio in below),
            )


def judge(path: pathlib.Path) -> None:
    """Choose a rule, check it, and show others."""
    runs = Study(path)
    choice = runs.choice()
    if choice is None:
        print("No rule has few enough false alarms.")
        return
    print("The rule that was chosen:\n")
    for part, its in runs.verdicts(choice.rule).items():
        print(f"- {part}: {its}")
    checked = runs.verdicts(choice.rule)["checking"]
    print(f"\nIt {'passed' if passes(checked) else 'failed'}. Rules that would pass:\n")
    for part, its in runs.parts.items():
        print(f"- {part}: {sum(passes(verdict(rule, its)) for rule in RULES)} of {len(RULES)}")
    print("\nOther shares; alarms in good runs, bad runs:\n")
    for rule in (choice.rule._replace(share=share) for share in SHARES):
        cells = [
            f"{part} {its.false} of {its.good}, {its.found} of {its.bad}" for part, its in runs.verdicts(rule).items()
        ]
        print(f"- {rule}: {'; '.join(cells)}")
    print("\nRuns by the share of updates that were shortened in all their steps (looked at afterwards):\n")
    print(
        "| runs on | shortened | runs | good | bad | next lower rate better | worse by more than 1.2 |\n"
        + "|---" * 7
        + "|"
    )
    for band in runs.bands():
        lower = [f"{count} of {band.with_lower}" for count in (band.lower_is_better, band.lower_is_worse)]
        share = f"to {band.high:.0%}" if band.high else "none"
        print(f"| {band.kind} | {share} | {band.runs} | {band.good} | {band.bad} | {' | '.join(lower)} |")


def passes(of_rule: Verdict) -> bool:
    """Whether a rule is good enough to warn by it."""
    return of_rule.false_share <= MOST_FALSE and of_rule.found_share >= FEWEST_FOUND


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=("run", "judge"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--results", type=pathlib.Path, default=pathlib.Path("runs/shortened.jsonl"))
    arguments = parser.parse_args()
    if arguments.stage == "run":
        run(arguments.results, arguments.seeds)
    else:
        judge(arguments.results)


if __name__ == "__main__":
    main()
