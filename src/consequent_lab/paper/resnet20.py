"""What becomes of the paper's statements on ResNet-20 (its fourth experiment): the finding and its figures."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from consequent_lab.paper.archive import KeptRun
from consequent_lab.paper.findings import Axis, Figure, Finding, Lead, Number, Panel, Series, Table
from consequent_lab.paper.kept_contestants import (
    ITERATIONS_OR_SECONDS,
    KeptContestant,
    kept_race,
    race_finding,
    search_figure,
    seconds_note,
    spread,
)
from consequent_lab.paper.resnet20_measures import ALL_CORRECT, last_common_epoch, layer_norms, reaches, stays_at_all
from consequent_lab.paper.resnet20_recipe import NAME, SHORT, race
from consequent_lab.paper.resnet20_statements import statements

HEADLINES = ("C-SGD", "SGD", "SGD-BN")
WITHOUT_BN = ("C-SGD", "C-Nesterov", "C-Adam", "SGD", "Nesterov", "Adam")
WITH_BN = ("C-SGD", "C-Nesterov", "C-SGD-BN", "SGD-BN", "Nesterov-BN", "Adam-BN")
LONG_RUNS = ("C-SGD", "SGD-BN")
# What panels show: whom, and up to which iteration, so that no panel is longer than its curves.
PANELS = {
    "without BatchNorm": (WITHOUT_BN, SHORT),
    "with BatchNorm, and C-": (WITH_BN, SHORT),
    "to the end": (LONG_RUNS, None),
}
TEST_ACCURACY = Axis("test_accuracy", "test accuracy")


def finding(*runs: Path) -> Finding:
    """Returns the finding from what is kept."""
    kept, every = kept_race(race, runs)
    contestants = {one.label: one for one in every}
    searched = {
        "without BatchNorm": [contestants[label] for label in WITHOUT_BN],
        "with BatchNorm": [one for one in every if one.label.endswith("-BN")],
    }
    return race_finding(
        NAME,
        "ResNet-20",
        "CIFAR-10, mini-batches of 128, momentum 0.95, λ = 0.03. Plain optimisers with and without BatchNorm (inputs "
        "in [−1, 1]) against their C- versions without it (inputs in [−½, ½], the last layer's learning rate × 0.1), "
        "as in the paper. No augmentation, no weight decay.",
        (kept, every),
        [
            _headline_figure(contestants),
            _epoch_figure(contestants),
            _batch_figure(contestants),
            _norms_figure(contestants),
            search_figure(f"{NAME}-search", kept, searched),
        ],
        lambda: statements(kept, contestants),
        [headlines_table(every)],
        lambda: lead(contestants),
    )


def _without_count(spread_: str) -> str:
    """Returns mean and range without the number of seeds, which has a column of its own.

    >>> _without_count("2,000 (1,000–3,000; 2 seeds)"), _without_count("not within 10,000")
    ('2,000 (1,000–3,000)', 'not within 10,000')
    """
    return re.sub(r"; \d+ seeds\)", ")", spread_)


def lead(contestants: dict[str, KeptContestant]) -> Lead | None:
    """Returns what a report begins with; None if runs are missing."""
    shown = {label: contestants[label] for label in HEADLINES}
    if not all(one.runs for one in shown.values()):
        return None
    end = last_common_epoch(list(contestants.values()))
    learnt = {
        label: spread([reaches(run) for run in one.runs], within=min(run.outcome["iteration"] for run in one.runs))
        for label, one in shown.items()
    }
    accuracy = {
        label: spread([100 * (run.at("test_accuracy", end) or 0) for run in one.runs], ".1f")
        for label, one in shown.items()
    }
    rows: list[list[str | Number]] = [
        [
            label,
            float(len(one.runs)),
            float(len(one.search.losses)),
            _without_count(learnt[label]),
            _without_count(spread([run.at("epoch_loss", end) for run in one.runs], ".2g")),
            _without_count(accuracy[label]),
        ]
        for label, one in shown.items()
    ]
    columns = [
        "ResNet-20, CIFAR-10",
        "seeds",
        "learning rates searched",
        "iteration from which the training set is known by heart",
        f"training loss at {end:,}",
        f"test accuracy at {end:,}, %",
    ]
    soon, late, later = (text.split(" (")[0] for text in learnt.values())
    ours, plain, with_norm = (text.split(" (")[0] for text in accuracy.values())
    return Lead(
        f"{NAME}-headline",
        [
            "Without BatchNorm, ResNet-20 knows CIFAR-10's whole training set by heart after "
            f"{soon} iterations with C-SGD (SGD: {late}; SGD with BatchNorm: {later}).",
            f"On the test set, which the paper does not report, C-SGD is right in {ours} %, SGD in {plain} % and SGD "
            f"with BatchNorm in {with_norm} %.",
        ],
        Table("Sizes of effects: mean (range) over seeds", columns, rows),
    )


def headlines_table(contestants: Iterable[KeptContestant]) -> Table:
    """Returns what the runs came to, compared after the last epoch that all of the headlines' runs have."""
    present = [one for one in contestants if one.runs]
    end = last_common_epoch(present)
    columns = [
        "contestant",
        "seeds",
        "learning rate",
        "iterations",
        f"iteration of {100 * ALL_CORRECT:g} % over an epoch",
        "last mini-batches at 100 % from iteration",
        f"loss over the epoch until {end:,}",
        f"test accuracy at {end:,}",
        f"samples forgotten until {end:,}",
    ]
    rows: list[list[str | Number]] = []
    for one in present:
        runs = one.runs
        compared = [run for run in runs if run.at("test_accuracy", end) is not None]
        ends = sorted({run.outcome["iteration"] for run in runs})
        rows.append(
            [
                one.label,
                float(len(runs)),
                runs[0].config.lr,
                " to ".join(f"{iteration:,}" for iteration in sorted({ends[0], ends[-1]})),
                *map(
                    _without_count,
                    (
                        spread([reaches(run) for run in runs], within=ends[0]),
                        spread([stays_at_all(run) for run in runs], within=ends[0]),
                        spread([run.at("epoch_loss", end) for run in compared], ".2g"),
                        spread([run.at("test_accuracy", end) for run in compared], ".3f"),
                        spread([float(sum(n for at, n in run.curve("forgotten") if at <= end)) for run in compared]),
                    ),
                ),
            ]
        )
    return Table("Mean and range over the seeds", columns, rows)


def _headline_figure(contestants: dict[str, KeptContestant]) -> Figure:
    series = _series(contestants, HEADLINES, ("epoch_loss", "test_accuracy"), SHORT)
    axes = {
        "training loss": Axis("epoch_loss", "training loss over the epoch", log=True),
        "test accuracy": TEST_ACCURACY,
    }
    return Figure(
        name=f"{NAME}-headline",
        title="Learnt by heart, and what is left of it on the test set",
        caption="ResNet-20 on CIFAR-10 without BatchNorm (C-SGD, SGD) and with it (SGD-BN), three seeds each, the "
        f"first {SHORT:,} iterations. " + seconds_note([contestants[label] for label in HEADLINES]),
        panels=[Panel(title, series, ITERATIONS_OR_SECONDS, [axis]) for title, axis in axes.items()],
    )


def _batch_figure(contestants: dict[str, KeptContestant]) -> Figure:
    axes = {
        "loss": Axis("batch_loss", "loss of a mini-batch", log=True),
        "accuracy": Axis("batch_accuracy", "accuracy of a mini-batch"),
    }
    return Figure(
        name=NAME,
        title="Loss and accuracy of the last mini-batch of every 100 iterations",
        caption="As the paper shows it: one mini-batch, before the step that learns from it. "
        + seconds_note(contestants.values()),
        panels=[
            Panel(
                f"{title}: {what}",
                [_at_hundreds(one) for one in _series(contestants, labels, ("batch_loss", "batch_accuracy"), until)],
                ITERATIONS_OR_SECONDS,
                [axis],
            )
            for what, axis in axes.items()
            for title, (labels, until) in PANELS.items()
        ],
    )


def _epoch_figure(contestants: dict[str, KeptContestant]) -> Figure:
    columns = ("epoch_loss", "epoch_accuracy", "test_accuracy", "train_loss", "train_accuracy")
    axes = {
        "loss": [
            Axis("epoch_loss", "loss over the epoch", log=True),
            Axis("train_loss", "loss on the training set", log=True),
        ],
        "accuracy": [
            Axis("epoch_accuracy", "accuracy over the epoch"),
            Axis("train_accuracy", "accuracy on the training set"),
            TEST_ACCURACY,
        ],
    }
    return Figure(
        name=f"{NAME}-epochs",
        title="Loss and accuracy over whole epochs",
        caption="Means over the mini-batches of an epoch, each before the step that learns from it, and evaluations of "
        "the training and the test set at its end. " + seconds_note(contestants.values()),
        panels=[
            Panel(f"{title}: {what}", _series(contestants, labels, columns, until), ITERATIONS_OR_SECONDS, offered)
            for what, offered in axes.items()
            for title, (labels, until) in PANELS.items()
        ],
    )


def _series(
    contestants: dict[str, KeptContestant], labels: Sequence[str], columns: Sequence[str], until: float | None
) -> list[Series]:
    found = [series for label in labels for series in contestants[label].series(columns)]
    return [_kept_where(series, lambda iteration: until is None or iteration <= until) for series in found]


def _at_hundreds(series: Series) -> Series:
    """Leaves out what is between the hundreds: the ends of epochs belong to the other figure. A small run has none."""
    thinned = _kept_where(series, lambda iteration: iteration % 100 == 0)
    return thinned if thinned.columns["iteration"] else series


def _kept_where(series: Series, is_wanted: Callable[[float], bool]) -> Series:
    places = [place for place, value in enumerate(series.columns["iteration"]) if is_wanted(value or 0.0)]
    return replace(
        series, columns={name: [values[place] for place in places] for name, values in series.columns.items()}
    )


def _norms_figure(contestants: dict[str, KeptContestant]) -> Figure:
    return Figure(
        name=f"{NAME}-gradients",
        title="Norms of the gradients, layer by layer",
        caption="Of what backpropagation left for weights and biases of every convolution and of the last layer, from "
        "first to last, at a few iterations of the first seed.",
        panels=[
            Panel(
                label,
                [series for run in contestants[label].runs[:1] for series in _norm_series(run)],
                [Axis("layer", "layer")],
                [Axis("norm", "norm of the gradient", log=True)],
            )
            for label in HEADLINES
        ],
    )


def _norm_series(run: KeptRun) -> list[Series]:
    norms = layer_norms(run)
    stride = max(1, (len(norms) - 1) // 4)
    return [
        Series(
            f"iteration {iteration:,}",
            {"layer": [float(place + 1) for place in range(len(values))], "norm": [*values]},
            style="line+markers",
        )
        for iteration, values in norms[::stride]
    ]
