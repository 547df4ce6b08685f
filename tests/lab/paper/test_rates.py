"""The search for learning rates is derived from the runs that are kept, and from nothing else."""

import math
from itertools import pairwise

import pytest
from synthetic import kept, metric_lines

from consequent_lab.paper.rates import Search, chosen, failed, rate_at, score, searched, variant_at
from consequent_lab.paper.recipes import Contestant, Race
from consequent_lab.train_config import TrainConfig

SEARCH = Search(epochs=2, lowest=-8, highest=-4, extensions=1)  # 0.01, 0.03, 0.1


class Runs:
    """An archive in memory: losses of search runs by rung, and full runs by rung."""

    def __init__(self, losses, full=None):
        self.losses, self.full = losses, full or {}

    def run(self, recipe, variant, seed):
        if recipe == "race":
            return next((run for run in self.runs(recipe, variant) if run.seed == seed), None)
        rung = next((rung for rung in self.losses if variant_at("c-sgd", rung) == variant), None)
        return None if rung is None or recipe != "race-search" else one(self.losses[rung])

    def runs(self, recipe, variant):
        return next((runs for rung, runs in self.full.items() if variant_at("c-sgd", rung) == variant), [])


def one(loss, seed=0):
    """A run that ended at this loss."""
    lines = metric_lines(10, epoch_loss=[2.3, loss if math.isfinite(loss) else None])
    return kept(lines, seed=seed, outcome="finished" if math.isfinite(loss) else "diverged")


def found(losses):
    return searched(SEARCH, "race", "c-sgd", Runs(losses))


def test_the_grid_is_tried_then_the_half_way_rates():
    assert found({}).missing == (-8, -6, -4)
    assert found({-8: 1.0, -4: math.inf}).missing == (-6,)
    grid = {-8: 1.0, -6: 0.5, -4: math.inf}
    assert found(grid).missing == (-7, -5)
    done = found(grid | {-7: 0.7, -5: 0.4})
    assert (done.missing, done.best, done.extended) == ((), -5, False)


def test_a_best_rate_at_the_edge_extends_the_grid_and_not_forever():
    grid = {-8: 1.0, -6: 2.0, -4: math.inf}
    assert found(grid).missing == (-10,)
    assert found(grid | {-10: 0.5}).missing == (-11, -9)
    assert found(grid | {-10: 0.5, -11: 0.6, -9: 0.6}).extended
    assert found({-8: 3.0, -6: 2.0, -4: 1.0}).missing == (-2,)


def test_rates_that_all_diverge_extend_the_grid_downwards_and_give_no_choice():
    grid = dict.fromkeys((-8, -6, -4), math.inf)
    assert found(grid).missing == (-10,)
    done = found(grid | {-10: math.inf})
    assert (done.missing, done.best) == ((), None)
    assert chosen(done, "race", "c-sgd", Runs({})) is None


def test_a_full_run_that_fails_leads_to_the_next_lower_rate():
    losses = {-8: 1.0, -6: 0.5, -4: 0.9, -7: 0.7, -5: 0.6}
    search = found(losses)
    assert chosen(search, "race", "c-sgd", Runs(losses)).rung == -6
    choice = chosen(search, "race", "c-sgd", Runs(losses, {-6: [one(0.1), one(math.inf, seed=1)]}))
    assert (choice.rung, choice.abandoned, choice.all_failed) == (-7, (-6,), False)
    full = {rung: [one(math.inf)] for rung in (-6, -7, -8)}
    choice = chosen(search, "race", "c-sgd", Runs(losses, full))
    assert (choice.rung, choice.abandoned, choice.all_failed) == (-6, (-6, -7, -8), True)


@pytest.mark.parametrize(("loss", "expected"), [(2.2, False), (2.303, True), (math.inf, True)])
def test_a_run_that_only_guesses_has_failed(loss, expected):
    assert failed(one(loss)) == expected
    assert score(one(loss)) == loss


def test_the_ladder_has_four_rates_to_a_decade():
    rates = [rate_at(rung) for rung in range(-16, 5)]
    ratios = [after / before for before, after in pairwise(rates)]
    assert min(ratios) > 1.65
    assert max(ratios) < 1.9


def test_jobs_open_step_by_step():
    contestant = Contestant("c-sgd", "C-SGD", TrainConfig(epochs=3), seeds=(0, 1), headline=True)
    race = Race("race", (contestant,), SEARCH, timed_iterations=40)
    losses = {-8: 1.0, -6: 0.5, -4: 0.9, -7: 0.7, -5: 0.6}
    names = [job.name for job in race.jobs(Runs({}), ("search", "train"))]
    assert names == [f"race-search/c-sgd-lr{rate}/seed100" for rate in ("0.01", "0.03", "0.1")]
    jobs = race.jobs(Runs(losses), ("search", "train", "timing"))
    assert [job.name for job in jobs] == [
        "race/c-sgd-lr0.03/seed0",
        "race/c-sgd-lr0.03/seed1",
        "race-timing/c-sgd/seed100",
    ]
    assert [job.alone for job in jobs] == [False, False, True]
    assert jobs[0].config.lr == 0.03
    half = Runs(losses, {-6: [one(0.1)]})
    assert [job.name for job in race.jobs(half, ("search", "train"))] == ["race/c-sgd-lr0.03/seed1"]


def test_contestants_that_do_the_same_work_are_timed_once():
    one = Contestant("unit", "C-SGD", TrainConfig())
    same = Contestant("features", "C-SGD", TrainConfig(normalisation="features"), timed_with="unit")
    race = Race("race", (one, same), SEARCH, timed_iterations=40)
    assert [job.name for job in race.jobs(Runs({}), ("timing",))] == ["race-timing/unit/seed100"]
    assert same.timing_variant == "unit"
