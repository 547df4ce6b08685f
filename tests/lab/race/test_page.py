"""The tables of docs/race.md are those of results/race, and so is what is said of tables, digits and the GPT."""

import re
import statistics
from collections import Counter
from dataclasses import replace

import pytest
from race_page import BEST_TEST, C_VERSIONS, MLP, PAGE, RACE, ROOT, STATES, TEXT, N

from consequent_lab import cli
from consequent_lab.race.contestants import CONTESTANTS
from consequent_lab.race.curves import unpacked
from consequent_lab.race.results import Results
from consequent_lab.race.table import markdown_table, spread_of
from consequent_lab.race.tasks import TASKS

FIRST_ON_TABLES = {
    "diabetes": "C-SGD",
    "breast-cancer": "C-SGD-promise",
    "wine": "C-AdamW",
    "digits": "C-SGD-promise",
    "robot-arm": "SOAP",
}
CORRECTED_MUON = ("C-Muon", "Newton-Muon")


def test_every_file_of_results_has_its_table_on_the_page():
    named = {path.name.split(".")[0] for path in RACE.output.iterdir()}
    assert named == {results.task.name for results, _ in STATES if results.lines}
    for results, _ in STATES:
        if results.lines:
            assert markdown_table(results) in PAGE


def test_what_is_done_is_what_the_page_says():
    lines = ["| task | state |", "|---|---|", *(f"| {results.task.name} | {state} |" for results, state in STATES)]
    assert "\n".join(lines) + "\n" in PAGE
    assert all(results.lines for results, _ in STATES)
    assert f"[All {len(STATES)} tasks have results]" in TEXT


def outcome(results, measure, without=CORRECTED_MUON):
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
        for without in (CORRECTED_MUON, (*CORRECTED_MUON, "C-Adam-averaged"))
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
    ahead = f"in {table[2].split('|')[2].strip()} pairs"
    assert f"ahead of AdamW {ahead}, by its medians on four of five" in TEXT
    wins = {pair for pair, loss in losses["C-AdamW"].items() if loss < losses["AdamW"][pair]}
    on_the_arm = {pair for pair in wins if pair[0] == "table-robot-arm"}
    assert (len(wins - on_the_arm), len(on_the_arm)) == (10, 5)
    heads, cells = (line.strip("| ").split(" | ") for line in (table[0], table[2]))
    (less,) = {cells[heads.index(name)] for name in ("SOAP", "K-FAC")}
    of_adamw, of_shampoo = (cells[heads.index(name)] for name in ("AdamW", "Shampoo"))
    told = f"| against AdamW {of_adamw} (the four: 10 of 20), SOAP and K-FAC {less} each, Shampoo {of_shampoo} |"
    assert told in (ROOT / "README.md").read_text()
    decays = {name: Results.of(TASKS["table-diabetes"], RACE.output).best(name)["settings"]["decay"] for name in losses}
    assert min(decays, key=decays.get) == "C-AdamW"
    assert sorted(decays.values())[1] / decays["C-AdamW"] == pytest.approx(15, abs=0.5)
    for name in FIRST_ON_TABLES:
        medians = {
            contestant: statistics.median(loss for (task, _), loss in found.items() if task == f"table-{name}")
            for contestant, found in losses.items()
            if any(task == f"table-{name}" for task, _ in found)
        }
        assert (medians["C-AdamW"] < medians["AdamW"]) == (name != "diabetes")
        assert min(medians, key=medians.get) == FIRST_ON_TABLES[name]
    assert f"C-AdamW with {medians['C-AdamW'] / medians['AdamW']:.2g} of its test loss" in TEXT
    promised, plain = losses["C-SGD-promise"], losses["C-SGD"]
    told = f"ahead of C-SGD in {sum(promised[pair] < plain[pair] for pair in promised)} of {len(promised)} pairs"
    assert f"It is {told}" in TEXT
    assert told in " ".join((ROOT / "docs" / "choosing.md").read_text().split())
    noisy = [pair for pair in promised if pair[0] == "table-diabetes"]
    assert all(promised[pair] > losses["AdamW"][pair] for pair in noisy)
    diabetes = Results.of(TASKS["table-diabetes"], RACE.output)
    first = {name: diabetes.trials(name)[0]["score"] for name in losses}
    assert first["C-SGD-promise"] == max(score for score in first.values() if score < 1e6)


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
    firsts = [results.trials(name)[0] for name in names]
    best = [results.best(name) for name in names]
    said = re.search(
        rf"first trials, of ([\d,]+) steps, two epochs, the test loss was {N} with AdamW, \*\*{N} with C-AdamW\*\* at "
        rf"a damping of {N}, and {N} with Muon .*? damping of {N} and nearly AdamW's own best rate, {N}, and came to "
        rf"{N}; the best of AdamW's to {N}, of Muon's to {N}\.",
        TEXT,
    ).groups()
    assert {f"{line['steps']:,}" for line in firsts} == {said[0]}
    of_first, of_best = ([f"{line['score']:.3f}" for line in lines] for lines in (firsts, best))
    damping, rate = (best[1]["settings"][name] for name in ("relative_damping", "lr"))
    assert f"at {ours.median:.2f} against {adamw.median:.2f}, with a damping of {damping:.2g}" in TEXT
    assert list(said[1:5]) == [*of_first[:2], f"{firsts[1]['settings']['relative_damping']:g}", of_first[2]]
    assert list(said[5:]) == [f"{damping:.2g}", f"{rate:.5f}", of_best[1], of_best[0], of_best[2]]
    assert rate == pytest.approx(best[0]["settings"]["lr"], rel=0.05)
    ended = [sum(line["state"] == "complete" for line in results.trials(name)) for name in names]
    assert ended == [3, 3, 5]
    assert {len(results.trials(name)) for name in names} == {12}
