"""Pictures."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from consequent_lab.demo_race import Result
from consequent_lab.records import write_atomically
from consequent_lab.summary import Spread
from consequent_lab.training import Point

# Okabe and Ito's colours, told apart by colour-blind readers too: one hue per pair of contestants.
COLOURS = {"SGD": "#0072B2", "Nesterov": "#D55E00", "Adam": "#009E73"}
INK = "#333333"
FAINT = "#777777"


def draw_race(path: Path, results: list[Result], target_loss: float) -> None:
    """Draws training loss against epochs and against seconds, a column for each plain optimiser and its C- version.

    Lines are medians over the seeds, bands their range, dots the median crossing of the target loss.

    Args:
        path: the PNG file to write.
        results: of all contestants, each plain one followed by its C- version.
        target_loss: drawn as a horizontal line.
    """
    pairs = list(zip(results[::2], results[1::2], strict=True))
    figure = Figure(figsize=(11.5, 7.2), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(2, len(pairs), sharey=True, sharex="row", squeeze=False)
    for column, pair in enumerate(pairs):
        family = pair[0].contestant.family
        grid[0, column].set_title(f"{family} and C-{family}", color=COLOURS[family], fontweight="bold", fontsize=13)
        _draw_panel(grid[0, column], pair, target_loss, lambda point: point.epoch, "{:.1f} epochs", "epochs")
        _draw_panel(grid[1, column], pair, target_loss, lambda point: point.seconds, "{:.2f} s", "seconds of training")
    for axes in grid[:, 0]:
        axes.set_ylabel("training loss")
        axes.annotate(
            f"target loss {target_loss:g}",
            (1.0, target_loss),
            xycoords=("axes fraction", "data"),
            xytext=(0, 3),
            textcoords="offset points",
            horizontalalignment="right",
            fontsize=8.5,
            color=FAINT,
        )
    seeds = len(results[0].runs)
    figure.suptitle(
        "Training on handwritten digits, every optimiser at the learning rate its search found", fontsize=15, color=INK
    )
    figure.supxlabel(
        f"Lines: median of {seeds} seeds. Bands: their range. Dots: when the target loss is first reached. "
        "Seconds: processor time of one thread.",
        fontsize=9.5,
        color=FAINT,
    )
    write_atomically(path, lambda file: figure.savefig(file, format="png", dpi=150))


def _draw_panel(
    axes: Axes,
    pair: tuple[Result, Result],
    target_loss: float,
    measure: Callable[[Point], float],
    form: str,
    label: str,
) -> None:
    axes.set_yscale("log")
    axes.set_xlabel(label)
    axes.axhline(target_loss, color=FAINT, linewidth=0.8, linestyle=":")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(which="both", labelleft=True, colors=INK)
    axes.grid(alpha=0.2)
    for result in pair:
        contestant = result.contestant
        colour = COLOURS[contestant.family]
        length = min(len(run.curve) for run in result.runs)
        position = np.median([[measure(point) for point in run.curve[:length]] for run in result.runs], axis=0)
        losses = np.array([[point.loss for point in run.curve[:length]] for run in result.runs])
        hits = [run.to_target(target_loss) for run in result.runs]
        crossing = Spread.of(measure(hit) if hit else np.inf for hit in hits).median
        reached = form.format(crossing) if np.isfinite(crossing) else "target not reached"
        axes.plot(
            position,
            np.median(losses, axis=0),
            color=colour,
            linestyle="-" if contestant.consequentialist else (0, (4, 2)),
            linewidth=2.0 if contestant.consequentialist else 1.6,
            label=f"{contestant.name} (lr {result.learning_rate:g}): {reached}",
        )
        axes.fill_between(
            position, losses.min(axis=0), losses.max(axis=0), color=colour, alpha=0.15, linewidth=0, zorder=1
        )
        if np.isfinite(crossing):
            face = colour if contestant.consequentialist else "white"
            axes.plot(crossing, target_loss, "o", color=colour, markerfacecolor=face, markersize=7, zorder=5)
    axes.legend(loc="upper right", fontsize=8.5, frameon=False, handlelength=2.6, labelcolor=INK)
