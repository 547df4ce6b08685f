"""The paper's experiments by name: what each runs, and how it becomes a finding."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from consequent_lab.paper import (
    digits,
    digits_recipe,
    filters,
    inside,
    learning_rates,
    learning_rates_recipe,
    loss_surface,
    mlp,
    mlp_recipe,
    output_paths,
    resnet20,
    resnet20_recipe,
)
from consequent_lab.paper.findings import Finding
from consequent_lab.paper.recipes import Recipe


@dataclass(frozen=True)
class Experiment:
    """One experiment."""

    name: str  # as on the command line
    finding: Callable[..., Finding]  # makes it from one or more folders of runs, as folders or compact
    recipes: Callable[[bool], list[Recipe]] = lambda quick: []  # to be run, small if asked; none: the finding computes


def experiments() -> dict[str, Experiment]:
    """Returns all experiments, in the paper's order."""
    every = (
        Experiment(loss_surface.NAME, loss_surface.finding),
        Experiment(output_paths.NAME, output_paths.finding),
        Experiment(mlp_recipe.NAME, mlp.finding, lambda quick: [mlp_recipe.race(quick)]),
        Experiment(resnet20_recipe.NAME, resnet20.finding, lambda quick: [resnet20_recipe.race(quick)]),
        Experiment(learning_rates_recipe.NAME, learning_rates.finding, _learning_rates),
        Experiment(inside.NAME, inside.finding),
        Experiment(digits_recipe.NAME, digits.finding, lambda quick: [digits_recipe.race(quick)]),
        Experiment(filters.NAME, filters.finding),
    )
    return {experiment.name: experiment for experiment in every}


def _learning_rates(quick: bool) -> list[Recipe]:
    searched = replace(learning_rates_recipe.resnet20_race(quick), steps=("search",))
    return [learning_rates_recipe.sweep(quick), searched]


def find(names: Sequence[str], *runs: Path) -> list[Finding]:
    """Returns the findings of some experiments.

    Args:
        names: of the experiments.
        runs: folders of runs, as folders or compact; of a run that is in several, the first one counts.
    """
    known = experiments()
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"there is no experiment {', '.join(unknown)}; there are {', '.join(known)}")
    return [known[name].finding(*runs) for name in names]


def recipe_names(quick: bool) -> list[str]:
    """Returns the names under which runs are kept."""
    races = [recipe.race(quick).name for recipe in (mlp_recipe, resnet20_recipe, digits_recipe)]
    return [
        learning_rates_recipe.sweep(quick).name,
        *(name + step for name in races for step in ("", "-search", "-timing")),
    ]
