"""What becomes of the paper's statements on ResNet-20 (its fourth experiment): the finding and its figures."""

from collections.abc import Iterable
from pathlib import Path

from consequent_lab.paper.archive import Archive, KeptRun
from consequent_lab.paper.entries import (
    ITERATIONS_OR_SECONDS,
    Entry,
    entries_of,
    race_kept,
    rates_table,
    runs_table,
    search_figure,
    seconds_note,
    small_note,
    spread,
)
from consequent_lab.paper.findings import Axis, Figure, Finding, Number, Panel, Series, Table
from consequent_lab.paper.resnet20_measures import ALL_CORRECT, layer_norms, reaches, stays_at_all
from consequent_lab.paper.resnet20_recipe import NAME, race
from consequent_lab.paper.resnet20_statements import statements

WITHOUT_BN = ("C-SGD", "C-Nesterov", "C-Adam", "SGD", "Nesterov", "Adam")
WITH_BN = ("C-SGD", "C-Nesterov", "C-SGD-BN", "SGD-BN", "Nesterov-BN", "Adam-BN")
SHOWN_NORMS = ("C-SGD", "SGD-BN", "SGD")


def finding(*runs: Path) -> Finding:
    """Returns the finding from what is kept."""
    archive = Archive(*runs, unfinished=True)
    kept = race_kept(race, archive)
    entries = {entry.label: entry for entry in entries_of(kept, archive).values()}
    return Finding(
        name=NAME,
        title="ResNet-20",
        summary=small_note(kept, NAME)
        + "CIFAR-10, mini-batches of 128, momentum 0.95, λ = 0.03. Plain optimisers with and without BatchNorm "
        "(inputs in [−1, 1]) against their C- versions without it (inputs in [−½, ½], the last layer's learning rate "
        "× 0.1).",
        commands=[f"consequent reproduce {NAME}{' --quick' if kept.name != NAME else ''}"],
        figures=[
            _paper_reading(entries),
            _epoch_reading(entries),
            _norms_figure(entries),
            search_figure(
                f"{NAME}-search",
                kept,
                {
                    "without BatchNorm": [entries[label] for label in WITHOUT_BN],
                    "with BatchNorm": [entry for label, entry in entries.items() if label.endswith("-BN")],
                },
            ),
        ],
        statements=statements(entries),
        tables=[
            _headlines(entries.values()),
            rates_table(entries.values()),
            runs_table("Every run", entries.values()),
        ],
    )


def _headlines(entries: Iterable[Entry]) -> Table:
    """Returns what the runs came to, compared after the last epoch that all of the headlines' runs have."""
    present = [entry for entry in entries if entry.runs]
    headlines = [run for entry in present if entry.contestant.headline for run in entry.runs]
    epochs = [dict(run.curve("epoch_loss")).keys() & dict(run.curve("test_accuracy")).keys() for run in headlines]
    end = max(set.intersection(*map(set, epochs)), default=0) if epochs else 0
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
    for entry in present:
        runs = entry.runs
        compared = [run for run in runs if dict(run.curve("test_accuracy")).get(end) is not None]
        rows.append(
            [
                entry.label,
                float(len(runs)),
                runs[0].config.lr,
                " to ".join(f"{iteration:,}" for iteration in _ends([run.outcome["iteration"] for run in runs])),
                spread([reaches(run) for run in runs]),
                spread([stays_at_all(run) for run in runs]),
                spread([dict(run.curve("epoch_loss")).get(end) for run in compared], ".2g"),
                spread([dict(run.curve("test_accuracy"))[end] for run in compared], ".3f"),
                spread([float(sum(lost for at, lost in run.curve("forgotten") if at <= end)) for run in compared]),
            ]
        )
    return Table("Mean and range over the seeds", columns, rows)


def _ends(values: list[int]) -> list[int]:
    """Returns the lowest and the highest; once, if they are the same.

    >>> _ends([3, 1, 2]), _ends([4, 4])
    ([1, 3], [4])
    """
    return sorted({min(values), max(values)})


def _paper_reading(entries: dict[str, Entry]) -> Figure:
    columns = ("batch_loss", "batch_accuracy")
    return Figure(
        name=NAME,
        title="Loss and accuracy of the last mini-batch of every 100 iterations",
        caption="The paper's reading: one mini-batch, before the step that learns from it. "
        + seconds_note(entries.values()),
        panels=[
            Panel(
                f"{title}: {what}",
                _series(entries, labels, columns, every=100),
                ITERATIONS_OR_SECONDS,
                [axis],
            )
            for what, axis in (
                ("loss", Axis("batch_loss", "loss of a mini-batch", log=True)),
                ("accuracy", Axis("batch_accuracy", "accuracy of a mini-batch")),
            )
            for title, labels in (("without BatchNorm", WITHOUT_BN), ("with BatchNorm, and C-", WITH_BN))
        ],
    )


def _epoch_reading(entries: dict[str, Entry]) -> Figure:
    columns = ("epoch_loss", "epoch_accuracy", "test_accuracy", "train_loss", "train_accuracy")
    return Figure(
        name=f"{NAME}-epochs",
        title="Loss and accuracy over whole epochs",
        caption="Means over the mini-batches of an epoch, each before the step that learns from it, and evaluations of "
        "the training and the test set at its end. " + seconds_note(entries.values()),
        panels=[
            Panel(
                f"{title}: {what}",
                _series(entries, labels, columns),
                ITERATIONS_OR_SECONDS,
                axes,
            )
            for what, axes in (
                (
                    "loss",
                    [
                        Axis("epoch_loss", "loss over the epoch", log=True),
                        Axis("train_loss", "loss on the training set", log=True),
                    ],
                ),
                (
                    "accuracy",
                    [
                        Axis("epoch_accuracy", "accuracy over the epoch"),
                        Axis("train_accuracy", "accuracy on the training set"),
                        Axis("test_accuracy", "test accuracy"),
                    ],
                ),
            )
            for title, labels in (("without BatchNorm", WITHOUT_BN), ("with BatchNorm, and C-", WITH_BN))
        ],
    )


def _series(
    entries: dict[str, Entry], labels: Iterable[str], columns: tuple[str, ...], every: int | None = None
) -> list[Series]:
    found = [series for label in labels if label in entries for series in entries[label].series(columns)]
    if every is None:
        return found
    return [_thinned(series, every) for series in found]


def _thinned(series: Series, every: int) -> Series:
    """Leaves out the readings between the hundreds: those at the ends of epochs belong to the other figure."""
    places = [
        place for place, value in enumerate(series.columns["iteration"]) if value is not None and value % every == 0
    ]
    places = places or list(range(len(series.columns["iteration"])))  # a small run has none
    columns = {name: [values[place] for place in places] for name, values in series.columns.items()}
    return Series(series.label, columns, series.group, series.style)


def _norms_figure(entries: dict[str, Entry]) -> Figure:
    return Figure(
        name=f"{NAME}-gradients",
        title="Norms of the gradients, layer by layer",
        caption="Of what backpropagation left for weights and biases of every convolution and of the last layer, from "
        "first to last, at a few iterations of the first seed.",
        panels=[
            Panel(
                label,
                [series for run in entries[label].runs[:1] for series in _norm_series(run)],
                [Axis("layer", "layer")],
                [Axis("norm", "norm of the gradient", log=True)],
            )
            for label in SHOWN_NORMS
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
