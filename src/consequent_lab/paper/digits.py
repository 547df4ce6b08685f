"""Statements that the paper's larger experiments leave open, looked at on the digits: RMSprop, momentum, ridge."""

import math
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from consequent_lab.kept_runs import KeptRun
from consequent_lab.paper.findings import Axis, Figure, Finding, Panel, Series, Statement
from consequent_lab.paper.kept_contestants import KeptContestant, all_above, decades, kept_race, lowered, spread
from consequent_lab.paper.race_finding import ITERATIONS_OR_SECONDS, circumstances, curve_panels, race_finding
from consequent_lab.paper.rates import Search
from consequent_lab.paper.recipes import Contestant, Race
from consequent_lab.paper.statements import Found, Outcome, judged
from consequent_lab.train_config import Optimiser, TrainConfig

NAME = "digits"
SEEDS = (0, 1, 2)
DAMPING = 1e-3
DAMPINGS = (1e-9, 1e-7, 1e-5, DAMPING, 1e-1, 10.0)  # of C-SGD
MOMENTA = (0.5, 0.8, 0.9, 0.95, 0.99)
BEST_MOMENTUM = 0.95  # the paper's
OPTIMISERS: dict[str, Optimiser] = {"SGD": "sgd", "Nesterov": "nesterov", "Adam": "adam", "RMSprop": "rmsprop"}
WITH_MOMENTUM: dict[str, Optimiser] = {"SGD": "momentum", "Nesterov": "nesterov"}
Kept = dict[str, KeptContestant]
DERIVATIVES = ("RMSprop", "Adam", "Nesterov")


# ---- what is run -------------------------------------------------------------------------------------------------


def damped(damping: float) -> str:
    """Returns the label of C-SGD with a λ.

    >>> damped(1e-3), damped(0.1)
    ('C-SGD', 'C-SGD, λ = 0.1')
    """
    return "C-SGD" if damping == DAMPING else f"C-SGD, λ = {damping:g}"


def with_momentum(label: str, momentum: float) -> str:
    """Returns the label of an optimiser with a momentum.

    >>> with_momentum("SGD", 0.9), with_momentum("Nesterov", 0.95)
    ('SGD, momentum 0.9', 'Nesterov')
    """
    is_the_papers = label == "Nesterov" and momentum == BEST_MOMENTUM
    return label if is_the_papers else f"{label}, momentum {momentum:g}"


def race(quick: bool = False) -> Race:
    """Returns the experiment; the small one has a smaller network and fewer rates."""
    plain = TrainConfig(
        dataset="digits",
        model="mlp",
        hidden=(16,) * 2 if quick else (64,) * 8,
        consequentialist=False,
        momentum=BEST_MOMENTUM,
        damping=DAMPING,
        epochs=2 if quick else 20,
        log_every=15,
        gradient_norms="none",
        checkpoint_every=10_000,
    )
    configs: dict[str, TrainConfig] = {}
    for name, optimiser in OPTIMISERS.items():
        for label in (name, f"C-{name}"):
            configs[label] = replace(plain, optimiser=optimiser, consequentialist=label.startswith("C-"))
    for name, optimiser in WITH_MOMENTUM.items():
        for momentum in MOMENTA:
            configs[with_momentum(name, momentum)] = replace(plain, optimiser=optimiser, momentum=momentum)
    for damping in DAMPINGS:
        configs[damped(damping)] = replace(plain, optimiser="sgd", consequentialist=True, damping=damping)
    contestants = tuple(
        Contestant(variant_of(label), label, config, SEEDS[:1] if quick else SEEDS, timed_with="sgd")
        for label, config in configs.items()
    )
    if quick:
        search = Search(epochs=1, lowest=-8, highest=-6, extensions=0, half_ways=False)
        return Race(f"{NAME}-quick", contestants, search, timed_iterations=20)
    return Race(NAME, contestants, Search(epochs=3), timed_iterations=100)


def variant_of(label: str) -> str:
    """Returns a contestant's name.

    >>> variant_of("SGD, momentum 0.9"), variant_of("C-SGD, λ = 1e-07")
    ('sgd-momentum-0.9', 'c-sgd-damping-1e-07')
    """
    return label.lower().replace("λ =", "damping").replace(",", "").replace(" ", "-")


# ---- what comes out ----------------------------------------------------------------------------------------------


def finding(*runs: Path) -> Finding:
    """Returns the finding from what is kept."""
    found_race, contestants = kept_race(race, runs)
    kept = {one.label: one for one in contestants}
    return race_finding(
        NAME,
        "Optimisers, momentum and ridge, on the digits",
        "A small stand-in for what was not run at the paper's size: eight hidden layers of 64 on scikit-learn's 1,440 "
        f"digits, mini-batches of 32, 20 epochs, three seeds, λ = {DAMPING:g} unless it says otherwise, inputs in [0, "
        "1]. Its verdicts are counted apart.",
        (found_race, contestants),
        [_optimisers_figure(kept), _choices_figure(kept)],
        lambda: statements(found_race, kept),
    )


def mean_log_loss(run: KeptRun) -> float:
    """Returns the mean of log₁₀ of the loss over the epochs."""
    return fmean(math.log10(max(loss, 1e-12)) for _, loss in run.curve("epoch_loss"))


def failed_factorisations(run: KeptRun) -> float:
    """Returns how many factorisations failed; in runs of former versions repeated ones, and steps skipped."""
    last = next((line for line in reversed(run.lines) if line.keys() & {"failed", "counters"}), {})
    counters: dict[str, int] = last.get("counters", {})
    return float(last.get("failed", 0) + sum(counters.get(name, 0) for name in ("rescued", "fallen_back", "skipped")))


def statements(kept_race: Race, kept: Kept) -> list[Statement]:
    """Returns the paper's statements on what is kept."""
    judged_of = {
        "applicable": [kept[prefix + name] for name in DERIVATIVES for prefix in ("C-", "")],
        "best_momentum": [kept[with_momentum(name, BEST_MOMENTUM)] for name in WITH_MOMENTUM],
        "ridge": [kept[damped(damping)] for damping in DAMPINGS],
    }
    found = {"applicable": _applicable(kept), "best_momentum": _best_momentum(kept), "ridge": _ridge(kept)}
    outcomes = {name: Outcome(*found[name], circumstances(kept_race, some)) for name, some in judged_of.items()}
    return judged(NAME, "digits", outcomes, globals())


def _applicable(kept: Kept) -> Found:
    gains = {name: lowered(kept[f"C-{name}"], kept[name]) for name in DERIVATIVES}
    shown = [f"C-{name} below {name} {decades(values)}" for name, values in gains.items() if values]
    return f"{'; '.join(shown)}.", [all_above(values) for values in gains.values()]


def _best_momentum(kept: Kept) -> Found:
    parts: list[bool | None] = []
    shown = []
    for name in WITH_MOMENTUM:
        means = {
            momentum: fmean(mean_log_loss(run) for run in runs)
            for momentum in MOMENTA
            if (runs := kept[with_momentum(name, momentum)].runs)
        }
        parts.append(min(means, key=lambda m: means[m]) == BEST_MOMENTUM if len(means) == len(MOMENTA) else None)
        shown.append(f"{name} " + ", ".join(f"{momentum:g}: {value:.2f}" for momentum, value in means.items()))
    return f"{'; '.join(shown)}.", parts


def _ridge(kept: Kept) -> Found:
    by_damping = {damping: kept[damped(damping)] for damping in DAMPINGS}
    least, chosen = by_damping[DAMPINGS[0]], by_damping[DAMPING]
    failures = {damping: [failed_factorisations(run) for run in one.runs] for damping, one in by_damping.items()}
    gains = lowered(chosen, least)
    shown = [f"{damping:g}: {spread(counts)}" for damping, counts in failures.items() if counts]
    prevented = all(failures[DAMPINGS[0]]) and not any(failures[DAMPING]) if least.runs and chosen.runs else None
    return f"Failed: {'; '.join(shown)}. Decades below: {decades(gains)}.", [prevented, all_above(gains)]


def _optimisers_figure(kept: Kept) -> Figure:
    some = [kept[prefix + name] for name in OPTIMISERS for prefix in ("C-", "")]
    x = ITERATIONS_OR_SECONDS[:1]
    loss = curve_panels({"training loss": some}, [Axis("train_loss", "loss on the training set", log=True)], x)
    accuracy = curve_panels({"test accuracy": some}, [Axis("test_accuracy", "test accuracy")], x)
    caption = "Eight hidden layers of 64 on the digits, each optimiser at its own best learning rate."
    return Figure(f"{NAME}-optimisers", "Every optimiser with its C- version, on the digits", caption, loss + accuracy)


def _choices_figure(kept: Kept) -> Figure:
    """Returns the final loss and test accuracy by λ, and the loss by momentum."""

    def series(label: str, by: str, found: dict[float, KeptContestant], measure: str) -> Series:
        rows = [(value, run) for value, one in found.items() for run in one.runs]
        measured = [mean_log_loss(run) if measure == "mean_log_loss" else run.last(measure) for _, run in rows]
        return Series(label, {by: [value for value, _ in rows], measure: measured}, style="markers")

    by_damping = {damping: kept[damped(damping)] for damping in DAMPINGS}
    damping, momentum = [Axis("damping", "λ", log=True)], [Axis("momentum", "momentum")]
    loss, accuracy = Axis("mean_log_loss", "mean log₁₀ of the loss"), Axis("test_accuracy", "test accuracy")
    by_momentum = {name: {m: kept[with_momentum(name, m)] for m in MOMENTA} for name in WITH_MOMENTUM}
    of_momentum = [series(name, "momentum", found, loss.column) for name, found in by_momentum.items()]
    panels = [
        Panel("λ: loss", [series("C-SGD", "damping", by_damping, loss.column)], damping, [loss]),
        Panel("λ: test accuracy", [series("C-SGD", "damping", by_damping, accuracy.column)], damping, [accuracy]),
        Panel("momentum: loss", of_momentum, momentum, [loss]),
    ]
    caption = "A point for every seed, each setting at its own best learning rate."
    return Figure(f"{NAME}-choices", "What ridge and momentum do, on the digits", caption, panels)
