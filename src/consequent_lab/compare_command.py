"""`consequent compare`: runs beside each other, as a table, a figure, or numbers for other programs."""

from dataclasses import dataclass
from pathlib import Path

import tyro

from consequent_lab.comparison import figure_of, runs_at, terminal_table, write_csv, write_tensorboard
from consequent_lab.screen import console


@dataclass(frozen=True)
class Compare:
    """Show runs beside each other.

    A run is a folder of `consequent train` or `consequent reproduce`, finished or not; a folder that has some in it; or
    a file of `consequent collect` or `consequent race` (its finals). Seeds of one setting are one row: the median, and
    from the lowest to the highest.
    """

    places: tyro.conf.Positional[tuple[Path, ...]] = (Path("runs/train"),)
    """Of the runs."""
    figure: Path | None = Path("comparison.png")
    """Where the curves go (.png, .svg or .pdf); None: nowhere."""
    csv: Path | None = None
    """Write all readings to this file, a row each."""
    tensorboard: Path | None = None
    """Write all readings as TensorBoard's scalars to this folder, gradients' norms by layer among them."""

    def __post_init__(self) -> None:
        if self.figure is not None and self.figure.suffix not in (".png", ".svg", ".pdf"):
            raise ValueError(f"--figure {self.figure} must end in .png, .svg or .pdf")

    def run(self) -> None:
        """Reads the runs and shows them."""
        runs = runs_at(self.places)
        screen = console()
        screen.print(terminal_table(runs))
        if self.csv is not None:
            self.csv.parent.mkdir(parents=True, exist_ok=True)
            with self.csv.open("w", newline="") as file:
                write_csv(file, runs)
            screen.print(f"Readings: {self.csv}", soft_wrap=True)
        if self.tensorboard is not None:
            write_tensorboard(self.tensorboard, runs)
            screen.print(f"Scalars: tensorboard --logdir {self.tensorboard}", soft_wrap=True)
        if self.figure is not None:
            from consequent_lab.report.static import draw_once

            draw_once(figure_of(runs), [self.figure])
            screen.print(f"Curves: {self.figure}", soft_wrap=True)
