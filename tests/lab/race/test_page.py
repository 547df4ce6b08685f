"""docs/race.md says what results/race has."""

import re
import statistics
from pathlib import Path

import pytest

from consequent_lab import cli
from consequent_lab.race.contestants import CONTESTANTS
from consequent_lab.race.measures import Best
from consequent_lab.race.results import Results
from consequent_lab.race.states import markdown_states, state_of, states_in
from consequent_lab.race.table import markdown_table, spread_of
from consequent_lab.race.tasks import TASKS
from consequent_lab.race_command import Race

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "race.md").read_text()
TEXT = " ".join(PAGE.split())
RACE = Race(output=ROOT / "results" / "race")
STATES = states_in(RACE.output, RACE.trials, RACE.seeds)
MLP, CHINA = (Results.of(TASKS[name], RACE.output) for name in ("mlp-cifar10-b32", "siren-128-china"))


def test_every_file_of_results_has_its_table_on_the_page():
    named = {path.name.split(".")[0] for path in RACE.output.iterdir()}
    assert named == {results.task.name for results, _ in STATES if results.lines}
    for results, _ in STATES:
        if results.lines:
            assert markdown_table(results) in PAGE


def test_what_is_done_is_what_the_page_says():
    assert markdown_states(STATES) in PAGE
    assert "four of the tasks have results" in TEXT
    assert sum(bool(results.lines) for results, _ in STATES) == 4
    assert [results.task.name for results, state in STATES if state == "done"] == ["demo"]
    for name in ("K-FAC", "FOOF", "Shampoo", "C-Muon", "Newton-Muon"):
        assert not any(results.trials(name) or results.finals(name) for results, _ in STATES)


@pytest.mark.parametrize("words", [[], ["times"]])
def test_without_tasks_the_command_lists_them(words, capsys):
    assert cli.main(["race", *words, "--output", str(RACE.output)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(TASKS)
    assert "done: Adam" in next(line for line in lines if line.startswith("siren-128-china"))


def test_the_command_prints_the_tables_of_the_page(capsys):
    assert cli.main(["race", "table", "--output", str(RACE.output)]) == 0
    printed = capsys.readouterr().out
    assert printed == "".join(f"{markdown_table(results)}\n" for results, _ in STATES if results.lines)


def test_a_state_says_what_is_missing(tmp_path):
    results = Results(TASKS["table-wine"], tmp_path)
    assert state_of(results, 12, 5) == "not begun"
    trials = [{"kind": "trial", "contestant": "AdamW", "number": number} for number in range(2)]
    results.lines += trials
    assert "begun: AdamW; not begun: C-Nesterov" in state_of(results, 2, 1)
    results.lines += [{"kind": "final", "contestant": "AdamW", "seed": 0}]
    assert state_of(results, 2, 1).startswith("partly; done: AdamW; not begun: C-Nesterov")
    for name in results.task.contestants:
        results.lines += [{**line, "contestant": name} for line in results.lines[:3]]
    assert state_of(results, 2, 1) == "done"


def test_settings_at_the_end_of_a_range_have_a_star():
    starred = dict(re.findall(r"^\| (\S+) \|.*\b(\w+ \S+)\*", PAGE, re.M))
    assert starred == {"Muon": "other_lr 3e-05", "C-SGD": "relative_damping 0.92"}
    (knob,) = (knob for knob in CONTESTANTS["Muon"].knobs if knob.name == "other_lr")
    assert MLP.best("Muon")["settings"]["other_lr"] == pytest.approx(knob.low, rel=0.05)


def test_what_is_said_of_test_accuracy_is_in_the_results():
    accuracy = {name: spread_of(Best("test_accuracy", rising=True), MLP.finals(name)) for name in ("SGD", "Adam")}
    ours = [
        spread_of(Best("test_accuracy", rising=True), MLP.finals(name)) for name in ("C-SGD", "C-Adam", "C-Nesterov")
    ]
    said = re.search(r"SGD's ([\d.]+) % and Adam's ([\d.]+) % are above ([\d.]+) to ([\d.]+) % of ours", TEXT)
    medians = [accuracy["SGD"], accuracy["Adam"], *sorted(ours, key=lambda spread: spread.median)[::2]]
    assert list(said.groups()) == [f"{100 * spread.median:.4g}" for spread in medians]
    assert max(max(spread.values) for spread in ours) < min(min(spread.values) for spread in accuracy.values())


def test_what_is_said_of_the_first_trials_is_in_the_results():
    measure = MLP.task.measure
    first = {name: MLP.trials(name)[0] for name in ("C-SGD", "C-Nesterov", "C-Adam")}
    assert first["C-SGD"]["settings"] == {"lr": 0.1, "relative_damping": 0.1}
    assert first["C-Nesterov"]["settings"] == {"lr": 0.01, "relative_damping": 0.1}
    assert first["C-SGD"]["score"] > 1 < first["C-Nesterov"]["score"]
    (said,) = re.findall(r"C-Adam did, in ([\d,]+)\.", TEXT)
    assert first["C-Adam"]["score"] * first["C-Adam"]["steps"] == pytest.approx(int(said.replace(",", "")), abs=1)
    (trials, steps) = re.findall(r"after (\d) trials; the best of them needed ([\d,]+) steps", TEXT)[0]
    assert len(MLP.trials("SOAP")) == int(trials)
    assert MLP.best("SOAP")["score"] * MLP.best("SOAP")["steps"] == pytest.approx(int(steps.replace(",", "")), abs=1)
    assert measure.metric == "train_loss"


def test_costs_of_steps_are_those_that_were_measured():
    def eager(name):
        return MLP.of_kind("time", name)[-1]["milliseconds"]["eager"]["median"]

    ratios = [eager(f"C-{name}") / eager(name) for name in ("SGD", "Nesterov", "Adam")]
    said = re.search(r"cost ([\d.]+) to ([\d.]+) times those of the plain optimisers, and Muon's ([\d.]+) times", TEXT)
    found = min(ratios), max(ratios), eager("Muon") / eager("SGD")
    assert list(said.groups()) == [f"{ratio:.1f}" for ratio in found]
    seconds = {name: statistics.median(line["seconds"] for line in CHINA.finals(name)) for name in ("C-Adam", "Adam")}
    assert seconds == pytest.approx({"C-Adam": 2.0, "Adam": 0.5}, rel=0.1)
    assert [line["graph"] for line in MLP.finals("C-Adam")].count(False) == 1


def test_halving_gave_up_on_as_many_of_adams_trials_as_the_page_says():
    (trials, pruned) = re.findall(r"Of Adam's (\d+) trials (\d+) were given up", TEXT)[0]
    states = [line["state"] for line in CHINA.trials("Adam")]
    assert (len(states), states.count("pruned")) == (int(trials), int(pruned))
    assert CHINA.best("Adam")["number"] == 0
