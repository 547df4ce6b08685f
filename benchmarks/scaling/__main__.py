"""``python -m benchmarks.scaling``: measure, show the table, write the numbers, draw the picture."""

import json
import sys
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, Literal

import tyro
from rich.box import SIMPLE_HEAD
from rich.table import Table

from benchmarks.scaling.figure import draw_scaling
from benchmarks.scaling.study import QUANTITIES, Curve, limits, recorded_curves, run_sweep, sweeps
from consequent_lab.bench import chosen, new_record
from consequent_lab.numbers import three_digits
from consequent_lab.records import device_name, write_json
from consequent_lab.rounding import tf32
from consequent_lab.screen import console
from consequent_lab.train_command import chosen_device


@dataclass(frozen=True)
class Scaling:
    """Measure how the cost grows with batch, width, channels, image and depth."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where; auto takes a GPU if there is one."""
    output: Path = Path("bench-scaling.json")
    """The JSON file; its picture goes beside it."""
    only: tuple[str, ...] = ()
    """Names of the sweeps, as in the JSON file (default: all)."""
    repeats: int = 9
    """Samples of every contestant, fewer where time runs out."""
    draw: Path | None = None
    """Draw the picture of this JSON file beside it, and measure nothing."""
    table: Path | None = None
    """Print the table of this JSON file as it is in the documentation, and measure nothing."""
    quick: bool = False
    """Tiny networks that only show that everything works; on the CPU unless a device is named."""

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ValueError(f"--repeats must be at least 1, got {self.repeats}")
        if self.output.suffix != ".json":
            raise ValueError(f"--output must end in .json, got {self.output}")

    def run(self) -> None:
        """Measures, shows the result and writes it; or shows what was measured before."""
        if self.draw is not None:
            _draw(self.draw)
        elif self.table is not None:
            print("\n".join(growth_table(_recorded(self.table))))
        else:
            self._measure()

    def _measure(self) -> None:
        device = "cpu" if self.quick and self.device == "auto" else chosen_device(self.device)
        screen = console()
        screen.print(f"Scaling on {device_name(device)}{', quick' if self.quick else ''}")
        record = new_record("scaling", device, quick=self.quick)
        curves = []
        for sweep in chosen(self.only, {sweep.name: sweep for sweep in sweeps(device, quick=self.quick)}):
            with tf32(allowed=True):
                curves.append(run_sweep(sweep, device, limits(self.repeats, quick=self.quick)))
            record["curves"] = [curve.record() for curve in curves]
            write_json(self.output, record)
            screen.print(f"{sweep.name}: {sweep.axis} {curves[-1].sizes}; {curves[-1].stopped}", markup=False)
        screen.print(exponents_table(curves))
        screen.print(f"Numbers: {self.output}")
        _draw(self.output)


def _recorded(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:  # neither text nor JSON
        record = None
    if not isinstance(record, dict) or record.get("study") != "scaling":
        raise ValueError(f"{path}: not a file of this study")
    return record


def _draw(path: Path) -> None:
    record = _recorded(path)
    curves = [curve for curve in recorded_curves(record) if curve.points]
    draw_scaling(path.with_suffix(".png"), curves, record["device"]["name"])
    print(f"Picture: {path.with_suffix('.png')}")


def exponents_table(curves: list[Curve]) -> Table:
    """Returns the table of exponents."""
    table = Table(
        box=SIMPLE_HEAD, pad_edge=False, caption="time ∝ size^exponent, fitted where the time grows with the size"
    )
    table.add_column("what grows", ratio=1)
    for heading in ("largest", "SGD", "C-SGD", "at\nbackward", "correction", "predicted\nhere"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("predicted for the largest sizes", ratio=1)
    for curve in curves:
        largest = f"{curve.sizes[-1]:,}" if curve.points else "–"
        exponents = [_power(value) for value in (*map(curve.exponent, QUANTITIES), curve.predicted)]
        what = f"[bold]{curve.sweep.axis}[/] ({curve.sweep.title})"
        table.add_row(what, largest, *exponents, curve.sweep.prediction, end_section=True)
    return table


def growth_table(record: dict[str, Any]) -> list[str]:
    """Returns the lines of the table in docs/speed.md, with powers fitted as they are now."""
    heads = ("what grows", "up to", "SGD, ms", "C-SGD, ms", "at backward, ms")
    lines = [f"| {' | '.join(heads)} | exponent of SGD | of the correction | predicted |", "|---" * 8 + "|"]
    for curve in recorded_curves(record):
        if not curve.points:
            continue
        last = curve.points[-1]
        times = ["–" if one is None else three_digits(one.median) for one in (last.plain, last.ours, last.backward)]
        exponents = [
            _power(value) for value in (curve.exponent("plain"), curve.exponent("correction"), curve.predicted)
        ]
        cells = [f"{curve.sweep.axis}, {curve.sweep.title}", f"{last.size:,}", *times, *exponents]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _power(exponent: float) -> str:
    return f"{exponent:.2f}" if isfinite(exponent) else "flat"


def main(arguments: list[str] | None = None) -> int:
    """Runs the study and returns its exit status."""
    try:
        tyro.cli(Scaling, prog="scaling", args=arguments).run()
    except (ValueError, OSError) as error:
        print(f"scaling: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
