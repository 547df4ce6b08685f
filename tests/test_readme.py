"""The numbers of README, docs/demo.md, docs/recipes.md and docs/paper.md are those in results/."""

import json
import pathlib
import re
from collections import Counter
from statistics import fmean
from typing import get_args

import pytest

from consequent_lab.paper import mlp, resnet20
from consequent_lab.paper.experiments import experiments, find
from consequent_lab.paper.findings import KINDS, Verdict
from consequent_lab.race.results import Results
from consequent_lab.race.table import headings, markdown_rows, rows, spread_of
from consequent_lab.race.tasks import DEMO, TASKS

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def page(name):
    return (ROOT / "docs" / f"{name}.md").read_text()


def prose(name):
    return " ".join(page(name).split())


def race(task):
    return Results.of(TASKS[task], ROOT / "results" / "race")


def cells_of(task):
    """The medians in a task's table: {contestant: {heading: cell}}."""
    heads, found = headings(race(task)), rows(race(task))
    return {row.contestant: dict(zip(heads, (cell.split(" (")[0] for cell in row.cells), strict=True)) for row in found}


IN_RESULTS = {
    "perceptron of eight hidden layers, CIFAR-10": "mlp-cifar10-b128",
    "the same, tuned for it": "mlp-cifar10-b128-test",
    "ResNet-20, 100 epochs, cutout": "resnet20-cifar10-cutout",
    "ResNet-20, not augmented": "resnet20-cifar10-train",
    "three pictures as a SIREN, full batch": "siren-128",
    "three larger ones, in batches": "siren-256",
    "a byte-level GPT": "gpt-bytes",
}


def test_every_cell_of_the_readmes_results():
    table = README.split("| task | measured | ours | others |\n")[1].split("\n\n")[0]
    lines = [line.strip("| ").split(" | ") for line in table.splitlines()[1:]]
    assert [task for task, *_ in lines] == list(IN_RESULTS)
    for task, measured, ours, others in lines:
        seen = []
        for cell in re.split(", (?=\\*|[A-Z])", f"{ours}, {others}"):
            name, value = cell.strip("*").split(" ", 1)
            if task.startswith("three"):
                races = [race(f"{IN_RESULTS[task]}-{picture}") for picture in ("china", "flower", "astronaut")]
                decibels = [spread_of(one.task.measure, one.finals(name)).median for one in races]
                assert value == f"{min(decibels):.0f}–{max(decibels):.0f} dB", cell
            else:
                assert value == cells_of(IN_RESULTS[task])[name][measured], cell
            seen.append((float(re.search(r"[\d.,]+$", value.split()[0])[0].replace(",", "")), "**" in cell))
        best = (min if re.search("steps|loss", measured) else max)(value for value, _ in seen)
        assert all(is_bold == (value == best) for value, is_bold in seen), task


def test_the_rates_are_those_of_the_page_with_the_reasons():
    of_readme, of_page = (
        re.findall(r"^\| ((?:SGD|Adam)[^|]*?) \| ([^|]*?) \|", text, re.M) for text in (README, page("choosing"))
    )
    assert (len(of_readme), of_readme) == (3, of_page)


def test_the_demo():
    lines = json.loads((ROOT / "results" / "demo.json").read_text())["lines"]
    results = Results(TASKS[DEMO], ROOT, lines)
    assert markdown_rows(results) in page("demo")
    steps = {name: spread_of(results.task.measure, results.finals(name)).median for name in results.task.contestants}
    times = {name: results.of_kind("time", name)[-1]["milliseconds"]["eager"]["median"] for name in steps}
    seconds = {name: times[name] * count for name, count in steps.items()}
    assert max(steps["C-SGD"], steps["C-Adam"]) < min(steps[name] for name in ("SGD", "Adam", "Muon"))
    assert min(seconds["C-SGD"], seconds["C-Adam"]) > max(seconds["SGD"], seconds["Adam"])
    ratios = times["C-SGD"] / times["SGD"], times["C-Adam"] / times["Adam"]
    assert "C-SGD takes {:.1f} of SGD's time for a step, C-Adam {:.1f} of Adam's".format(*ratios) in prose("demo")


def test_what_the_recipes_gave():
    told = re.search(r"had \[(\S+) % of .*?, and (\S+) % with .*? besides (\S+) and (\S+) %\.", prose("recipes"))
    both = [cells_of(f"resnet20-cifar10{task}") for task in ("", "-cutout")]
    found = [cells[name]["test accuracy at the end"] for cells in both for name in ("C-Nesterov", "Nesterov-BN")]
    assert [f"{one} %" for one in told.groups()] == found


@pytest.fixture(scope="module")
def resnet20_finding():
    return resnet20.finding(ROOT / "results" / "paper")


def test_the_runs_of_resnet20_are_those_in_results(resnet20_finding):
    table = resnet20_finding.tables[0]
    heading, section = page("paper").split("| ResNet-20, CIFAR-10 |")[1].split("\n", 1)
    names = [name.replace("99.99 %", "iteration of 99.99 %") for name in heading.strip("| ").split(" | ")]
    wanted = ["contestant", *(name.removesuffix(" at iteration") for name in names)]
    lines = [line.strip("| ").split(" | ") for line in section.split("\n\n")[0].splitlines()[1:]]
    for line, row in zip(lines, table.rows, strict=True):
        found = [dict(zip(table.columns, row, strict=True))[name] for name in wanted]
        shown = [f"{value:g}" if isinstance(value, float) else str(value) for value in found]
        assert line == [re.sub(r"; \d seeds\)", ")", value) for value in shown]


def measured_of(finding, words):
    (statement,) = (statement for statement in finding.statements if words in statement.paper)
    return statement


def test_what_is_said_of_resnet20_is_what_was_found(resnet20_finding):
    text = prose("paper")
    crossing = re.match(r"([\d,]+) ", measured_of(resnet20_finding, "finally crossed").measured)[1]
    assert f"loss at about {round(int(crossing.replace(',', '')), -3):,} (the paper: 25,000)" in text
    early, late = re.search(r"BatchNorm has the lower loss until iteration ([\d,]+) to ([\d,]+)", text).groups()
    assert f"({early}–{late}; 9 pairs" in measured_of(resnet20_finding, "in the beginning").measured
    said = re.search(r"loss is ([\d.]+) decades below the SGD control's \(SGD's: ([\d.]+)\) and ([\d.]+) below", text)
    better, plain = (measured_of(resnet20_finding, words) for words in ("also better than", "Nesterov respectively"))
    control, with_norm = re.findall(r"below SGD\S* control \+([\d.]+)", better.measured)
    assert said.groups() == (control, re.search(r"C-SGD below SGD \+([\d.]+)", plain.measured)[1], with_norm)


def test_test_accuracies_of_perceptrons_are_as_is_said():
    table = mlp.finding(ROOT / "results" / "paper").tables[1]
    found = {}
    for row in table.rows:
        found.setdefault(row[0], []).append(100 * row[table.columns.index("test accuracy")])
    ranges = r"\((CIFAR-10(?: NF)?): ([\d.]+) %.*?, ([\d.]+) to ([\d.]+).*?; SGD ([\d.]+), ([\d.]+) to ([\d.]+)"
    for name, *numbers in re.findall(ranges, prose("paper")):
        expected = [of(found[f"{name} {label}"]) for label in ("C-SGD", "SGD") for of in (fmean, min, max)]
        assert [float(number) for number in numbers] == pytest.approx(expected, abs=0.051)


def test_how_many_statements_hold_is_what_was_found():
    said = re.findall(r"^\| ([^|]+?)" + r" \| (\d+)" * 5 + r" \|$", page("paper"), re.M)
    found = Counter(
        (s.kind, s.verdict) for f in find(list(experiments()), ROOT / "results" / "paper") for s in f.statements
    )
    for (title, *numbers), (kind, expected_title) in zip(said, KINDS.items(), strict=True):
        counts = [found[kind, verdict] for verdict in get_args(Verdict)]
        assert (title, *map(int, numbers)) == (expected_title, sum(counts), *counts)
