"""Whether the search of the paper's perceptrons would have chosen other learning rates with three seeds.

The search has one seed, 100. Rates whose loss is within 1 % of the best one's are run with seeds 101 and 102 as well,
and the lowest mean of the three is what three seeds would choose.

    python benchmarks/search_seeds.py DATA 'cifar10-*' 'fashion-mnist-*' >> results/search-seeds.jsonl
    python benchmarks/search_seeds.py --table results/search-seeds.jsonl

What is in the file that is written to is not run again if it is named by `--known`.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from consequent_lab.paper import mlp
from consequent_lab.paper.archive import Archive
from consequent_lab.paper.rates import rate_at
from consequent_lab.paper.recipes import Contestant, matches
from consequent_lab.runs import RunFolder
from consequent_lab.trainer import train

NEAR = 1.01  # times the best loss
SEEDS = (101, 102)
RESULTS = Path(__file__).parents[1] / "results" / "paper"

Line = dict[str, Any]


def near_the_best(contestant: Contestant) -> dict[int, float]:
    """Returns the losses of the rates that are near the best on the search's own seed, by rung."""
    found = mlp.race().searched(contestant, Archive(RESULTS))
    best = found.losses[found.best] if found.best is not None else 0.0
    return {rung: loss for rung, loss in sorted(found.losses.items()) if loss <= NEAR * best}


def loss_of(contestant: Contestant, rung: int, seed: int, data: Path) -> float | None:
    """Returns the mean loss over the last epoch of a search run; None if it diverged."""
    config = replace(mlp.race().search.config(contestant.config, rung), seed=seed)
    with tempfile.TemporaryDirectory() as folder:
        train(config, RunFolder(Path(folder) / "run"), data=data)
        outcome = RunFolder(Path(folder) / "run").outcome()
        last = json.loads((Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    return float(last["epoch_loss"]) if outcome is not None and outcome["outcome"] == "finished" else None


def choices(lines: list[Line]) -> Iterator[tuple[str, dict[float, float], float, float]]:
    """Yields contestants whose rates were all run, their mean losses by rate, and the choices of one and of three."""
    for contestant in mlp.race().contestants:
        first = near_the_best(contestant)
        mine = [line for line in lines if line["variant"] == contestant.variant]
        means = {}
        for rung, loss in first.items():
            others = [line["loss"] for line in mine if line["rate"] == rate_at(rung)]
            if len(others) == len(SEEDS) and None not in others:
                means[rate_at(rung)] = fmean([loss, *others])
        if len(means) == len(first) > 1:
            yield (
                contestant.variant,
                means,
                rate_at(min(first, key=lambda rung: first[rung])),
                min(means, key=lambda rate: means[rate]),
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, nargs="?")
    parser.add_argument("variants", nargs="*", default=["*"])
    parser.add_argument("--known", type=Path)
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    known = options.table or options.known
    lines = [json.loads(line) for line in known.read_text().splitlines()] if known and known.exists() else []
    if options.table:
        for variant, means, one, three in choices(lines):
            shown = ", ".join(f"{rate:g}: {loss:.4f}" for rate, loss in means.items())
            print(
                f"{variant}: {shown}; one seed {one:g}, three {three:g}, {100 * (means[one] / means[three] - 1):.2f} %"
            )
        return
    torch.set_num_threads(1)
    done = {(line["variant"], line["rate"], line["seed"]) for line in lines}
    for contestant in mlp.race().contestants:
        rungs = near_the_best(contestant)
        if len(rungs) < 2 or not matches(contestant.variant, options.variants):
            continue
        for seed in SEEDS:
            for rung in rungs:
                key = (contestant.variant, rate_at(rung), seed)
                if key not in done:
                    loss = loss_of(contestant, rung, seed, options.data)
                    print(json.dumps(dict(zip(("variant", "rate", "seed"), key, strict=True)) | {"loss": loss}))
                    sys.stdout.flush()


if __name__ == "__main__":
    main()
