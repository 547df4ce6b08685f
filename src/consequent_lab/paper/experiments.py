"""The paper's experiments by name: what each runs, and how it becomes a finding."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from consequent_lab.paper import digits, filters, inside, learning_rates, loss_surface, mlp, output_paths, resnet20
from consequent_lab.paper.findings import Finding
from consequent_lab.paper.recipes import Race, Recipe


@dataclass(frozen=True)
class Experiment:
    """One experiment."""

    finding: Callable[..., Finding]  # makes it from one or more folders of runs, as folders or compact
    recipes: Callable[[bool], list[Recipe]] = lambda quick: []  # to be run, small if asked; none: the finding computes


def experiments() -> dict[str, Experiment]:
    """Returns all experiments by their names on the command line, in the paper's order."""
    return {
        loss_surface.NAME: Experiment(loss_surface.finding),
        output_paths.NAME: Experiment(output_paths.finding),
        mlp.NAME: Experiment(mlp.finding, lambda quick: [mlp.race(quick)]),
        "resnet20": Experiment(resnet20.finding, lambda quick: [resnet20.race(quick)]),
        learning_rates.NAME: Experiment(learning_rates.finding, learning_rates.recipes),
        inside.NAME: Experiment(inside.finding),
        digits.NAME: Experiment(digits.finding, lambda quick: [digits.race(quick)]),
        filters.NAME: Experiment(filters.finding),
    }


def find(names: Sequence[str], *runs: Path) -> list[Finding]:
    """Returns the findings of some experiments from folders of runs; of a run that is in several, the first counts."""
    known = experiments()
    return [known[name].finding(*runs) for name in names]


def recipe_names(quick: bool) -> list[str]:
    """Returns the names under which runs are kept."""
    recipes = {one.name: one for experiment in experiments().values() for one in experiment.recipes(quick)}
    steps = {name: ("", "-search", "-timing") if isinstance(one, Race) else ("",) for name, one in recipes.items()}
    return [name + step for name, some in steps.items() for step in some]
