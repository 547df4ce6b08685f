"""``python -m benchmarks.precision``: measure, show the table, write the numbers."""

import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal

import tyro
from rich.box import SIMPLE_HEAD
from rich.table import Table

from benchmarks.precision.images import load_images
from benchmarks.precision.study import Moment, moments, setups
from consequent_lab.bench import new_record
from consequent_lab.records import device_name, write_json
from consequent_lab.screen import console
from consequent_lab.train_command import chosen_device


@dataclass(frozen=True)
class Precision:
    """Measure the error of the update by the format of the Gram matrix."""

    iterations: int | None = None
    """Training steps (default: 1000 on a GPU, 50 on a CPU)."""
    data: Path | None = None
    """Folder with the binary batches of CIFAR-10 (default: scikit-learn's digits)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where; auto takes a GPU if there is one."""
    output: Path = Path("bench-precision.json")
    """The JSON file."""
    quick: bool = False
    """Tiny networks that only show that everything works."""

    def __post_init__(self) -> None:
        if self.iterations is not None and self.iterations < 1:
            raise ValueError(f"--iterations must be at least 1, got {self.iterations}")

    def run(self) -> None:
        """Measures, shows the result and writes it."""
        screen = console()
        device = "cpu" if self.quick else chosen_device(self.device)
        screen.print(f"Precision on {device_name(device)}")
        images = load_images(self.data)
        iterations = self.iterations or (20 if self.quick else 1000 if device == "cuda" else 50)
        record = new_record("precision", device, quick=self.quick) | {"data": images.name, "iterations": iterations}
        found = []
        for setup in setups(quick=self.quick):
            for moment in moments(setup, images, device, iterations):
                found.append(moment)
                record["moments"] = [moment.record() for moment in found]
                write_json(self.output, record)
                screen.print(f"{setup.name}: iteration {moment.iteration}, loss {moment.loss:.3g}")
        screen.print(precision_table(found))
        screen.print(f"Data: {images.name}   Numbers: {self.output}")


def precision_table(moments: list[Moment]) -> Table:
    """Returns the table of the updates' relative errors, by format of the Gram matrix."""
    table = Table(
        box=SIMPLE_HEAD,
        pad_edge=False,
        caption="relative error of the update against float64, by the format of the Gram matrix: median and largest\n"
        "over the layers, and how many factorisations failed; solves are in float32",
    )
    table.add_column("network, iteration", ratio=1)
    table.add_column("loss", justify="right")
    for name in moments[0].formats:
        table.add_column(name, justify="right")
    for place, moment in enumerate(moments):
        if place == 0 or moments[place - 1].setup is not moment.setup:
            table.add_row(f"[bold]{moment.setup.title}, λ = {moment.setup.damping:g}[/]")
        cells = [_errors(moment, name) for name in moment.formats]
        table.add_row(f"  iteration {moment.iteration:,}", f"{moment.loss:.2g}", *cells)
    return table


def _errors(moment: Moment, name: str) -> str:
    found = moment.errors(name)
    failed = moment.failures(name)
    text = f"{median(found):.0e} … {found[-1]:.0e}" if found else ""
    return f"{text}\n[red]{failed} of {len(moment.layers)} failed[/]" if failed else text


def main(arguments: list[str] | None = None) -> int:
    """Runs the study and returns its exit status."""
    try:
        tyro.cli(Precision, prog="precision", args=arguments).run()
    except (ValueError, OSError) as error:
        print(f"precision: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
