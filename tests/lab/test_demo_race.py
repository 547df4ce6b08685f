"""The rules of the race: how a learning rate is chosen, and what the results are said to mean."""

import math

import pytest

from consequent_lab import demo_race as race
from consequent_lab.contestants import CONTESTANTS
from consequent_lab.demo_race import Result, Rules, Run, Trial
from consequent_lab.summary import Spread, summarise, verdicts
from consequent_lab.training import Point

SGD, C_SGD = CONTESTANTS[:2]
RULES = Rules((0.01, 0.1, 1.0, 10.0), 8, 0.1, 0.01, search_seeds=(7, 8), seeds=(0,), evaluations_per_epoch=1)


def curve(*losses):
    return [Point(float(epoch), 0.5 * epoch, loss) for epoch, loss in enumerate(losses)]


@pytest.fixture
def scripted(monkeypatch):
    """Lets trainings follow written curves, one for each learning rate (and seed)."""

    def script(curves):
        def training(contestant, rules, rate, seed):
            return None, iter(curve(*(curves.get((rate, seed)) or curves[rate])))

        monkeypatch.setattr(race, "_training", training)

    return script


def chosen(rules=RULES):
    reports = []
    trials = race.search(reports.append, SGD, rules)
    assert sum(report.epochs for report in reports) == pytest.approx(rules.epochs)
    return race.best(trials).learning_rate, {trial.learning_rate: trial for trial in trials}


def test_search_takes_the_rate_that_arrives_first(scripted):
    scripted(
        {
            0.01: [2, 1.9, 1.8],
            0.1: [2, 0.9, 0.6, 0.5, 0.4, 0.05],
            1.0: [2, 1.0, 0.5, 0.4, 0.05],
            10.0: [2, math.nan],
        }
    )
    rate, trials = chosen()
    assert rate == 1.0
    assert trials[1.0].epochs_to_target == 4
    assert trials[0.1].epochs_to_target == math.inf
    assert trials[0.01].epochs == 1, "the worse half is dropped after the first epoch"
    assert trials[10.0].loss == math.inf


def test_search_waits_for_its_slowest_seed(scripted):
    scripted(
        {
            0.01: [2, 2],
            0.1: [2, 0.5, 0.4, 0.3, 0.2, 0.05],
            (1.0, 7): [2, 0.4, 0.05, 0.05, 0.05, 0.05],
            (1.0, 8): [2, 0.4, 0.3, 0.3, 0.3, 0.3],
            10.0: [2, 1e9],
        }
    )
    rules = Rules((0.01, 0.1, 1.0, 10.0), 8, 0.1, 0.01, (7, 8), (0,), halve_after=(1,), evaluations_per_epoch=1)
    assert chosen(rules)[0] == 0.1


def test_search_without_arrival_takes_the_lowest_loss_of_the_last_round(scripted):
    slow = [2, 1, 0.9, 0.8, 0.8, 0.8, 0.8, 0.8, 0.8]
    scripted({0.01: [2, 1.9], 0.1: slow, 1.0: [2, 0.9, 0.9, 0.7, 0.7, 0.7, 0.7, 0.7, 0.7], 10.0: [2, math.inf]})
    assert chosen()[0] == 1.0


def test_search_survives_that_every_rate_diverges(scripted):
    scripted({rate: [2, math.nan] for rate in RULES.learning_rates})
    assert chosen()[0] == 0.01


def test_a_finalist_that_diverges_is_not_chosen():
    trials = (Trial(0.1, 3.0, math.inf, 0.5), Trial(1.0, 7.0, math.inf, math.inf))
    assert race.best(trials).learning_rate == 0.1


def result(contestant, *curves):
    runs = tuple(Run(seed, tuple(curve(*losses)), 0.9) for seed, losses in enumerate(curves))
    trials = tuple(Trial(rate, 1.0, math.inf, 1.0) for rate in (0.01, 0.1, 1.0))
    return summarise(Result(contestant, 0.1, trials, runs), target_loss=0.1)


def test_summary_takes_the_first_crossing_and_the_median():
    summary = result(SGD, [2, 0.05, 0.5, 0.01], [2, 1, 0.1], [2, 1, 1, 0.05])
    assert summary.epochs == Spread(1.0, 2.0, 3.0)
    assert summary.seconds == Spread(0.5, 1.0, 1.5)
    assert summary.milliseconds_per_epoch == 500
    assert not summary.at_edge


@pytest.mark.parametrize(
    ("plain", "corrected", "said"),
    [
        (
            [2, 1, 1, 1, 0.1],
            [2, 1, 0.1],
            "2.0 against 4.0 epochs, 2.0 times fewer; 1.00 against 2.00 s, 2.0 times less",
        ),
        (
            [2, 1, 0.1],
            [2, 1, 1, 0.1],
            "3.0 against 2.0 epochs, 1.5 times more; 1.50 against 1.00 s, 1.5 times more time",
        ),
        ([2, 1, 0.1], [2, 1, 0.1], "2.0 against 2.0 epochs, a draw; 1.00 against 1.00 s, a draw."),
        ([2, 1, 1], [2, 1, 0.1], "C-SGD wins; SGD does not reach 0.1 in this budget"),
        ([2, 0.1], [2, math.nan], "SGD wins; C-SGD does not reach 0.1 in this budget"),
        ([2, 1, 1], [2, 1, 1], "neither reaches a training loss of 0.1"),
    ],
)
def test_verdict_says_who_wins_and_by_how_much(plain, corrected, said):
    assert said in verdicts([result(SGD, plain), result(C_SGD, corrected)], target_loss=0.1)[0]


def test_verdict_admits_that_seeds_overlap():
    plain, corrected = result(SGD, [2, 0.1], [2, 1, 1, 0.1]), result(C_SGD, [2, 1, 0.1], [2, 1, 0.1])
    assert "though the seeds overlap" in verdicts([plain, corrected], target_loss=0.1)[0]
