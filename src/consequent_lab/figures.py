"""The picture of the demo."""

from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from consequent_lab.demo_table import demo_rows, epochs_to_target, seconds_per_step
from consequent_lab.race.measures import TimeTo
from consequent_lab.race.results import Results
from consequent_lab.records import write_atomically

# Okabe and Ito's colours, told apart by colour-blind readers too: one hue for an optimiser and its C- version.
COLOURS = {"SGD": "#0072B2", "Adam": "#009E73", "Muon": "#D55E00"}
INK = "#333333"
FAINT = "#777777"


def draw_race(path: Path, results: Results) -> None:
    """Draws training loss against epochs and against seconds.

    Lines are medians over the seeds, bands their range, dots the median crossing of the target loss.

    Args:
        path: the PNG file to write.
        results: of the demo.
    """
    measure = results.task.measure
    assert isinstance(measure, TimeTo)
    figure = Figure(figsize=(11.5, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, label in zip(panels, ("epochs", "seconds of training, one thread"), strict=True):
        axes.set(yscale="log", xlabel=label)
        axes.axhline(measure.target, color=FAINT, linewidth=0.8, linestyle=":")
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(which="both", labelleft=True, colors=INK)
        axes.grid(alpha=0.2)
        for name in (cells[0] for cells in demo_rows(results)):
            finals = results.finals(name)
            per_epoch = finals[0]["steps"] / results.task.epochs
            unit = 1 / per_epoch if label == "epochs" else seconds_per_step(results, name)
            length = min(len(line["curve"]["step"]) for line in finals)
            position = unit * np.array(finals[0]["curve"]["step"][:length])
            losses = np.array([line["curve"]["train_loss"][:length] for line in finals], dtype=float)
            crossing = unit * per_epoch * epochs_to_target(results, name).median
            reached = f"{crossing:.2g}" if np.isfinite(crossing) else "target not reached"
            is_ours = name.startswith("C-")
            colour = COLOURS[name.removeprefix("C-")]
            axes.plot(
                position,
                np.median(losses, axis=0),
                color=colour,
                linestyle="-" if is_ours else (0, (4, 2)),
                linewidth=2.0 if is_ours else 1.6,
                label=f"{name}: {reached}",
            )
            axes.fill_between(position, losses.min(axis=0), losses.max(axis=0), color=colour, alpha=0.12, linewidth=0)
            if np.isfinite(crossing):
                axes.plot(crossing, measure.target, "o", color=colour, markerfacecolor=colour if is_ours else "white")
        title = f"{'epochs' if label == 'epochs' else 'seconds'} to loss {measure.target:g}"
        axes.legend(title=title, loc="upper right", fontsize=9, frameon=False, handlelength=2.6, labelcolor=INK)
    panels[0].set_ylabel("training loss")
    figure.suptitle("A deep plain network on handwritten digits, every optimiser with settings of its own search")
    seeds = len(results.finals(results.task.contestants[0]))
    figure.supxlabel(f"Lines: median of {seeds} seeds. Bands: their range.", fontsize=9.5, color=FAINT)
    write_atomically(path, lambda file: figure.savefig(file, format="png", dpi=150))
