"""What is done of every task, by the lines in a folder."""

from dataclasses import dataclass
from pathlib import Path

from consequent_lab.race.results import Results
from consequent_lab.race.tasks import TASKS


@dataclass(frozen=True)
class State:
    """How far a task is.

    Attributes:
        results: its lines.
        whole: contestants with all of their finals.
        part: contestants with some lines and not all.
        absent: contestants without any.
    """

    results: Results
    whole: tuple[str, ...]
    part: tuple[str, ...]
    absent: tuple[str, ...]

    def __str__(self) -> str:
        if not self.part and not self.absent:
            return "done"
        if not self.whole and not self.part:
            return "not begun"
        parts = {"done": self.whole, "begun": self.part, "not begun": self.absent}
        return "partly; " + "; ".join(f"{word}: {', '.join(names)}" for word, names in parts.items() if names)


def state_of(results: Results, trials: int, seeds: int) -> State:
    """Returns how far a task is, where every contestant is to have so many trials and finals."""
    found: dict[str, list[str]] = {"whole": [], "part": [], "absent": []}
    for name in results.task.contestants:
        is_searched = results.task.settings_from is not None or len(results.trials(name)) >= trials
        if is_searched and len(results.finals(name)) >= seeds:
            found["whole"].append(name)
        else:
            found["part" if results.trials(name) or results.finals(name) else "absent"].append(name)
    return State(results, *(tuple(names) for names in found.values()))


def states_in(folder: Path, trials: int, seeds: int) -> list[State]:
    """Returns the states of all tasks, in the order of work."""
    return [state_of(Results.of(task, folder), trials, seeds) for task in TASKS.values()]


def markdown_states(states: list[State]) -> str:
    """Returns them as a table for the docs."""
    lines = ["| task | state |", "|---|---|", *(f"| {state.results.task.name} | {state} |" for state in states)]
    return "\n".join(lines) + "\n"
