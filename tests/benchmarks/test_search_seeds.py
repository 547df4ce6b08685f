"""What docs/paper.md says of the search with three seeds is in results/."""

import json
import pathlib

from benchmarks.search_seeds import SEEDS, choices, near_the_best
from consequent_lab.paper import mlp
from consequent_lab.paper.rates import rate_at

ROOT = pathlib.Path(__file__).parents[2]
LINES = [json.loads(line) for line in (ROOT / "results" / "search-seeds.jsonl").read_text().splitlines()]
RUN = [one for one in mlp.race().contestants if not one.variant.startswith("cifar100")]


def test_three_seeds_choose_the_rates_of_one():
    found = list(choices(LINES))
    alone = [one.variant for one in RUN if len(near_the_best(one)) == 1]
    assert {variant for variant, *_ in found} | {*alone} == {one.variant for one in RUN}
    assert (len(found), len(alone)) == (6, 2)
    assert all(one == three for *_, one, three in found)
    text = " ".join((ROOT / "docs" / "paper.md").read_text().split())
    assert "the mean of three chooses the same rate for all eight (two have no other so near)" in text


def test_another_rate_is_chosen_where_its_mean_is_lower():
    (first, *_), *_ = choices(LINES)
    contestant = next(one for one in RUN if one.variant == first)
    near = near_the_best(contestant)
    worst = max(near, key=lambda rung: near[rung])
    lines = [
        {"variant": first, "rate": rate_at(rung), "seed": seed, "loss": 0.1 if rung == worst else loss}
        for rung, loss in near.items()
        for seed in SEEDS
    ]
    ((variant, _, one, three),) = choices(lines)
    assert (variant, three) == (first, rate_at(worst))
    assert one != three
    assert not list(choices(lines[1:])), "a rate that was not run with all seeds"
