"""What is shown of a contestant: seconds from its timing, curves of every seed."""

from dataclasses import replace

import pytest
from synthetic import contestant, kept, metric_lines

from consequent_lab.paper.kept_contestants import recipe_kept, seconds_of
from consequent_lab.paper.mlp import race
from consequent_lab.paper.race_finding import circumstances, search_figure, seconds_note
from consequent_lab.paper.rates import Chosen, Searched


def test_seconds_are_the_median_of_the_later_iterations():
    lines = metric_lines(10, batch_loss=[1.0] * 10)
    run = kept(lines)
    times = [5.0, 5.1, 5.2, 5.3, 9.3, 9.4, 9.5, 9.6, 9.7, 9.8]  # a slow start, a hiccup
    for line, seconds in zip(run.lines, times, strict=True):
        line["seconds"] = seconds
    assert seconds_of(run) == pytest.approx(0.01)


def test_seconds_are_those_timed_alone_or_else_the_runs_own_in_figures_only():
    run = kept(metric_lines(100, train_loss=[1.0, 0.5]))
    own, timed = contestant("SGD", run), contestant("C-SGD", run, seconds=0.5)
    assert own.curves("train_loss", "seconds") == []
    assert own.series(["train_loss"])[0].columns["seconds"] == [1.0, 2.0]
    assert timed.curves("train_loss", "seconds") == [[(50.0, 1.0), (100.0, 0.5)]]
    assert timed.series(["train_loss"])[0].columns["seconds"] == [50.0, 100.0]
    assert "the runs' own" in seconds_note([own])
    assert "eager, CPU" in seconds_note([timed])
    assert "of SGD the runs' own" in seconds_note([own, timed])
    assert "own" not in seconds_note([timed])


def test_the_search_figure_tells_of_extensions_and_abandoned_rates():
    plain = contestant("SGD")
    caption = search_figure("search", race(), {"panel": [plain]}).caption
    assert "extended" not in caption
    assert "failed" not in caption
    odd = replace(plain, search=Searched({-4: 1.0, -2: float("inf")}, (), True), choice=Chosen(-5, (-4,)))
    figure = search_figure("search", race(), {"panel": [odd]})
    assert "was extended, for sgd" in figure.caption
    assert "next lower rate was taken: sgd at 0.1" in figure.caption
    assert figure.panels[0].series[0].columns == {"rate": [0.1, 0.3], "loss": [1.0, None]}
    huge = replace(plain, search=Searched({-4: 1.0, -2: 1e30}, ()))
    figure = search_figure("search", race(), {"panel": [huge]})
    assert figure.panels[0].series[0].columns["loss"] == [1.0, None]
    assert "or ended with a loss above 10" in figure.caption


class Kept:
    def __init__(self, *names):
        self.names = names

    def variants(self, name):
        return ["one"] if name in self.names else []


@pytest.mark.parametrize(
    ("names", "expected"),
    [((), "mlp"), (("mlp-quick",), "mlp-quick"), (("mlp-quick", "mlp-search"), "mlp"), (("mlp", "mlp-quick"), "mlp")],
)
def test_the_full_experiment_comes_before_the_small_one(names, expected):
    assert recipe_kept(race, Kept(*names)).name == expected


def test_test_accuracy_seeds_and_search_are_beside_a_verdict():
    runs = [kept(metric_lines(100, test_accuracy=[0.5, last]), seed=seed) for seed, last in enumerate((0.6, 0.7))]
    text = circumstances(race(), [contestant("C-SGD", *runs), contestant("SGD", runs[0]), contestant("Adam")])
    assert text == (
        "Test accuracy in % at the end: C-SGD 65.0 (60.0–70.0), SGD 60.0. Seeds: 1 or 2. Search: 1 learning rates "
        "each, one seed, 2 epochs."
    )
    assert "at iteration 100: C-SGD 50.0" in circumstances(race(), [contestant("C-SGD", *runs)], at=100)
    assert circumstances(race(), [contestant("Adam")]) == ""
