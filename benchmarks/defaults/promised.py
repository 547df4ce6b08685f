"""Does a step that promises no more than the loss has need a learning rate that was searched for?

`python -m benchmarks.defaults.promised run --results runs/promised.jsonl`, then
`python -m benchmarks.defaults.promised judge --results runs/promised.jsonl`

C-SGD and C-Nesterov with their defaults, without `promise` and with `promise=1`, on the 16 tasks and on the four
residual networks of the study beside this one (`shortened.py`), at rates that go far beyond the advised ones; and plain
SGD whose steps are limited by the same rule, Polyak's, as a control. Seeds 0, 1 and 2. With seed 100 all this was
looked at before, in runs that are not kept; what follows was written down after those and before these:

- The *verdict* is that of the other studies: the geometric mean over tasks and seeds of the final loss divided by that
  of the better of plain SGD and Nesterov at the best rate of each task.
- **It is advised** to those who do not want to search for a rate, for C-SGD if the worst of its verdicts at 0.3, 1 and
  3 with `promise=1` is lower than that at 0.1 without, the advised rate, by more than both standard errors multiplied;
  for C-Nesterov likewise with 0.03, 0.1 and 0.3, and 0.03.
- On the residual networks a run is *bad* if it ends at twice the loss or more that the best rate without `promise` has.
  At the rate 1 (C-Nesterov: 0.1) with `promise=1` at most a quarter may be.
- If it does not pass in both parts for a contestant, the page says so, and it is not advised for it.
"""

import argparse
import json
import math
import multiprocessing
import os
import pathlib
import statistics
from collections import defaultdict
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, here and in the workers

import torch
from torch import Tensor, optim

from benchmarks.defaults import study, summary
from benchmarks.defaults.contestants import KNOWN
from benchmarks.defaults.residual import RESIDUAL
from benchmarks.defaults.shortened import ADVISED, ALL_TASKS, SEARCHED
from benchmarks.defaults.tasks import TASKS

RATES: dict[tuple[str, float | None], tuple[float, ...]] = {  # by contestant and promise
    ("c-sgd", None): (0.1, 0.3, 1.0),
    ("c-sgd", 1.0): (0.1, 0.3, 1.0, 3.0),
    ("c-nesterov", None): (0.01, 0.03, 0.1),
    ("c-nesterov", 1.0): (0.03, 0.1, 0.3),
    ("sgd", 1.0): (1.0,),
}
JUDGED = {"c-sgd": (0.3, 1.0, 3.0), "c-nesterov": (0.03, 0.1, 0.3)}
RESIDUAL_RATES = {"c-sgd": 1.0, "c-nesterov": 0.1}
BEST_RATES = {"c-sgd": (0.003, 0.01, 0.03), "c-nesterov": (0.001, 0.003)}  # more of them without, on residual networks
BAD, MOST_BAD = 2.0, 0.25

Record = dict[str, Any]
Key = tuple[str, str, float | None, float, int]  # task, contestant, promise, rate, seed


def wanted(seeds: tuple[int, ...] = study.SEEDS) -> list[Key]:
    """All runs."""
    keys: list[Key] = []
    for seed in seeds:
        for (name, promise), rates in RATES.items():
            keys += [(task, name, promise, rate, seed) for rate in rates for task in (*TASKS, *RESIDUAL)]
        keys += [
            (task, name, None, rate, seed) for name, its in BEST_RATES.items() for rate in its for task in RESIDUAL
        ]
    return keys


class LimitedSGD(optim.SGD):
    """Plain SGD whose steps promise no more than the loss has."""

    def limited_step(self, loss: float) -> None:
        """Take a step, shortened if need be."""
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        promised = self.param_groups[0]["lr"] * sum(float(grad.square().sum()) for grad in grads)
        if promised > loss:
            torch._foreach_mul_(grads, loss / promised)
        self.step()


def train(key: Key) -> Record:
    """The record of a run."""
    task_name, contestant, promise, rate, seed = key
    if contestant != "sgd":
        damping = "relative 0.1, bound 0.2" + ("" if promise is None else f", promise {promise:g}")
        run = study.Run(task_name, contestant, damping, rate, seed, 0)
        record = study.train(run, ALL_TASKS)
    else:
        record = _train_plain(key)
    return {name: record[name] for name in ("initial", "final", "floor", "test", "diverged", "counters")} | dict(
        zip(("task", "contestant", "promise", "rate", "seed"), key, strict=True)
    )


def _train_plain(key: Key) -> Record:
    task = ALL_TASKS[key[0]](key[4])
    optimizer = LimitedSGD(task.model.parameters(), lr=key[3])
    initial = study.measured(task, task.measure)
    assert initial is not None
    for step in range(1, task.steps + 1):
        optimizer.zero_grad()
        loss: Tensor = task.loss(*next(task.batches))
        loss.backward()
        optimizer.limited_step(loss.item())
        if task.after_step is not None:
            task.after_step(step)
    final = study.measured(task, task.measure)
    test = None if task.test is None else study.measured(task, task.test)
    diverged = final is None or final > 10 * initial
    return {"initial": initial, "final": final, "floor": task.floor, "test": test, "diverged": diverged, "counters": {}}


def key_of(record: Record) -> Key:
    """What identifies a run."""
    return record["task"], record["contestant"], record["promise"], record["rate"], record["seed"]


def records_in(path: pathlib.Path) -> dict[Key, Record]:
    """All runs of a file."""
    lines = [json.loads(line) for line in study.lines_of(path)]
    return {key_of(record): record for record in lines if "task" in record}


def run(path: pathlib.Path, workers: int) -> None:
    """Make the runs that are not there yet."""
    there = records_in(path)
    missing = [key for key in wanted() if key not in there]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file, multiprocessing.get_context("spawn").Pool(workers) as pool:
        file.write(json.dumps(study.provenance()) + "\n")
        for done, record in enumerate(pool.imap_unordered(train, missing), 1):
            file.write(json.dumps(record) + "\n")
            file.flush()
            if done % 50 == 0 or done == len(missing):
                print(f"{done} of {len(missing)}", flush=True)


# ---- what came out ----------------------------------------------------------------------------------------------


class Outcome:
    """The verdicts, and which runs on residual networks are bad."""

    def __init__(self, records: dict[Key, Record]) -> None:
        self.records = records
        searched = study.Results(SEARCHED)
        self._plain: dict[tuple[str, int], Record] = {}
        for task in TASKS:
            best = summary.tuned_plain(study.FULL, searched, task, KNOWN["c-sgd"].plain)
            assert best is not None
            for seed in study.SEEDS:
                self._plain[task, seed] = searched.records[study.Run(task, best[0], "", best[1], seed, 0)]

    def verdict(self, contestant: str, promise: float | None, rate: float) -> summary.Verdict:
        """Of a contestant at one rate for all tasks."""
        found = summary.Verdict()
        for task in TASKS:
            for seed in study.SEEDS:
                record = self.records.get((task, contestant, promise, rate, seed))
                if record is not None:
                    found.add(record, self._plain[task, seed])
        return found

    def bad(self, contestant: str, promise: float | None, rate: float) -> tuple[int, int]:
        """How many runs on residual networks are, and of how many."""
        ratios = []
        for task in RESIDUAL:
            for seed in study.SEEDS:
                rates = (*BEST_RATES[contestant], *RATES[contestant, None])
                losses = [_loss(self.records.get((task, contestant, None, one, seed))) for one in rates]
                ratios.append(_loss(self.records.get((task, contestant, promise, rate, seed))) / min(losses))
        return sum(not ratio < BAD for ratio in ratios), len(ratios)

    def passes(self, contestant: str) -> bool:
        """Whether it is advised."""
        before = self.verdict(contestant, None, ADVISED[contestant])
        worst = max(
            (self.verdict(contestant, 1.0, rate) for rate in JUDGED[contestant]), key=lambda verdict: verdict.mean
        )
        noise = (before.noise or math.inf) * (worst.noise or math.inf)
        bad, of = self.bad(contestant, 1.0, RESIDUAL_RATES[contestant])
        return worst.mean * noise < before.mean and bad <= MOST_BAD * of

    def table(self) -> str:
        """All of it."""
        rows = []
        for (name, promise), rates in RATES.items():
            for rate in rates:
                bad = "" if name == "sgd" else "{} of {}".format(*self.bad(name, promise, rate))
                limit = "" if promise is None else f"{promise:g}"
                share = self.share(name, promise, rate)
                rows.append([name, limit, f"{rate:g}", self.verdict(name, promise, rate), bad, share])
        heads = ["", "promise", "rate", "verdict", "bad on residual networks", "steps shortened by it"]
        return summary.table(heads, rows)

    def share(self, contestant: str, promise: float | None, rate: float) -> str:
        """Of all steps on the tasks, those that promised too much: the median over runs."""
        if promise is None or contestant == "sgd":
            return ""
        shares = []
        for task in TASKS:
            for seed in study.SEEDS:
                counters = defaultdict(int, self.records[task, contestant, promise, rate, seed]["counters"])
                shares.append(counters["promised"] / max(counters["steps"], 1))
        return f"{statistics.median(shares):.0%}"


def _loss(record: Record | None) -> float:
    return math.inf if record is None or record["final"] is None else max(record["final"], record["floor"])


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser("python -m benchmarks.defaults.promised", description=__doc__)
    parser.add_argument("stage", choices=("run", "judge"))
    parser.add_argument("--results", type=pathlib.Path, default=pathlib.Path("runs/promised.jsonl"))
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    if arguments.stage == "run":
        run(arguments.results, arguments.workers)
    else:
        outcome = Outcome(records_in(arguments.results))
        print(outcome.table())
        for contestant in JUDGED:
            print(f"{contestant}: {'advised' if outcome.passes(contestant) else 'not advised'}")


if __name__ == "__main__":
    main()
