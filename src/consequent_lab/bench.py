"""`consequent bench`: what the correction costs."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from rich.console import Console

from consequent_lab.bench_tables import cost_table, verdicts
from consequent_lab.records import device_name, measured_on, write_json
from consequent_lab.screen import console
from consequent_lab.train_command import chosen_device

if TYPE_CHECKING:  # The command line reads this file for its options; torch is imported when needed.
    from consequent_lab.timing import Plan

T = TypeVar("T")


@dataclass(frozen=True)
class Bench:
    """Measure training steps of real networks, consequentialist and plain, against the targets."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where; auto takes a GPU if there is one."""
    output: Path = Path("bench.json")
    """The JSON file."""
    only: tuple[str, ...] = ()
    """Names of the measurements to take, as in the JSON file; none: all of them."""
    repeats: int | None = None
    """Samples of every contestant; None: 50 on a GPU, 60 on a CPU, fewer where time runs out."""
    tables: tuple[Path, ...] = ()
    """Print the table of these JSON files in Markdown, and measure nothing."""
    quick: bool = False
    """Tiny networks that only show that everything works; on the CPU unless a device is named."""

    def __post_init__(self) -> None:
        if self.repeats is not None and self.repeats < 1:
            raise ValueError(f"--repeats must be at least 1, got {self.repeats}")
        if self.output.suffix != ".json":
            raise ValueError(f"--output must end in .json, got {self.output}")

    def run(self) -> None:
        """Measures, shows the result and writes it."""
        start = time.perf_counter()
        if self.tables:
            _print_table(self.tables)
            return
        device = "cpu" if self.quick and self.device == "auto" else chosen_device(self.device)
        screen = console()
        screen.print(f"Speed on {device_name(device)}{', quick' if self.quick else ''}")
        self._measure(screen, device)
        screen.print(f"Time: {time.perf_counter() - start:.0f} s")

    def _measure(self, screen: Console, device: str) -> None:
        from rich.markdown import Markdown

        from consequent_lab.rounding import tf32
        from consequent_lab.speed import play
        from consequent_lab.targets import matches

        record = new_record("speed", device, quick=self.quick) | {"rows": [], "measurements": []}
        for match in chosen(self.only, {one.name: one for one in matches(device, quick=self.quick)}):
            start = time.perf_counter()
            with tf32(allowed=True):
                rows, measurement = play(match, device, self._plan(device), judge=not self.quick)
            record["rows"] += rows
            record["measurements"].append(measurement)
            write_json(self.output, record)  # after every match: an interrupted bench is not lost
            seconds = time.perf_counter() - start
            screen.print(f"{match.name}: {match.task.title}, {match.mode}: {seconds:.0f} s")
        screen.print(Markdown("\n".join(cost_table([record]))))
        for line in verdicts(record["rows"]):
            screen.print(line, soft_wrap=True)
        screen.print(f"Numbers: {self.output}")

    def _plan(self, device: str) -> "Plan":
        from consequent_lab.timing import Plan

        if self.quick:
            return Plan(self.repeats or 5, seconds=1, sample_seconds=0.005)
        if device == "cuda":
            return Plan(self.repeats or 50, seconds=6, sample_seconds=0.05, warm_up=20)
        return Plan(self.repeats or 60, seconds=40)


def chosen(names: Sequence[str], measurements: dict[str, T]) -> list[T]:
    """Returns the measurements that --only names; all if it names none."""
    unknown = [name for name in names if name not in measurements]
    if unknown:
        raise ValueError(f"--only {' '.join(unknown)} is unknown here; there are {', '.join(measurements)}")
    return [measurement for name, measurement in measurements.items() if not names or name in names]


def new_record(study: str, device: str, *, quick: bool) -> dict[str, Any]:
    """Returns what every JSON file of measurements begins with."""
    return {"study": study, "quick": quick, **measured_on(device)}


def _print_table(paths: tuple[Path, ...]) -> None:
    records = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    for path, record in zip(paths, records, strict=True):
        if record.get("study") != "speed":
            raise ValueError(f"--tables {path}: not a file of consequent bench")
    print("\n".join(cost_table(records)))
