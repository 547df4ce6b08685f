"""How much tuning a learning rate needs: loss against the rate over four decades, plain and C-.

A small perceptron is run at all these rates. The same for ResNet-20 is what the search of that experiment has tried
anyway: the same rates, one seed.
"""

import math
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from consequent_lab.paper import resnet20
from consequent_lab.paper.archive import Archive
from consequent_lab.paper.findings import Figure, Finding, Number, Statement, Table
from consequent_lab.paper.kept_contestants import recipe_kept
from consequent_lab.paper.race_finding import DRAWN_UP_TO, rate_panels
from consequent_lab.paper.rates import rate_at, score, variant_at
from consequent_lab.paper.recipes import Contestant, Race, Recipe, Sweep
from consequent_lab.paper.statements import Outcome, judged
from consequent_lab.train_config import Optimiser, TrainConfig

NAME = "learning-rates"
SEEDS = (0, 1, 2)
RUNGS = tuple(range(-16, 1, 2))  # 1e-4 to 1
OPTIMISERS: dict[str, Optimiser] = {"SGD": "sgd", "Adam": "adam"}
LABELS = ("SGD", "C-SGD", "Adam", "C-Adam")
RESNET20_LABELS = ("SGD", "C-SGD", "Nesterov", "C-Nesterov", "Adam", "C-Adam")
GOOD = 1.25  # times the best loss of the same contestant
Losses = dict[str, dict[int, float]]  # by label and rung, means over seeds; infinity if one diverged


# ---- what is run -------------------------------------------------------------------------------------------------


def sweep(quick: bool = False) -> Sweep:
    """Returns the runs of the small perceptron."""
    contestants = tuple(
        Contestant(label.lower(), label, _config(label, quick), SEEDS[:1] if quick else SEEDS) for label in LABELS
    )
    return Sweep(f"{NAME}-quick" if quick else NAME, contestants, RUNGS[4::4] if quick else RUNGS)


def resnet20_race(quick: bool = False) -> Race:
    """Returns the contestants of ResNet-20 whose search shows their learning rates."""
    return resnet20.race(quick).select(tuple(label.lower() for label in RESNET20_LABELS), ())


def recipes(quick: bool = False) -> list[Recipe]:
    """Returns all that is run: the sweep, and of ResNet-20 the search alone."""
    return [sweep(quick), replace(resnet20_race(quick), steps=("search",))]


def _config(label: str, quick: bool) -> TrainConfig:
    return TrainConfig(
        dataset="digits" if quick else "fashion-mnist",
        model="mlp",
        hidden=(32,) * 2 if quick else (128,) * 4,
        optimiser=OPTIMISERS[label.removeprefix("C-")],
        consequentialist=label.startswith("C-"),
        damping=1e-3,
        batch_size=32,
        epochs=1,
        log_every=15 if quick else 500,
        gradient_norms="none",
        checkpoint_every=10_000,
    )


# ---- what comes out ----------------------------------------------------------------------------------------------


def finding(*runs: Path) -> Finding:
    """Returns the finding from what is kept."""
    archive = Archive(*runs)
    kept = recipe_kept(sweep, archive)
    quick = kept.name != NAME
    parts = {"a small perceptron": sweep_losses(kept, archive), "ResNet-20": search_losses(quick, archive)}
    summary = (
        "Short runs at learning rates over four decades: a perceptron with four hidden layers of 128 on "
        "Fashion-MNIST (one epoch, three seeds), and ResNet-20 on CIFAR-10 without BatchNorm (three epochs, one seed: "
        "the runs of its search). The loss is the mean over the last epoch's mini-batches."
    )
    small = (
        "This shows the machinery on the digits and says nothing about the paper: a perceptron with two hidden layers "
        f"of 32 for one epoch at {len(kept.rungs)} learning rates, one seed, and the search of a small residual "
        "network. No verdicts are given."
    )
    return Finding(
        name=NAME,
        title="Learning rates",
        summary=small if quick else summary,
        figures=[_figure(parts)],
        statements=[] if quick else statements(parts),
        tables=[_table(parts)],
        is_small=quick,
    )


def sweep_losses(recipe: Sweep, archive: Archive) -> Losses:
    """Returns what a sweep found."""
    return {
        contestant.label: {
            rung: fmean(map(score, runs))
            for rung in recipe.rungs
            if (runs := archive.runs(recipe.name, variant_at(contestant.variant, rung)))
        }
        for contestant in recipe.contestants
    }


def search_losses(quick: bool, archive: Archive) -> Losses:
    """Returns what the search of ResNet-20 found, on its grid."""
    race = resnet20_race(quick)
    return {
        contestant.label: {
            rung: loss for rung, loss in race.searched(contestant, archive).losses.items() if rung % 2 == 0
        }
        for contestant in race.contestants
    }


def good_decades(losses: dict[int, float], best: float) -> float | None:
    """Returns over how many decades of learning rates the loss is at most a quarter above the best one.

    A grid of two rates to a decade: every good rate stands for half a decade. None if nothing was learnt at any rate.
    """
    finite = [loss for loss in losses.values() if math.isfinite(loss)]
    return 0.5 * sum(loss <= GOOD * best for loss in finite) if finite else None


def _lowest(losses: dict[int, float]) -> float:
    return min(losses.values(), default=math.inf)


def statements(parts: dict[str, Losses]) -> list[Statement]:
    """Returns the paper's statement on tuning."""
    checks: list[bool | None] = []
    shown = []
    for title, losses in parts.items():
        for label in [name for name in losses if not name.startswith("C-")]:
            plain, corrected = losses[label], losses[f"C-{label}"]
            own, plain_own = (good_decades(one, _lowest(one)) for one in (corrected, plain))
            as_good = good_decades(corrected, _lowest(plain))
            if own is None or plain_own is None or as_good is None:
                checks.append(None)
                continue
            checks += [own >= plain_own, as_good > plain_own]
            shown.append(f"{title}, {label} {plain_own:g}, C-{label} {own:g} ({as_good:g} with {label}'s best)")
    beside = (
        "Training loss alone, test accuracy was not measured at every rate. 9 rates each; three seeds (perceptron) and "
        "one (ResNet-20)."
    )
    return judged(NAME, "empirical", {"easy_to_tune": Outcome(f"{'; '.join(shown)}.", checks, beside)}, globals())


def _figure(parts: dict[str, Losses]) -> Figure:
    return Figure(
        NAME,
        "Loss against the learning rate",
        "Means over seeds. A rate without a point diverged with at least one seed, or ended with a loss above "
        f"{DRAWN_UP_TO:g}.",
        rate_panels(parts, "mean training loss over the last epoch"),
    )


def _table(parts: dict[str, Losses]) -> Table:
    rows: list[list[str | Number]] = []
    for title, losses in parts.items():
        for label, by_rung in losses.items():
            best = min(by_rung, key=lambda rung: by_rung[rung], default=None)
            if best is not None and math.isfinite(loss := by_rung[best]):
                rows.append([title, label, rate_at(best), loss, good_decades(by_rung, loss)])
    return Table("The best rate of each", ["network", "optimiser", "best rate", "its loss", "good decades"], rows)
