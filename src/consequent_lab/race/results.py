"""What is kept of a race: a line of JSON for every trial, every final and every step time, written as it comes.

A race that was stopped anywhere goes on from its lines: they are all that it knows.
"""

import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from consequent_lab.race.task import Task
from consequent_lab.records import plain_numbers

Line = dict[str, Any]

DIGITS = 6


@dataclass
class Results:
    """The lines of a task so far, and their file; `.gz` beside it is read first, if it is there."""

    task: Task
    path: Path
    lines: list[Line] = field(default_factory=list)

    @classmethod
    def of(cls, task: Task, folder: Path) -> "Results":
        """Returns what a folder has of a task.

        Raises:
            ValueError: if it was made by another recipe of the same name.
        """
        path = folder / f"{task.name}.jsonl"
        results = cls(task, path)
        for file in (path.with_suffix(".jsonl.gz"), path):
            if file.exists():
                results.lines += read_lines(file)
        for line in results.lines:
            if line["recipe"] != task.recipe():
                raise ValueError(
                    f"{path} has results of another recipe, {line['recipe']}, not {task.recipe()}: name another "
                    "--output"
                )
        return results

    def add(self, line: Line) -> None:
        """Keeps a line, in the file at once."""
        self.lines.append(line)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        is_cut_off = self.path.exists() and self.path.read_bytes()[-1:] not in (b"", b"\n")
        with self.path.open("a") as file:
            file.write("\n" * is_cut_off + json.dumps(line, allow_nan=False) + "\n")

    def of_kind(self, kind: str, contestant: str) -> list[Line]:
        """Returns a contestant's lines of a kind: "trial", "final" or "time"."""
        return [line for line in self.lines if line["kind"] == kind and line["contestant"] == contestant]

    def trials(self, contestant: str) -> list[Line]:
        """Returns the finished trials in their order."""
        return sorted(self.of_kind("trial", contestant), key=lambda line: int(line["number"]))

    def untried_choices(self, contestant: str) -> dict[int, dict[str, float]]:
        """Returns those that the task gives and that no trial has had, by the number of their trial."""
        tried = {line["number"] for line in self.trials(contestant)}
        choices = enumerate(self.task.choices.get(contestant, ()))
        return {number: choice for number, choice in choices if number not in tried}

    def finals(self, contestant: str) -> list[Line]:
        """Returns the finals with the settings that were chosen, a seed each; others had been chosen before."""
        best = self.best(contestant)
        finals = [
            line for line in self.of_kind("final", contestant) if best is None or line["settings"] == best["settings"]
        ]
        return sorted(finals, key=lambda line: int(line["seed"]))

    def state(self, trials: int, seeds: int) -> str:
        """Returns how far the task is, where every contestant is to have so many trials and finals."""
        names: dict[str, list[str]] = {"done": [], "begun": [], "not begun": []}
        for name in self.task.contestants:
            is_searched = self.task.settings_from is not None or len(self.trials(name)) >= trials
            is_searched = is_searched and not self.untried_choices(name)
            if is_searched and len(self.finals(name)) >= seeds:
                names["done"].append(name)
            else:
                names["begun" if self.trials(name) or self.finals(name) else "not begun"].append(name)
        for state in ("done", "not begun"):
            if len(names[state]) == len(self.task.contestants):
                return state
        return "partly; " + "; ".join(f"{state}: {', '.join(some)}" for state, some in names.items() if some)

    def best(self, contestant: str) -> Line | None:
        """Returns the best trial that was run to its end."""
        ended = [line for line in self.trials(contestant) if line["state"] == "complete"]
        return min(ended, key=lambda line: float(line["score"]), default=None)


def line_of(task: Task, kind: str, contestant: str, **content: Any) -> Line:
    """Returns a line; numbers that are not finite become null, settings keep all their digits."""
    settings = content.pop("settings")
    rest: Line = plain_numbers(content, DIGITS)
    return {"kind": kind, "recipe": task.recipe(), "contestant": contestant, "settings": settings, **rest}


def seconds_until(step: float, line: Line, way: str) -> float | None:
    """Returns how long so many steps take by a line of times, if they were timed in this way."""
    if way not in line["milliseconds"]:
        return None
    later = float(line["milliseconds"][way]["median"])
    first = line["first"] if way == "eager" and "first" in line else {"steps": 0, "milliseconds": 0.0}
    count = min(step, first["steps"])
    return (count * float(first["milliseconds"]) + (step - count) * later) / 1e3


def read_lines(path: Path) -> list[Line]:
    """Returns the lines of a file, plain or packed; one that was cut off is passed over."""
    opened: Callable[..., Any] = gzip.open if path.suffix == ".gz" else open
    lines: list[Line] = []
    with opened(path, "rt") as file:
        for text in file:
            try:
                lines.append(json.loads(text))
            except json.JSONDecodeError:
                continue
    return lines
