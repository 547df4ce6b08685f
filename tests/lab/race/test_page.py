"""The tables of docs/race-tables.md are those of results/race, and so is what docs/race.md says of all tasks."""

import re
import statistics
from collections import Counter
from dataclasses import replace

import pytest
from race_page import BEST_TEST, C_VERSIONS, MLP, PAGE, RACE, ROOT, STATES, TABLES, TEXT, N

from consequent_lab import cli
from consequent_lab.race.contestants import CONTESTANTS
from consequent_lab.race.curves import unpacked
from consequent_lab.race.results import Results
from consequent_lab.race.table import markdown_table, spread_of
from consequent_lab.race.tasks import TASKS


def test_every_file_of_results_has_its_table():
    named = {path.name.split(".")[0] for path in RACE.output.iterdir()}
    assert named == {results.task.name for results, _ in STATES}
    tables = [f"## {results.task.name}\n\n{markdown_table(results)}" for results, _ in STATES]
    assert TABLES.endswith("\n\n" + "\n".join(tables))


def outcome(results, measure, without=("C-Muon",)):
    """The cells of the page's first table of results: who is best of ours and of the others, who is ahead.

    For that all seeds of the best of ours must be better than all of all others; one other suffices to be behind.
    """
    is_steps = hasattr(measure, "arrival")
    sign = -1 if measure.rising and not is_steps else 1
    sides = {True: [], False: []}
    for name in CONTESTANTS:
        if results.finals(name) and name not in without:
            sides[name.startswith("C-")].append((name, spread_of(measure, results.finals(name))))
    best = {ours: min(side, key=lambda one: sign * one[1].median) for ours, side in sides.items()}
    seeds = [sign * value for value in best[True][1].values]
    theirs = [[sign * value for value in spread.values] for _, spread in sides[False]]
    verdict = "level"
    if max(seeds) < min(map(min, theirs)):
        verdict = "ahead"
    elif any(max(one) < min(seeds) for one in theirs):
        verdict = "**behind**"
    form = (",.0f",) if is_steps else (".3g", measure.metric)
    medians = [(name, replace(spread, values=(spread.median,))) for name, spread in (best[True], best[False])]
    shown = [f"{name} {median.text(*form)}" for name, median in medians]
    return f"| {verdict} | {measure} | {shown[0]} | {shown[1]} |"


def test_the_result_of_each_task_is_that_of_its_table():
    lines = PAGE[PAGE.index("| task | ours are |") :].split("\n\n")[0].splitlines()[2:]
    for results, _ in STATES:
        if any(results.finals(name) for name in (*C_VERSIONS, "C-AdamW")):
            measures = [results.task.measure]
            if results.task.name.startswith("mlp-") and measures != [BEST_TEST]:
                measures.append(BEST_TEST)
            for measure in measures:
                assert outcome(results, measure) in lines.pop(0)
    assert not lines


def test_the_readme_has_the_tally():
    verdicts, others = (
        Counter(outcome(results, results.task.measure, without).split("|")[1].strip(" *") for results, _ in STATES)
        for without in (("C-Muon",), ("C-Muon", "C-Adam-averaged"))
    )
    tally = f"ahead in {verdicts['ahead']}, level in {verdicts['level']} and behind in {verdicts['behind']}"
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"Of the {verdicts.total()} tasks of [the race](docs/race.md) the best of ours is {tally}" in readme
    assert "({ahead}, {level} and {behind} without C-Adam-averaged)".format(**others) in readme


@pytest.mark.parametrize("words", [[], ["times"]])
def test_without_tasks_the_command_lists_them(words, capsys):
    assert cli.main(["race", *words, "--output", str(RACE.output)]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == f"Results in {RACE.output.resolve()}:"
    assert [line.split()[0] for line in lines] == list(TASKS)
    assert "done: SGD" in next(line for line in lines if line.startswith("mlp-cifar10-b32"))


def test_the_command_prints_the_tables_of_the_page(capsys):
    assert cli.main(["race", "table", "--output", str(RACE.output)]) == 0
    printed = capsys.readouterr().out
    assert printed == "".join(f"{markdown_table(results)}\n" for results, _ in STATES if results.lines)


def test_a_state_says_what_is_missing(tmp_path):
    results = Results(TASKS["table-wine"], tmp_path)
    assert results.state(12, 5) == "not begun"
    trials = [{"kind": "trial", "contestant": "AdamW", "number": number, "state": "pruned"} for number in range(2)]
    results.lines += trials
    assert "begun: AdamW; not begun: C-Nesterov" in results.state(2, 1)
    results.lines += [{"kind": "final", "contestant": "AdamW", "seed": 0}]
    assert results.state(2, 1).startswith("partly; done: AdamW; not begun: C-Nesterov")
    for name in results.task.contestants:
        results.lines += [{**line, "contestant": name} for line in results.lines[:3]]
    assert results.state(2, 1) == "done"


def test_settings_at_the_end_of_a_range_have_a_star():
    (row,) = (line for line in markdown_table(MLP).splitlines() if line.startswith("| Muon |"))
    assert "other_lr 3e-05*" in row
    (knob,) = (knob for knob in CONTESTANTS["Muon"].knobs if knob.name == "other_lr")
    assert MLP.best("Muon")["settings"]["other_lr"] == pytest.approx(knob.low, rel=0.05)


def test_pairs_of_tables_are_those_in_the_results():
    losses = {}
    for name in TASKS:
        if name.startswith("table-"):
            results = Results.of(TASKS[name], RACE.output)
            for contestant in results.task.contestants:
                for line in results.finals(contestant):
                    losses.setdefault(contestant, {})[name, line["seed"]] = unpacked(line["curve"])[-1]["test_loss"]
    table = PAGE[PAGE.index("| ahead of |") :].split("\n\n")[0].splitlines()
    others = [cell.strip() for cell in table[0].strip("|").split("|")][1:]
    for line in table[2:]:
        ours, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        for other, cell in zip(others, cells, strict=True):
            pairs = losses[ours].keys() & losses[other].keys()
            assert cell == f"{sum(losses[ours][pair] < losses[other][pair] for pair in pairs)} of {len(pairs)}"
    wins = table[2].split("|")[2].strip()
    assert f"C-AdamW is ahead of AdamW in {wins} pairs, by its medians on four of five" in TEXT
    for name in ("diabetes", "breast-cancer", "wine", "digits", "robot-arm"):
        ours, theirs = (
            {seed: loss for (task, seed), loss in losses[contestant].items() if task == f"table-{name}"}
            for contestant in ("C-AdamW", "AdamW")
        )
        medians = [statistics.median(one.values()) for one in (ours, theirs)]
        assert (medians[0] < medians[1]) == (name != "diabetes")
        if name == "diabetes":
            assert all(ours[seed] > theirs[seed] for seed in ours)
    assert f"C-AdamW with {medians[0] / medians[1]:.2g} of its test loss" in TEXT


def test_what_is_said_of_the_gpt_is_in_the_results():
    results = Results.of(TASKS["gpt-bytes"], RACE.output)
    names = ("AdamW", "C-AdamW", "Muon")
    adamw, ours, muon = (spread_of(results.task.measure, results.finals(name)) for name in names)
    assert {len(results.finals(name)) for name in names} == {3}
    assert max(ours.values) < min(adamw.values)
    assert max(muon.values) < min(ours.values)
    said = re.search(rf"{N} to {N} against {N} to {N}\. Muon's {N} is far below both", TEXT).groups()
    ends = [min(ours.values), max(ours.values), min(adamw.values), max(adamw.values), muon.median]
    assert list(said) == [f"{one:.3f}" for one in ends]
    firsts = [results.trials(name)[0]["score"] for name in ("C-AdamW", "AdamW")]
    assert "was behind AdamW: {:.3f} against {:.3f} in the first trials".format(*firsts) in TEXT
    damping = results.best("C-AdamW")["settings"]["relative_damping"]
    assert f"The winning trial has a damping of {damping:.2g}" in TEXT
    ended = [sum(line["state"] == "complete" for line in results.trials(name)) for name in names]
    assert (ended, {len(results.trials(name)) for name in names}) == ([3, 3, 5], {12})
