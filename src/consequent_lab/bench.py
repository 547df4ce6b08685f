"""`consequent bench`: what the correction costs."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from consequent_lab.records import device_name, measured_on, write_json
from consequent_lab.screen import console
from consequent_lab.train_command import chosen_device

Record = dict[str, Any]
SCALING = "scaling"  # what the figure is drawn from, measured only if it is asked for


@dataclass(frozen=True)
class Bench:
    """Measure training steps of real networks, consequentialist and plain, against the targets."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where; auto takes a GPU if there is one."""
    output: Path = Path("bench.json")
    """The JSON file."""
    only: tuple[str, ...] = ()
    """What to measure, as named in the JSON file, or how its name begins; none: all but `scaling`."""
    tables: tuple[Path, ...] = ()
    """Print the tables of these JSON files in Markdown, and measure nothing."""
    figure: Path | None = None
    """Draw what `--only scaling` has measured (.svg, .png or .pdf)."""
    quick: bool = False
    """Tiny networks that only show that everything works; on the CPU unless a device is named."""

    def __post_init__(self) -> None:
        if self.output.suffix != ".json":
            raise ValueError(f"--output must end in .json, got {self.output}")
        if self.figure is not None and self.figure.suffix not in (".svg", ".png", ".pdf"):
            raise ValueError(f"--figure must end in .svg, .png or .pdf, got {self.figure}")

    def run(self) -> None:
        """Measures, shows the result and writes it."""
        from consequent_lab.bench_tables import scaling_figure, tables

        records = [json.loads(path.read_text(encoding="utf-8")) for path in self.tables]
        for path, record in zip(self.tables, records, strict=True):
            if record.get("study") != "speed":
                raise ValueError(f"--tables {path}: not a file of consequent bench")
        if records:
            print("\n".join(tables(records)))
        else:
            records = [self._measured()]
        if self.figure is not None:
            from consequent_lab.report.static import draw_once

            draw_once(scaling_figure(records), [self.figure])

    def _measured(self) -> Record:
        from rich.markdown import Markdown

        from consequent_lab.bench_tables import cost, tables
        from consequent_lab.rounding import tf32

        screen, start = console(), time.perf_counter()
        device = "cpu" if self.quick and self.device == "auto" else chosen_device(self.device)
        screen.print(f"Speed on {device_name(device)}{', quick' if self.quick else ''}")
        record = {"study": "speed", "quick": self.quick, **measured_on(device), "rows": [], SCALING: []}
        for name, measure in chosen(self.only, self._measurements(device)).items():
            begin = time.perf_counter()
            with tf32(allowed=True):
                rows = measure()
            rows = [row | {"wanted": None} for row in rows] if self.quick else rows  # which judges nothing
            record[SCALING if name.startswith(SCALING) else "rows"] += rows
            write_json(self.output, record)  # after each of them: an interrupted bench is not lost
            found = ", ".join(row["error"] or f"{row['way']} {cost(row)}" for row in rows)
            screen.print(f"{name}: {found} ({time.perf_counter() - begin:.0f} s)", soft_wrap=True)
        screen.print(Markdown("\n".join(tables([record]))))
        screen.print(f"Numbers: {self.output}   Time: {time.perf_counter() - start:.0f} s")
        return record

    def _measurements(self, device: str) -> dict[str, Callable[[], list[Record]]]:
        from consequent_lab.speed import first_steps, play
        from consequent_lab.targets import matches, scaling
        from consequent_lab.timing import Plan

        plan = Plan(60, seconds=30)
        if device == "cuda":
            plan = Plan(20, seconds=3, sample_seconds=0.05, warm_up=10)
        if self.quick:
            plan = Plan(5, seconds=0.5, sample_seconds=0.002)
        short = replace(plan, seconds=min(plan.seconds, 2))
        return {
            **{match.name: partial(play, match, device, plan) for match in matches(device, quick=self.quick)},
            "first-step": partial(first_steps, device, quick=self.quick),
            **{match.name: partial(play, match, device, short) for match in scaling(device, quick=self.quick)},
        }


def chosen(beginnings: Sequence[str], measurements: dict[str, Any]) -> dict[str, Any]:
    """Returns the measurements whose names begin so; if none is asked for, all but those of the figure."""
    beginnings = tuple(beginnings) or tuple(name for name in measurements if not name.startswith(SCALING))
    unknown = [one for one in beginnings if not any(name.startswith(one) for name in measurements)]
    if unknown:
        raise ValueError(f"--only {' '.join(unknown)} is unknown here; there are {', '.join(measurements)}")
    return {name: its for name, its in measurements.items() if name.startswith(beginnings)}
