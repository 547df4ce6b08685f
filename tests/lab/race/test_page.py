"""docs/race.md says what results/race has."""

import json
import re
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from consequent.maths.damping import DEFAULT
from consequent_lab import cli
from consequent_lab.race.contestants import CONTESTANTS
from consequent_lab.race.curves import unpacked
from consequent_lab.race.measures import Best
from consequent_lab.race.results import Results, seconds_until
from consequent_lab.race.table import headings, markdown_table, rows, spread_of
from consequent_lab.race.tasks import TASKS
from consequent_lab.race_command import Race

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "race.md").read_text()
TEXT = " ".join(PAGE.split())
RACE = Race(output=ROOT / "results" / "race")
STATES = [
    (results, results.state(RACE.trials, RACE.seeds))
    for results in (Results.of(task, RACE.output) for task in TASKS.values())
]
PERCEPTRONS = {batch: Results.of(TASKS[f"mlp-cifar10-b{batch}"], RACE.output) for batch in (32, 128, 512)}
MLP, CHINA = PERCEPTRONS[32], Results.of(TASKS["siren-128-china"], RACE.output)
RESNET = Results.of(TASKS["resnet20-cifar10"], RACE.output)
C_VERSIONS = ("C-SGD", "C-Adam", "C-Nesterov")
FIRST_ON_TABLES = {
    "diabetes": "C-SGD",
    "breast-cancer": "K-FAC",
    "wine": "C-AdamW",
    "digits": "C-AdamW",
    "robot-arm": "SOAP",
}
CORRECTED_MUON = ("C-Muon", "Newton-Muon")
BEST_TEST = Best("test_accuracy", rising=True)


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


def outcome(results, measure):
    """The cells of the page's first table of results: who is best of ours and of the others, and who is ahead."""
    is_steps = hasattr(measure, "arrival")
    sign = -1 if measure.rising and not is_steps else 1
    best = {}
    for name in CONTESTANTS:
        if results.finals(name) and name not in CORRECTED_MUON:
            side, spread = name.startswith("C-"), spread_of(measure, results.finals(name))
            if side not in best or sign * spread.median < sign * best[side][1].median:
                best[side] = (name, spread)
    (lows, highs) = (
        [pick(sign * value for value in best[side][1].values) for side in (True, False)] for pick in (min, max)
    )
    verdict = "ahead" if highs[0] < lows[1] else "**behind**" if highs[1] < lows[0] else "level"
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
    trials = [{"kind": "trial", "contestant": "AdamW", "number": number} for number in range(2)]
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


def accuracies(batch, names):
    return {name: spread_of(BEST_TEST, PERCEPTRONS[batch].finals(name)) for name in names}


def medians(spreads):
    return [f"{100 * spread.median:.4g}" for spread in sorted(spreads.values(), key=lambda spread: spread.median)]


def test_what_is_said_of_test_accuracy_is_in_the_results():
    said = re.search(
        r"At 32 SGD's ([\d.]+) % and Adam's ([\d.]+) % are above ([\d.]+) to ([\d.]+) % of ours, "
        r"at 128 Adam's ([\d.]+) % and Muon's ([\d.]+) % above ([\d.]+) to ([\d.]+) %, "
        r"at 512 Adam's ([\d.]+) % above ([\d.]+) to ([\d.]+) %",
        TEXT,
    ).groups()
    averaged = ("C-Adam-averaged", "C-Nesterov-averaged")
    ours = {32: (*C_VERSIONS, averaged[0]), 128: C_VERSIONS + averaged, 512: ("C-SGD", "C-Adam", averaged[0])}
    better = {32: ("SGD", "Adam"), 128: ("Adam", "Muon"), 512: ("Adam",)}
    found = []
    for batch, names in ours.items():
        of_ours, of_better = accuracies(batch, names), accuracies(batch, better[batch])
        found += [*reversed(medians(of_better)), *medians(of_ours)[:: len(names) - 1]]
        assert max(max(spread.values) for spread in of_ours.values()) < min(of_better["Adam"].values)
        assert medians(of_ours)[-1] < medians(of_better)[0]
    assert list(said) == found


def arrivals(results, name):
    return [results.task.measure.arrival(unpacked(line["curve"])) for line in results.finals(name)]


def test_how_far_muon_is_behind():
    said = re.search(r"by (\d+) % of the steps, (\d+) %, (\d+) %", TEXT).groups()
    steps = [{n: statistics.median(arrivals(r, n)) for n in ("C-Adam", "Muon", "C-SGD")} for r in PERCEPTRONS.values()]
    assert [f"{100 * (found['Muon'] / found['C-Adam'] - 1):.0f}" for found in steps] == list(said)
    assert all(found["C-Adam"] <= found["C-SGD"] < found["Muon"] for found in steps)
    for results in PERCEPTRONS.values():
        for name in ("Adam", "SGD", "Nesterov"):
            assert not any(arrivals(results, name))


def test_the_first_trials_are_those_in_the_results():
    table = PAGE[PAGE.index("| contestant | settings | 32 |") :].split("\n\n")[0]
    for line in table.splitlines()[2:]:
        name, settings, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        for results, cell in zip(PERCEPTRONS.values(), cells, strict=True):
            trials = results.trials(name)
            if not trials:
                assert cell == "not run"
                continue
            assert trials[0]["number"] == 0
            assert settings == ", ".join(f"{key} {value:g}" for key, value in trials[0]["settings"].items())
            step = results.task.measure.arrival(unpacked(trials[0]["curve"]))
            assert cell == ("–" if step is None else f"{step:,}")


def test_searches_that_were_not_finished():
    (trials, *steps) = re.search(
        r"after (\d) trials each the best had needed ([\d,]+) and ([\d,]+) steps", TEXT
    ).groups()
    for name, said in zip(("K-FAC", "SOAP"), steps, strict=True):
        assert len(MLP.trials(name)) == int(trials)
        assert MLP.best(name)["score"] * MLP.best(name)["steps"] == pytest.approx(int(said.replace(",", "")), abs=1)


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
    told = f"| AdamW {of_adamw} (the four: 10 of 20), SOAP and K-FAC {less} each, Shampoo {of_shampoo} |"
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


def ends(task):
    """The median of a task's measure for each contestant that has finals."""
    results = Results.of(TASKS[task], RACE.output)
    found = {name: results.finals(name) for name in results.task.contestants}
    return {name: spread_of(results.task.measure, finals).median for name, finals in found.items() if finals}


N = r"(\d+(?:\.\d+)?)"  # a number, without the full stop of its sentence


def percent(values):
    return [f"{100 * value:.4g}" for value in sorted(values)]


def test_the_race_of_resnet20_is_in_its_file():
    results = RESNET
    ours, theirs = (spread_of(results.task.measure, results.finals(name)) for name in ("C-Nesterov", "Nesterov-BN"))
    assert f"[{100 * ours.median:.4g} % after 100]" in TEXT
    assert f"ends {100 * (theirs.median - ours.median):.2g} points below" in TEXT
    assert len(ours.values) == len(theirs.values) == 3
    assert max(ours.values) < min(theirs.values)
    assert sum(value >= 0.9125 for value in theirs.values) == 1
    assert {len(results.trials(name)) for name in ("C-Nesterov", "Nesterov-BN")} == {12}
    assert {results.best(name)["number"] for name in ("C-Nesterov", "Nesterov-BN")} == {0}


def test_the_race_of_resnet20_in_20_epochs_and_with_cutout():
    spreads = {
        name: [
            spread_of(results.task.measure, results.finals(contestant)) for contestant in ("C-Nesterov", "Nesterov-BN")
        ]
        for name in ("20ep", "cutout")
        for results in [Results.of(TASKS[f"resnet20-cifar10-{name}"], RACE.output)]
    }
    ours, theirs = spreads["20ep"]
    assert (len(ours.values), len(theirs.values)) == (5, 5)
    assert min(ours.values) > max(theirs.values)
    ahead = f"{100 * (ours.median - theirs.median):.3g}"
    assert f"**After 20 epochs it is ahead**, by {ahead} points" in TEXT
    ours, theirs = spreads["cutout"]
    assert (len(ours.values), len(theirs.values)) == (3, 3)
    assert min(ours.values) > 0.9125
    assert max(ours.values) < min(theirs.values)
    assert sum(value >= 0.92 for value in theirs.values) == 1
    behind = f"{100 * (theirs.median - ours.median):.2g}"
    assert f"{behind} below with cutout, and {ahead} above after 20 epochs" in TEXT
    both = [f"{100 * one.median:.4g} %" for one in (ours, theirs)]
    assert "With cutout it is, at {}, but with BatchNorm cutout gives {}".format(*both) in TEXT
    assert f"**With cutout the first is**: {both[0]}, all three seeds above it" in TEXT
    assert f"with BatchNorm it gives {both[1]}, and all of its seeds are ahead, one of them above 92 %" in TEXT
    decay = RESNET.best("Nesterov-BN")["settings"]["decay"]
    more = [line for line in RESNET.trials("Nesterov-BN") if line["settings"]["decay"] > decay]
    assert {line["state"] for line in more} == {"pruned"}
    assert TASKS["resnet20-cifar10-20ep"].epochs == RESNET.task.search_epochs


def test_resnet20_to_all_of_its_training_images():
    results = Results.of(TASKS["resnet20-cifar10-train"], RACE.output)
    ours, theirs = (arrivals(results, name) for name in ("C-Nesterov", "Nesterov-BN"))
    assert len(ours) == len(theirs) == 3
    assert max(ours) < min(theirs)
    assert f"after {statistics.median(ours) / statistics.median(theirs):.2f} of the steps" in TEXT
    best = [spread_of(BEST_TEST, results.finals(n)).median for n in ("Nesterov-BN", "C-Nesterov")]
    assert f"{100 * (best[0] - best[1]):.0f} points fewer of the test images" in TEXT
    assert f"**Lost: test accuracy**, by {100 * (best[0] - best[1]):.0f} points" in TEXT
    first, second = results.trials("Muon-BN")
    assert f"arrived after {results.task.measure.arrival(unpacked(first['curve'])):,} steps" in TEXT
    assert second["state"] == "pruned"


def explored():
    """The single runs before the race of ResNet-20, and the settings that C-Nesterov has in it."""
    path = ROOT / "results" / "resnet20-exploration.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()], RESNET.best("C-Nesterov")["settings"]


def test_what_60_epochs_gave_is_in_the_file_of_single_runs():
    lines, settings = explored()
    long = [line for line in lines if line["whole"] and line["epochs"] == 60 and line.get("half")]
    shorter = {
        name: [line["curve"][-1]["test_accuracy"] for line in long if (line["contestant"], line["settings"]) == key]
        for name, key in {
            "C-": ("C-Nesterov", settings),
            "BN": ("Nesterov-BN", RESNET.best("Nesterov-BN")["settings"]),
        }.items()
    }
    said = re.search(
        rf"ended at {N} % \({N}, {N}, {N}\), and with BatchNorm at {N} % \({N}, {N}\)\. "
        rf"So BatchNorm gains {N} points from 60 to 100 epochs, the other {N}",
        TEXT,
    ).groups()
    medians = {name: statistics.median(found) for name, found in shorter.items()}
    assert list(said[:7]) == [
        *percent([medians["C-"]]),
        *percent(shorter["C-"]),
        *percent([medians["BN"]]),
        *percent(shorter["BN"]),
    ]
    after_100 = ends("resnet20-cifar10")
    gains = [100 * (after_100["Nesterov-BN"] - medians["BN"]), 100 * (after_100["C-Nesterov"] - medians["C-"])]
    assert [float(number) for number in said[7:]] == pytest.approx(gains, abs=0.005)
    half = [line["curve"][-1]["test_accuracy"] for line in long if line["settings"] == settings | {"decay": 5e-4}]
    assert f"Half the decay ended at {' '.join(percent(half))} % after 60, one run" in TEXT


def test_what_10_epochs_gave_is_in_the_file_of_single_runs():
    lines, settings = explored()
    short = [line for line in lines if line["epochs"] == 10 and line.get("half") and not line["whole"]]
    with_start = {
        start: 100 * line["curve"][-1]["test_accuracy"]
        for start in ("zero", "tenth", "same")
        for line in short
        if line["start"] == start and line["settings"] == settings
    }
    said = re.search(r"end at ([\d.]+) %; with a tenth [^;]* at ([\d.]+) %; with zeros only .*? at ([\d.]+) %", TEXT)
    assert list(said.groups()) == [f"{accuracy:.4g}" for accuracy in with_start.values()]
    decays = {
        line["settings"]["decay"]: line["curve"][-1]["test_accuracy"]
        for line in short
        if line["start"] == "tenth" and line["settings"] == settings | {"decay": line["settings"]["decay"]}
    }
    assert f"{' % to '.join(percent([decays[2e-4], decays[2e-3]]))} % between decays" in TEXT
    counts = re.search(r"C-Nesterov's in (\d+) of them, BatchNorm's in (\w+), with one rate", TEXT).groups()
    with_norm = [line for line in lines if line["contestant"] == "Nesterov-BN"]
    assert counts == (str(sum(line["contestant"] == "C-Nesterov" for line in lines)), {6: "six"}[len(with_norm)])
    assert {line["settings"]["lr"] for line in with_norm} == {0.1}
    plain = {
        line["contestant"]: line["curve"][-1]["test_accuracy"]
        for line in short
        if line["start"] == ("same" if line["contestant"].endswith("-BN") else "tenth")
        and line["settings"].get("decay") != 5e-5
    }
    said = re.search(
        rf"Muon {N} %, where [^;]* {N} %; AdamW {N} %, Nesterov {N} %; Nesterov with BatchNorm {N} %", TEXT
    )
    names = ("Muon", "AdamW", "Nesterov", "Nesterov-BN")
    muon, *others = (f"{100 * plain[name]:.4g}" for name in names)
    assert list(said.groups()) == [muon, f"{with_start['tenth']:.4g}", *others]
    with_zeros = [line["curve"][-1] for line in lines if line["whole"] and line["start"] == "zero"]
    assert f"and ended at {100 * max(end['test_accuracy'] for end in with_zeros):.1f} % at best" in TEXT


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
    assert f"at {ours.median:.2f} against {adamw.median:.2f}, with five times the default damping" in TEXT
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
    assert list(said[1:5]) == [*of_first[:2], f"{firsts[1]['settings']['relative_damping']:g}", of_first[2]]
    assert list(said[5:]) == [f"{damping:.2g}", f"{rate:.5f}", of_best[1], of_best[0], of_best[2]]
    assert rate == pytest.approx(best[0]["settings"]["lr"], rel=0.05)
    assert damping / DEFAULT.value == pytest.approx(5, abs=0.2)
    ended = [sum(line["state"] == "complete" for line in results.trials(name)) for name in names]
    assert ended == [3, 3, 5]
    assert {len(results.trials(name)) for name in names} == {12}


def milliseconds(results, name, how="eager"):
    return results.of_kind("time", name)[0]["milliseconds"][how]["median"]


def test_costs_of_steps_are_those_that_were_measured():
    def costs(batch, how):
        results = PERCEPTRONS[batch]
        ratios = [
            milliseconds(results, f"C-{name}", how) / milliseconds(results, name, how)
            for name in ("SGD", "Nesterov", "Adam")
        ]
        muon = milliseconds(results, "Muon", how) / milliseconds(results, "Adam", how)
        return [f"{ratio:.1f}" for ratio in (min(ratios), max(ratios), muon)]

    words = r"cost ([\d.]+) to ([\d.]+) times those of the plain optimisers at 32, and Muon's ([\d.]+) times"
    assert list(re.search(words, TEXT).groups()) == costs(32, "eager")
    assert list(re.search(r"at 128 it is ([\d.]+) to ([\d.]+) and ([\d.]+) times", TEXT).groups()) == costs(
        128, "eager"
    )
    words = r"In CUDA graphs at 128 ours cost ([\d.]+) to ([\d.]+) plain ones, Muon's ([\d.]+)\."
    assert list(re.search(words, TEXT).groups()) == costs(128, "graph")
    words = r"a step of C-Adam costs ([\d.]+) plain ones eagerly and ([\d.]+) in a graph"
    on_china = [milliseconds(CHINA, "C-Adam", how) / milliseconds(CHINA, "Adam", how) for how in ("eager", "graph")]
    assert list(re.search(words, TEXT).groups()) == [f"{ratio:.1f}" for ratio in on_china]
    assert [line["graph"] for line in MLP.finals("C-Adam")].count(False) == 1


def seconds_to_target(results, name, how="eager"):
    return seconds_until(statistics.median(arrivals(results, name)), results.of_kind("time", name)[0], how)


def test_who_is_first_in_seconds():
    for batch in (32, 128):
        results = PERCEPTRONS[batch]
        timed = [name for name in CONTESTANTS if results.of_kind("time", name) and all(arrivals(results, name))]
        assert {"C-Adam", "C-SGD", "C-Nesterov", "Muon", "FOOF", "C-Adam-averaged"} <= {*timed}
        for how, first in (("eager", "C-Adam-averaged"), ("graph", "C-SGD")):
            seconds = {name: found for name in timed if (found := seconds_to_target(results, name, how)) is not None}
            assert min(seconds, key=seconds.get) == first
    assert seconds["Muon"] / seconds["C-SGD"] == pytest.approx(3, abs=0.1)
    assert seconds_to_target(PERCEPTRONS[128], "SOAP") > seconds_to_target(PERCEPTRONS[128], "Muon")
    assert min(arrivals(PERCEPTRONS[128], "SOAP")) > max(arrivals(PERCEPTRONS[128], "Muon"))


def test_seconds_of_foof_and_of_averages_are_in_the_results():
    races = [PERCEPTRONS[32], PERCEPTRONS[128]]
    names = ("C-Adam-averaged", "FOOF", "C-SGD", "C-Adam")
    of = {name: [f"{seconds_to_target(results, name):.3g}" for results in races] for name in names}
    said = re.search(
        rf"C-Adam-averaged arrives after {N} and {N} s at 32 and 128, FOOF after {N} and {N}, C-SGD after {N} and "
        rf"{N}\. FOOF's first (\d+) steps, .*? take {N} and {N} ms, later ones {N} and {N};",
        TEXT,
    ).groups()
    assert list(said[:6]) == [one for name in names[:3] for one in of[name]]
    lines = [results.of_kind("time", "FOOF")[0] for results in races]
    assert {line["first"]["steps"] for line in lines} == {int(said[6])}
    assert list(said[7:9]) == [f"{line['first']['milliseconds']:.3g}" for line in lines]
    assert list(said[9:]) == [f"{milliseconds(results, 'FOOF'):.3g}" for results in races]
    nearest = seconds_to_target(PERCEPTRONS[128], "C-Nesterov-averaged")
    assert f"C-Nesterov-averaged, with 406 steps and {nearest:.3g} s at 128" in TEXT
    assert "{} and {} s at 32 and 128, FOOF {} and {}.".format(*of["C-Adam-averaged"], *of["FOOF"]) in TEXT
    choosing = " ".join((ROOT / "docs" / "choosing.md").read_text().split())
    assert f"at 32 ({of['C-Adam-averaged'][0]} s, C-SGD {of['C-SGD'][0]})" in choosing
    assert f"at 128 ({of['C-Adam-averaged'][1]} s, C-SGD {of['C-SGD'][1]}, C-Adam {of['C-Adam'][1]})" in choosing
    for results in races:  # of one day
        timed = [line for line in results.lines if line["kind"] == "time"]
        assert len({line["contestant"] for line in timed}) == len(timed)
        assert len({line["date"] for line in timed}) == 1


def test_what_is_said_of_other_sets_is_in_the_results():
    cifar100, fashion = (Results.of(TASKS[f"mlp-{name}-b32"], RACE.output) for name in ("cifar100", "fashion-mnist"))
    assert arrivals(cifar100, "C-SGD") == [None] * 3
    muon, *ours = (statistics.median(arrivals(fashion, name)) for name in ("Muon", "C-Adam", "C-SGD"))
    assert set(ours) == {2625}
    assert f"({muon:,.0f} against {ours[0]:,.0f} steps), and Adam arrives" in TEXT
    assert all(arrivals(fashion, "Adam"))
    accuracies = {name: spread_of(BEST_TEST, fashion.finals(name)) for name in CONTESTANTS if fashion.finals(name)}
    found = [100 * spread.median for spread in accuracies.values()]
    assert f"all are between {min(found):.3g} and {max(found):.3g} %, with ranges that overlap" in TEXT
    assert max(min(spread.values) for spread in accuracies.values()) < min(
        max(spread.values) for spread in accuracies.values()
    )
    adam, *ours = (spread_of(BEST_TEST, cifar100.finals(name)) for name in ("Adam", *C_VERSIONS, "C-Adam-averaged"))
    assert min(adam.values) > max(max(spread.values) for spread in ours)
    assert {len(cifar100.finals(name)) for name in C_VERSIONS} == {3}


def test_what_is_said_of_searches_for_test_accuracy_is_in_the_results():
    races = {batch: Results.of(TASKS[f"mlp-cifar10-b{batch}-test"], RACE.output) for batch in (32, 128)}
    spreads = {
        batch: {name: spread_of(BEST_TEST, found.finals(name)) for name in CONTESTANTS if found.finals(name)}
        for batch, found in races.items()
    }
    small, large = spreads[32], spreads[128]
    assert max(small, key=lambda name: small[name].median) == "C-SGD"
    above = 100 * (small["C-SGD"].median - small["SGD"].median)
    assert f"At 32 C-SGD ends at {100 * small['C-SGD'].median:.4g} %, {above:.1f} points above SGD" in TEXT
    assert min(small["C-SGD"].values) < max(small["SGD"].values)
    behind = f"{100 * (large['Muon'].median - large['C-AdamW'].median):.1f} points above C-AdamW"
    assert f"At 128 Muon has {100 * large['Muon'].median:.4g} %, {behind}" in TEXT
    assert f"[Muon is {behind}](#the-perceptron-for-its-test-accuracy) at 128" in TEXT
    ours = [spread for name, spread in large.items() if name.startswith("C-")]
    assert min(large["Muon"].values) > max(max(spread.values) for spread in ours)
    before = accuracies(32, ("C-SGD", "SGD", "Muon"))
    said = re.search(rf"no decay, C-SGD had {N} % at 32, SGD {N} % and Muon {N} %", TEXT).groups()
    assert list(said) == [f"{100 * spread.median:.4g}" for spread in before.values()]
    winners = [races[32].best("C-SGD"), races[128].best("Muon")]
    assert [line["number"] for line in winners] == [4, 4]
    assert len({line["settings"]["decay"] for line in winners}) == 1
    held_out = [-races[32].best(name)["score"] for name in ("SGD", "C-SGD")]
    assert "SGD was above C-SGD at 32: {:.4g} against {:.4g} %".format(*(100 * one for one in held_out)) in TEXT
    complete = [
        sum(line["state"] == "complete" and len(line["curve"]["step"]) == 49 for line in races[32].trials(name))
        for name in small
    ]
    assert (min(complete), max(complete)) == (1, 5)
    assert "of which at 32 one to five ran to their end" in TEXT
    near = [
        line
        for line in races[32].trials("SGD")
        if 0.001 < line["settings"]["decay"] < 0.004 and line["settings"]["lr"] > 0.02
    ]
    assert all(line["state"] == "pruned" for line in near)
    (given_up,) = (line for line in races[32].trials("Muon") if line["settings"] == winners[1]["settings"])
    assert given_up["state"] == "pruned"
    firsts = [(32, "Muon"), (32, "AdamW"), (32, "C-AdamW"), (128, "SGD"), (128, "Nesterov")]
    assert [races[batch].best(name)["number"] for batch, name in firsts] == [0] * 5
    chosen = [
        races[batch].best(name)["settings"]["relative_damping"]
        for batch in races
        for name in ("C-SGD", "C-Nesterov", "C-AdamW")
    ]
    assert f"and {min(chosen):.2g} to {max(chosen):.2g} were chosen" in TEXT
    assert {knob.low for knob in CONTESTANTS["C-SGD"].space(races[32].task) if "damping" in knob.name} == {0.3}


def test_what_is_said_of_larger_pictures_and_the_distance_field():
    large = {name: ends(f"siren-256-{name}") for name in ("china", "flower", "astronaut")}
    gaps = [large[name]["C-Adam"] - large[name]["Adam"] for name in ("flower", "astronaut")]
    assert f"on 'flower' C-Adam is {gaps[0]:.0f} dB above Adam, on 'astronaut' {-gaps[1]:.0f} dB below" in TEXT
    gains = [found["C-Adam-0.95"] - found["C-Adam"] for found in large.values()]
    assert f"With β₂ = 0.95 C-Adam gains {min(gains):.0f} to {max(gains):.0f} dB, but so does Adam" in TEXT
    lost = [found["Adam-0.95"] - found["C-Adam-0.95"] for found in large.values()]
    assert f"which is {min(lost):.1f} to {max(lost):.1f} dB above C-Adam-0.95 on all three" in TEXT
    assert f"the correction makes Adam worse, by {min(lost):.1f} to {max(lost):.1f} dB" in TEXT
    for name, firsts in {"china": ["Muon", "Adam-0.95"], "flower": ["Muon", "Adam-0.95"]}.items():
        assert sorted(large[name], key=large[name].get, reverse=True)[:2] == firsts
    assert max(large["astronaut"], key=large["astronaut"].get) == "Adam-0.95"
    fourier = [ends(f"fourier-256-{name}") for name in large]
    for found in fourier:
        assert sorted(found, key=found.get, reverse=True)[:3] == ["SOAP", "Muon", "C-Adam-0.95"]
    gaps = [[found["C-Adam-0.95"] - found[name] for found in fourier] for name in ("Adam", "Adam-0.95")]
    assert (
        f"then Muon, then C-Adam-0.95, {min(gaps[0]):.0f} to {max(gaps[0]):.0f} dB above Adam and "
        f"{min(gaps[1]):.0f} to {max(gaps[1]):.0f} dB above Adam-0.95" in TEXT
    )
    field = ends("siren-sdf")
    assert sorted(field, key=field.get, reverse=True)[:2] == ["SOAP", "C-Adam-0.95"]
    over, under = field["C-Adam-0.95"] - field["Adam"], field["SOAP"] - field["C-Adam-0.95"]
    assert f"C-Adam-0.95 is second, {over:.0f} dB above Adam and {under:.0f} dB below SOAP" in TEXT
    assert f"Adam-0.95 is {field['Adam-0.95'] - field['Adam']:.1f} dB above Adam" in TEXT
    assert (
        f"second behind SOAP with β₂ = 0.95, {field['C-Adam-0.95'] - field['Adam-0.95']:.1f} dB above Adam with" in TEXT
    )
    assert 0 < field["C-Adam"] - field["Adam"] < 1


def test_what_is_said_of_averaged_steps_is_in_the_results():
    averaged = {batch: set(arrivals(results, "C-Adam-averaged")) for batch, results in PERCEPTRONS.items()}
    assert averaged == {32: {1500}, 128: {375}, 512: {101}}
    assert "the fewest steps: 1,500, 375 and 101 at 32, 128 and 512" in TEXT
    assert "At 512 there is less to gain: 101 steps against 116" in TEXT
    assert [len(results.finals("C-Adam-averaged")) for results in PERCEPTRONS.values()] == [5, 5, 5]
    assert MLP.best("C-Adam-averaged")["number"] == 0
    foof = [statistics.median(arrivals(results, "FOOF")) for results in PERCEPTRONS.values()]
    assert "needs {:,.0f}, {:.0f} and {:.0f}.".format(*foof) in TEXT
    reached = [MLP.task.measure.arrival(unpacked(line["curve"])) for line in MLP.trials("C-Adam-averaged")]
    assert "Of its twelve trials at 32 C-Adam-averaged arrived in six" in TEXT
    assert (len(reached), sum(step is not None for step in reached)) == (12, 6)
    (steps,) = {statistics.median(arrivals(PERCEPTRONS[128], "C-Nesterov-averaged"))}
    assert f"needs {steps:.0f} steps at 128" in TEXT
    assert len(PERCEPTRONS[128].finals("C-Nesterov-averaged")) == 5
    assert PERCEPTRONS[128].best("C-Nesterov-averaged")["number"] == 0


def test_what_is_said_of_foof_and_kfac_is_in_the_results():
    said = re.search(
        r"FOOF ([\d,]+) and (\d+), likewise, where C-Adam needs ([\d,]+) and (\d+)\. .*? of all contestants "
        rf"C-Adam-averaged has the lowest test accuracy at 128, {N} %, and FOOF at 32, {N} %",
        TEXT,
    ).groups()
    races = [PERCEPTRONS[32], PERCEPTRONS[128]]
    assert [set(arrivals(results, "FOOF")) for results in races] == [{int(said[0].replace(",", ""))}, {int(said[1])}]
    assert [len(results.finals("FOOF")) for results in races] == [5, 5]
    adam = [statistics.median(arrivals(results, "C-Adam")) for results in races]
    assert adam == [int(number.replace(",", "")) for number in said[2:4]]
    assert all(0.6 < float(steps.replace(",", "")) / other < 0.75 for steps, other in zip(said[:2], adam, strict=True))
    for batch, lowest, accuracy in zip((128, 32), ("C-Adam-averaged", "FOOF"), said[4:], strict=True):
        found = accuracies(batch, [name for name in CONTESTANTS if PERCEPTRONS[batch].finals(name)])
        assert min(found, key=lambda name: found[name].median) == lowest
        assert medians(found)[0] == accuracy
    scores = [line["score"] for line in MLP.trials("FOOF")]
    assert sum(score < MLP.best("Muon")["score"] for score in scores) == 5
    assert sum(score > 1e3 for score in scores) == 3
    pairs = list(zip(arrivals(races[1], "K-FAC"), arrivals(races[1], "C-Adam"), strict=True))
    assert sum(kfac is not None and kfac < adam for kfac, adam in pairs) == 3
    assert [kfac for kfac, _ in pairs].count(None) == 1


def test_what_is_said_of_a_short_memory_of_squares():
    results = Results.of(TASKS["fourier-128-china"], RACE.output)
    pictures = ("china", "flower", "astronaut")
    china, *others = fourier = [ends(f"fourier-128-{picture}") for picture in pictures]
    ours = china["C-Adam-0.95"]
    said = re.search(
        r"ends (\d+) dB above C-Adam, and is then before C-Muon, behind SOAP by (\d+) dB and Muon by (\d+)\. "
        r"Adam itself gains (\d+) dB.*? it gains (\d+) dB on 'flower' and (\d+) dB on 'astronaut'",
        TEXT,
    )
    gains = [ours - china["C-Adam"], china["SOAP"] - ours, china["Muon"] - ours, china["Adam-0.95"] - china["Adam"]]
    gains += [one["C-Adam-0.95"] - one["C-Adam"] for one in others]
    assert list(said.groups()) == [f"{gain:.0f}" for gain in gains]
    assert ours > china["C-Muon"]

    def spread(races, one, other):
        gaps = [race[one] - race[other] for race in races]
        return f"{min(gaps):.0f} to {max(gaps):.0f} dB"

    assert f"C-Adam is {spread(fourier, 'C-Adam', 'Adam')} above Adam" in TEXT
    assert f"with β₂ = 0.95 it is {spread(fourier, 'C-Adam-0.95', 'Adam')} above Adam" in TEXT
    assert f"and still {spread(fourier, 'SOAP', 'C-Adam-0.95')} below SOAP" in TEXT
    sirens = [ends(f"siren-128-{picture}") for picture in pictures]
    assert f"Adam itself gains {spread(sirens, 'Adam-0.95', 'Adam')}" in TEXT
    assert f"C-Adam-0.95 is {spread(sirens, 'C-Adam', 'C-Adam-0.95')} below C-Adam" in TEXT
    large = ends("siren-256-china")
    assert (
        "C-Adam {:.1f} dB, Adam {:.1f}, Muon {:.1f}".format(*(large[one] for one in ("C-Adam", "Adam", "Muon"))) in TEXT
    )
    assert f"and Muon {large['Muon'] - large['Adam']:.0f} dB above both" in TEXT
    assert {line["device"] for name in ("C-Adam-0.95", "Adam-0.95") for line in results.finals(name)} == {"cpu"}
    page = " ".join((ROOT / "docs" / "defaults.md").read_text().split())
    assert f"with 0.95 it ended {gains[0]:.0f} dB higher" in page


def test_what_a_higher_rate_and_more_damping_gave_is_in_the_trials():
    results = Results.of(TASKS["fourier-128-china"], RACE.output)
    near = [
        min(results.trials(name), key=lambda line: abs(line["settings"]["lr"] - rate))
        for name, rate in (("C-Adam", 0.0043), ("C-Adam-0.95", 0.0046))
    ]
    assert [f"{line['settings']['lr']:.4f}" for line in near] == ["0.0043", "0.0046"]
    assert {f"{line['settings']['relative_damping']:.2f}" for line in near} == {"0.03"}
    assert f"it was {near[0]['score'] - near[1]['score']:.0f} dB, in single trials" in TEXT
    first = CHINA.trials("C-Adam")[0]
    assert first["settings"]["relative_damping"] == DEFAULT.value
    (chosen,) = {f"{line['settings']['relative_damping']:.2g}" for line in CHINA.finals("C-Adam")}
    high, low = f"{ends('siren-128-china')['C-Adam']:.0f}", f"{-first['score']:.0f}"
    choosing, readme = (" ".join((ROOT / name).read_text().split()) for name in ("docs/choosing.md", "README.md"))
    assert f"SIRENs {chosen}, where that meant {high} dB instead of {low}" in choosing
    assert f"C-Adam's {high} dB need a damping of {chosen}; with the default it had {low} (one seed)" in readme
    lines = {name: next(row for row in rows(CHINA) if row.contestant == name).cells for name in ("Adam", "C-Adam")}
    heads = headings(CHINA)
    place = heads.index("steps to PSNR 40.0 dB") + 1
    eager = [f"{float(lines[name][place]):.2f}" for name in ("Adam", "C-Adam")]
    graphs = {f"{float(lines[name][place + 1]):.2f}" for name in ("Adam", "C-Adam")}
    assert "at 40 dB after {} s, C-Adam after {}".format(*eager) in readme
    assert f"(in a CUDA graph {' '.join(graphs)} both)" in readme


def test_what_is_said_of_averages_is_in_the_results():
    choosing = " ".join((ROOT / "docs" / "choosing.md").read_text().split())
    results = PERCEPTRONS[128]
    assert (
        "C-Nesterov with a rate of 0.01 needed {:.0f} instead of {:.0f} at 128".format(
            *(statistics.median(arrivals(results, name)) for name in ("C-Nesterov-averaged", "C-Nesterov"))
        )
        in choosing
    )
    lost = []
    pair = accuracies(128, ["C-Nesterov", "C-Nesterov-averaged"])
    lost.append(100 * (pair["C-Nesterov"].median - pair["C-Nesterov-averaged"].median))
    for batch in (32, 128):
        one, other = (accuracies(batch, [name])[name].median for name in ("C-Adam", "C-Adam-averaged"))
        lost.append(100 * (one - other))
    assert [round(min(lost)), round(max(lost))] == [1, 4]
    curves = [unpacked(line["curve"]) for line in results.trials("C-Nesterov-averaged")]
    assert [results.task.measure.arrival(curve) is not None for curve in curves].count(True) == 2
    assert sum(curve[-1]["train_loss"] > 1e4 for curve in curves) == 2
    assert len(curves) == 12
    of_adam = [unpacked(line["curve"]) for line in results.trials("C-Adam-averaged")]
    assert sum(results.task.measure.arrival(curve) is not None for curve in of_adam) == 6


def test_halving_gave_up_on_as_many_of_adams_trials_as_the_page_says():
    (trials, pruned) = re.findall(r"Of Adam's (\d+) trials (\d+) were given up", TEXT)[0]
    states = [line["state"] for line in CHINA.trials("Adam")]
    assert (len(states), states.count("pruned")) == (int(trials), int(pruned))
    assert CHINA.best("Adam")["number"] == 0


def test_what_searches_chose_is_what_the_advice_says():
    text = " ".join((ROOT / "docs" / "choosing.md").read_text().split())
    low, high, nesterov = re.search(r"chose ([\d.]+) to ([\d.]+) for C-SGD and ([\d.]+) for C-Nesterov", text).groups()
    chosen = {name: [results.best(name)["settings"] for results in PERCEPTRONS.values()] for name in C_VERSIONS}
    assert not PERCEPTRONS[512].finals("C-Nesterov")
    del chosen["C-Nesterov"][2]
    rates = [f"{settings['lr']:.2g}" for settings in chosen["C-SGD"]]
    assert (min(rates), max(rates)) == (low, high)
    assert {f"{settings['lr']:.2g}" for settings in chosen["C-Nesterov"]} == {nesterov}
    for name in ("C-SGD", "C-Nesterov"):
        assert all(0.01 <= settings["relative_damping"] < 0.035 for settings in chosen[name])
    assert PERCEPTRONS[128].best("C-Adam")["number"] == 0
    assert chosen["C-Adam"][1] == {"lr": 3e-4, "relative_damping": DEFAULT.value}
