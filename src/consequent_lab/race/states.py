"""What is done of every task, by the lines in a folder."""

from pathlib import Path

from consequent_lab.race.results import Results
from consequent_lab.race.tasks import TASKS


def state_of(results: Results, trials: int, seeds: int) -> str:
    """Returns how far a task is, where every contestant is to have so many trials and finals."""
    names: dict[str, list[str]] = {"done": [], "begun": [], "not begun": []}
    for name in results.task.contestants:
        is_searched = results.task.settings_from is not None or len(results.trials(name)) >= trials
        if is_searched and len(results.finals(name)) >= seeds:
            names["done"].append(name)
        else:
            names["begun" if results.trials(name) or results.finals(name) else "not begun"].append(name)
    for state in ("done", "not begun"):
        if len(names[state]) == len(results.task.contestants):
            return state
    return "partly; " + "; ".join(f"{state}: {', '.join(some)}" for state, some in names.items() if some)


def states_in(folder: Path, trials: int, seeds: int) -> list[tuple[Results, str]]:
    """Returns what there is of all tasks, in the order of work, and how far each is."""
    known = [Results.of(task, folder) for task in TASKS.values()]
    return [(results, state_of(results, trials, seeds)) for results in known]
