"""Runs that were never run: written by hand to see what the verdicts make of them."""

from dataclasses import replace

from consequent_lab.kept_runs import TrainedRun
from consequent_lab.paper.kept_contestants import KeptContestant
from consequent_lab.paper.rates import Chosen, Searched
from consequent_lab.train_config import TrainConfig

START = {"graph": False, "device": {"name": "CPU"}}


def kept(lines, variant="c-sgd", seed=0, outcome="finished", config=None, recipe="recipe"):
    """A run with these lines; each gets what is missing to be one."""
    full = [{"iteration": place, "epoch": place / 10, "seconds": place / 100, **line} for place, line in lines]
    config = replace(config or TrainConfig(), seed=seed)
    last = lines[-1][0]
    ended = {"outcome": outcome, "iteration": last, "seconds": last / 100}
    return TrainedRun(recipe, variant, seed, ended, full, config, [START])


def metric_lines(every, **metrics):
    """Lines from equally long lists of metrics, one every so many iterations, from the first one on."""
    length = len(next(iter(metrics.values())))
    return [
        ((place + 1) * every, {name: values[place] for name, values in metrics.items() if values[place] is not None})
        for place in range(length)
    ]


def contestant(label, *runs, seconds=None):
    """A contestant with these runs."""
    choice = Chosen(-4, ()) if runs else None
    timed_as = "eager, CPU" if seconds else ""
    return KeptContestant(
        label.lower(),
        label,
        TrainConfig(),
        search=Searched({-4: 1.0}, ()),
        choice=choice,
        runs=list(runs),
        seconds_per_iteration=seconds,
        timed_as=timed_as,
    )


def verdict(statements, words):
    """On the one statement that has these words."""
    (found,) = (statement for statement in statements if words in statement.paper)
    return found.verdict
