"""docs/race.md and docs/race-tables.md, and the results that they tell of."""

from pathlib import Path

from consequent_lab.race.curves import unpacked
from consequent_lab.race.measures import Best
from consequent_lab.race.results import Results
from consequent_lab.race.table import spread_of
from consequent_lab.race.tasks import TASKS
from consequent_lab.race_command import Race

ROOT = Path(__file__).parents[3]
PAGE, TABLES = ((ROOT / "docs" / f"{name}.md").read_text() for name in ("race", "race-tables"))
TEXT = " ".join(PAGE.split())
RACE = Race(output=ROOT / "results" / "race")
STATES = [
    (results, results.state(RACE.trials, RACE.seeds))
    for results in (Results.of(task, RACE.output) for task in TASKS.values())
]
PERCEPTRONS = {batch: Results.of(TASKS[f"mlp-cifar10-b{batch}"], RACE.output) for batch in (32, 128, 512)}
MLP = PERCEPTRONS[32]
CHINA = Results.of(TASKS["siren-128-china"], RACE.output)
RESNET = Results.of(TASKS["resnet20-cifar10"], RACE.output)
C_VERSIONS = ("C-SGD", "C-Adam", "C-Nesterov")
BEST_TEST = Best("test_accuracy", rising=True)
N = r"(\d+(?:\.\d+)?)"  # a number, without the full stop of its sentence


def arrivals(results, name):
    return [results.task.measure.arrival(unpacked(line["curve"])) for line in results.finals(name)]


def accuracies(batch, names):
    return {name: spread_of(BEST_TEST, PERCEPTRONS[batch].finals(name)) for name in names}


def medians(spreads):
    return [f"{100 * spread.median:.4g}" for spread in sorted(spreads.values(), key=lambda spread: spread.median)]


def ends(task):
    """The median of a task's measure for each contestant that has finals."""
    results = Results.of(TASKS[task], RACE.output)
    found = {name: results.finals(name) for name in results.task.contestants}
    return {name: spread_of(results.task.measure, finals).median for name, finals in found.items() if finals}
