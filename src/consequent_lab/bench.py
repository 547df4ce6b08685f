"""`consequent bench`: what the correction costs, how that grows, and what rounding does to it."""

import time
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import tyro

if TYPE_CHECKING:  # The command line reads this file for its options; torch is imported when needed.
    from rich.console import Console

    from consequent_lab.timing import Plan

T = TypeVar("T")
Device = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True)
class Bench:
    """Measure the cost of a consequentialist step beside the plain one.

    speed: training steps of real networks against the targets. scaling: how the cost grows with batch, width, channels,
    image and depth.
    """

    study: tyro.conf.Positional[Literal["speed", "scaling"]] = "speed"
    """What to measure."""
    device: Device = "auto"
    """Where; auto takes a GPU if there is one."""
    output: Path | None = None
    """The JSON file (default: bench.json, bench-scaling.json); pictures go beside it."""
    only: tuple[str, ...] = ()
    """Names of the measurements to take, as in the JSON file (default: all)."""
    repeats: int | None = None
    """Samples of every contestant (default: 50 on a GPU, 60 on a CPU, fewer where time runs out)."""
    draw: Path | None = None
    """scaling: draw the picture of this JSON file beside it, and measure nothing."""
    tables: tuple[Path, ...] = ()
    """Print the tables of these JSON files as they are in the documentation, and measure nothing."""
    quick: bool = False
    """Tiny networks that only show that everything works; on the CPU unless a device is named."""

    def __post_init__(self) -> None:
        if self.repeats is not None and self.repeats < 1:
            raise ValueError(f"--repeats must be at least 1, got {self.repeats}")
        if self.output is not None and self.output.suffix != ".json":
            raise ValueError(f"--output must end in .json, got {self.output}")

    def run(self) -> None:
        """Measures, shows the result and writes it."""
        from consequent_lab.screen import console
        from consequent_lab.train_command import chosen_device

        start = time.perf_counter()
        if self.draw is not None:
            _draw_again(self.draw)
            return
        if self.tables:
            _print_tables(self.tables)
            return
        path = self.output or Path("bench.json" if self.study == "speed" else f"bench-{self.study}.json")
        path.parent.mkdir(parents=True, exist_ok=True)  # Better fail now than after the measurement.
        device = "cpu" if self.quick and self.device == "auto" else chosen_device(self.device)
        screen = console()
        screen.print(f"{self.study.capitalize()} on {device_name(device)}{', quick' if self.quick else ''}")
        study = {"speed": self._speed, "scaling": self._scaling}[self.study]
        study(screen, path, device)
        screen.print(f"Time: {time.perf_counter() - start:.0f} s")

    def _speed(self, screen: "Console", path: Path, device: str) -> None:
        from consequent_lab.bench_display import failures, first_step_table, speed_table
        from consequent_lab.first_step import FirstStep, time_first_steps
        from consequent_lab.records import write_json
        from consequent_lab.rounding import tf32
        from consequent_lab.speed import Played, play
        from consequent_lab.targets import FULL, QUICK, Match, first_steps, matches

        sizes, judge = QUICK if self.quick else FULL, not self.quick
        known: dict[str, Match | str] = {match.name: match for match in matches(device, sizes)}
        known |= {name: name for name in first_steps(sizes)} if device == "cuda" else {}
        record = self._record(device)
        played: list[Played] = []
        first: list[FirstStep] = []
        for one in self._chosen(known):
            start = time.perf_counter()
            if isinstance(one, str):
                first += time_first_steps(one, device, quick=self.quick)
                what = f"{one}: {first[-1].task}, a new process"
            else:
                with tf32(allowed=True):
                    played.append(play(one, device, self._plan(device)))
                what = f"{one.name}: {one.task.title}, {one.mode}"
            rows = [row for each in played for row in each.rows()]
            record["rows"] = [row.record(judge=judge) for row in rows]
            record["first_steps"] = [each.record(judge=judge) for each in first]
            record["measurements"] = [each.record() for each in played]
            write_json(path, record)  # after every match: an interrupted bench is not lost
            screen.print(f"{what}: {time.perf_counter() - start:.0f} s", markup=False)
        if played:
            screen.print(speed_table(rows, judge=judge))
        if first:
            screen.print(first_step_table(first, judge=judge))
        for sentence in failures(played):
            screen.print(sentence, markup=False)
        screen.print(f"Numbers: {path}")

    def _scaling(self, screen: "Console", path: Path, device: str) -> None:
        from consequent_lab.bench_display import scaling_table
        from consequent_lab.records import write_json
        from consequent_lab.rounding import tf32
        from consequent_lab.scaling import limits, run_sweep, sweeps

        chosen = self._chosen({sweep.name: sweep for sweep in sweeps(device, quick=self.quick)})
        limit = limits(device, quick=self.quick, repeats=self.repeats)
        record = self._record(device)
        curves = []
        for sweep in chosen:
            with tf32(allowed=True):
                curves.append(run_sweep(sweep, device, limit))
            record["curves"] = [curve.record() for curve in curves]
            write_json(path, record)
            screen.print(f"{sweep.name}: {sweep.axis} {curves[-1].sizes}; {curves[-1].stopped}", markup=False)
        screen.print(scaling_table(curves))
        screen.print(f"Numbers: {path}")
        if find_spec("matplotlib"):
            _draw_again(path)
        else:
            screen.print(f"No matplotlib here: draw the picture elsewhere, with consequent bench --draw {path.name}")

    def _plan(self, device: str) -> "Plan":
        from consequent_lab.timing import Plan

        if self.quick:
            return Plan(self.repeats or 5, seconds=1, sample_seconds=0.005)
        if device == "cuda":
            # Recorded launches are for steps that follow each other: many of them before the first, and in a sample.
            return Plan(self.repeats or 50, seconds=6, sample_seconds=0.05, warm_up=20)
        return Plan(self.repeats or 60, seconds=40)

    def _chosen(self, measurements: "dict[str, T]") -> "list[T]":
        """Returns the measurements that --only names."""
        unknown = [name for name in self.only if name not in measurements]
        if unknown:
            raise ValueError(f"--only {' '.join(unknown)} is unknown here; there are {', '.join(measurements)}")
        return [measurement for name, measurement in measurements.items() if not self.only or name in self.only]

    def _record(self, device: str) -> dict[str, Any]:
        return new_record(self.study, device, quick=self.quick)


def new_record(study: str, device: str, *, quick: bool) -> dict[str, Any]:
    """Returns what every JSON file of measurements begins with."""
    import torch

    from consequent_lab.records import provenance

    record = provenance(workers=1)
    triton = version("triton") if find_spec("triton") else None
    record["versions"] |= {"triton": triton, "cuda": torch.version.cuda}
    record["device"] = {"type": device, "name": device_name(device), "threads": torch.get_num_threads()}
    return {"study": study, "quick": quick, **record}


def _draw_again(path: Path) -> None:
    import json

    from consequent_lab.scaling import recorded_curves
    from consequent_lab.scaling_figure import draw_scaling

    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:  # neither text nor JSON
        record = None
    if not isinstance(record, dict) or record.get("study") != "scaling":
        raise ValueError(f"--draw {path}: not a file of consequent bench scaling")
    curves = [curve for curve in recorded_curves(record) if curve.points]
    draw_scaling(path.with_suffix(".png"), curves, record["device"]["name"])
    print(f"Picture: {path.with_suffix('.png')}")


def _print_tables(paths: tuple[Path, ...]) -> None:
    import json

    from consequent_lab.bench_tables import cost_table, first_step_table, growth_table

    records = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    costs = [record for record in records if record["study"] == "speed"]
    for lines in (
        cost_table(costs),
        *[first_step_table(record) for record in costs],
        *[growth_table(record) for record in records if record["study"] == "scaling"],
    ):
        if lines:
            print("\n".join(lines), end="\n\n")


def device_name(device: str) -> str:
    """Returns what measurements were taken on, in words."""
    import torch

    from consequent_lab.records import cores

    return torch.cuda.get_device_name() if device == "cuda" else f"CPU, {cores()} cores"
