"""What docs/race.md says of ResNet-20 is in results/race."""

import json
import re
import statistics

import pytest
from race_page import BEST_TEST, RACE, RESNET, ROOT, TEXT, N, arrivals, ends

from consequent_lab.race.curves import unpacked
from consequent_lab.race.measures import TimeTo
from consequent_lab.race.results import Results
from consequent_lab.race.table import spread_of
from consequent_lab.race.tasks import TASKS

NEARLY = TimeTo("train_accuracy", 0.99, rising=True)


def percent(values):
    return [f"{100 * value:.4g}" for value in sorted(values)]


def test_the_race_of_resnet20_is_in_its_file():
    results = RESNET
    ours, theirs = (spread_of(results.task.measure, results.finals(name)) for name in ("C-Nesterov", "Nesterov-BN"))
    assert f"[{100 * ours.median:.4g} % after 100]" in TEXT
    behind = f"{100 * (theirs.median - ours.median):.2g}"
    assert f"after 100 epochs without cutout, it is {behind} below" in TEXT
    assert f"with cutout and by {behind} without it, all seeds" in TEXT
    assert len(ours.values) == len(theirs.values) == 3
    assert max(ours.values) < min(theirs.values)
    assert sum(value >= 0.9125 for value in theirs.values) == 1
    assert {len(results.trials(name)) for name in ("C-Nesterov", "Nesterov-BN")} == {12}
    assert {results.best(name)["number"] for name in ("C-Nesterov", "Nesterov-BN")} == {0}


def finals_of(name):
    """The finals of a task without and with BatchNorm, and its results."""
    results = Results.of(TASKS[f"resnet20-cifar10-{name}"], RACE.output)
    both = ("C-Nesterov", "Nesterov-BN")
    return *(spread_of(results.task.measure, results.finals(contestant)) for contestant in both), results


def with_the_searchs_settings(results, name):
    """How the finals ended that were run before other decays had been tried."""
    lines = results.of_kind("final", name)
    return [line["curve"]["test_accuracy"][-1] for line in lines if line["settings"] == RESNET.best(name)["settings"]]


def ends_of(results, name):
    return sorted(line["curve"]["test_accuracy"][-1] for line in results.finals(name))


def test_the_race_of_resnet20_with_cutout():
    ours, theirs, results = finals_of("cutout")
    assert (len(ours.values), len(theirs.values)) == (5, 5)
    assert min(ours.values) > 0.9125
    assert max(ours.values) < min(theirs.values)
    behind = f"{100 * (theirs.median - ours.median):.2f}"
    low, muon, high = (100 * value for value in ends_of(results, "Muon"))
    told = (
        f"ends at {100 * ours.median:.2f} % after 100 epochs with cutout, {behind} points below the one with BatchNorm"
    )
    assert f"{told} and {100 * ours.median - muon:.2f} above Muon without either; after 20 epochs" in TEXT
    assert f"by {behind} points after 100 epochs with cutout and by" in TEXT
    both = [f"{100 * one.median:.4g} %" for one in (ours, theirs)]
    assert "With cutout it is, at {}, but with BatchNorm cutout gives {}".format(*both) in TEXT
    seeds = "{:.2f}, {:.2f}, {:.2f}, {:.2f} and {:.2f} %".format(*(100 * value for value in sorted(ours.values)))
    assert f"**With cutout both are**, the second by the median: {seeds}" in TEXT
    assert ours.median >= 0.92
    lead, least = 100 * (min(theirs.values) - max(ours.values)), 100 * min(theirs.values)
    told = f"and all of its seeds are ahead, the lowest by {lead:.2f} points, at {least:.2f} %"
    assert f"with BatchNorm it gives {both[1]}, {told}" in TEXT
    decays = "{} had, with decays of 10, 5 and 2.5 · 10⁻⁴, {:.2f}, {:.2f} and {:.2f} %"
    trials = {name: [-100 * line["score"] for line in results.trials(name)] for name in ("C-Nesterov", "Nesterov-BN")}
    assert decays.format("C-Nesterov", *trials["C-Nesterov"][:3]) in TEXT
    told = "BatchNorm with 1, 2.5 and 5 · 10⁻⁴ {:.2f}, {:.2f} and {:.2f}".format(*trials["Nesterov-BN"][:3])
    assert told in TEXT
    assert [line["settings"]["decay"] for line in results.trials("C-Nesterov")[:3]] == [1e-3, 5e-4, 2.5e-4]
    assert [line["settings"]["decay"] for line in results.trials("Nesterov-BN")[:3]] == [1e-4, 2.5e-4, 5e-4]
    told = "{:.2f} with half the rate, **{:.2f} with twice the rate**, {:.2f} with three times the damping and {:.2f}"
    assert told.format(*trials["C-Nesterov"][3:]) in TEXT
    told = "{:.2f} with half and {:.2f} with twice the rate, and at 3.5 · 10⁻⁴ {:.2f} and, with twice the rate, {:.2f}"
    assert told.format(*trials["Nesterov-BN"][3:]) in TEXT
    assert [results.best(name)["number"] for name in trials] == [4, 1]
    gains = [
        100 * (one.median - statistics.median(with_the_searchs_settings(results, name)))
        for name, one in (("C-Nesterov", ours), ("Nesterov-BN", theirs))
    ]
    gained = "C-Nesterov gained {:.2f} points over the search's own settings, BatchNorm {:.2f}".format(*gains)
    assert gained in TEXT
    assert f"**Muon with cutout** has {muon:.2f} % ({low:.2f}, {muon:.2f} and {high:.2f}): four of" in TEXT
    assert sum(100 * value > high for value in ours.values) == 4
    tried = [-100 * line["score"] for line in results.trials("Muon")]
    assert "it had {:.2f} % with it, {:.2f} with half and {:.2f} with twice of it".format(*tried) in TEXT
    assert results.best("Muon")["settings"] == RESNET.best("Muon")["settings"]


def test_the_race_of_resnet20_in_20_epochs():
    ours, theirs, results = finals_of("20ep")
    assert (len(ours.values), len(theirs.values)) == (5, 5)
    assert max(ours.values) > min(theirs.values)
    behind = f"**After 20 epochs it is level** with BatchNorm, {100 * (theirs.median - ours.median):.2f} points behind"
    assert behind in TEXT
    told = re.search(
        rf"with 1, 2\.5, 5 and 10 · 10⁻⁴ it had {N}, {N}, {N} and {N} %, the correction with 5, 10 and 20 · 10⁻⁴ "
        rf"{N}, {N} and {N}",
        TEXT,
    ).groups()
    trials = [line for name in ("Nesterov-BN", "C-Nesterov") for line in results.trials(name)]
    assert [line["settings"]["decay"] for line in trials] == [1e-4, 2.5e-4, 5e-4, 1e-3, 5e-4, 1e-3, 2e-3]
    assert list(told) == [f"{-100 * line['score']:.4g}" for line in trials]
    assert not results.untried_choices("C-Nesterov")
    twice = [-100 * one.trials("Nesterov-BN")[0]["score"] for one in (RESNET, results)]
    assert "The same run of BatchNorm, made twice, had {:.4g} and {:.4g} %".format(*twice) in TEXT
    assert RESNET.trials("Nesterov-BN")[0]["settings"] == results.trials("Nesterov-BN")[0]["settings"]
    first = RESNET.trials("C-Nesterov")[0]  # the same run: the search has as many epochs
    assert (first["score"], first["curve"]) == (trials[-2]["score"], trials[-2]["curve"])
    assert results.task.epochs == RESNET.task.search_epochs
    before = with_the_searchs_settings(results, "Nesterov-BN")
    assert f"(With the search's own 10⁻⁴ it ended at {100 * statistics.median(before):.4g} %" in TEXT
    assert f"ahead by {100 * (ours.median - statistics.median(before)):.3g} points" in TEXT
    muon, corrected = (ends_of(results, name) for name in ("Muon", "C-Muon"))
    assert f"{100 * muon[0]:.2f} to {100 * muon[-1]:.2f} % after 20 epochs, with five seeds" in TEXT
    assert (len(muon), len(corrected)) == (5, 3)
    assert muon[0] < max(ours.values)
    assert max(corrected) < muon[0]
    assert f"has {100 * statistics.median(corrected):.4g} % with three seeds, all below all of Muon's" in TEXT
    below = 100 * (statistics.median(muon) - statistics.median(corrected))
    assert f"on ResNet-20 C-Muon is {below:.3g} points below it" in TEXT
    assert len(RESNET.trials("C-Muon")) == 12
    assert RESNET.best("C-Muon")["number"] == 0
    assert len(RESNET.trials("Muon")) == 12
    assert RESNET.best("Muon")["number"] == 11
    medians = f"has {100 * statistics.median(muon):.4g} % after 20 epochs, C-Nesterov {100 * ours.median:.4g} %"
    assert f"Muon without BatchNorm and without the correction {medians}" in TEXT
    assert f"and by {100 * (theirs.median - ours.median):.2f} after 20, where seeds overlap" in TEXT
    assert f"({-100 * RESNET.best('Muon')['score']:.2f} % of the images held out)" in TEXT


def test_resnet20_to_all_of_its_training_images():
    results = Results.of(TASKS["resnet20-cifar10-train"], RACE.output)
    ours, theirs = (arrivals(results, name) for name in ("C-Nesterov", "Nesterov-BN"))
    assert len(ours) == len(theirs) == 3
    assert max(ours) < min(theirs)
    assert f"after {statistics.median(ours) / statistics.median(theirs):.2f} of the steps" in TEXT
    best = [spread_of(BEST_TEST, results.finals(n)).median for n in ("Nesterov-BN", "C-Nesterov")]
    assert f"{100 * (best[0] - best[1]):.0f} points fewer of the test images" in TEXT
    assert f"**Lost: test accuracy**, by {100 * (best[0] - best[1]):.0f} points" in TEXT
    muon = statistics.median(arrivals(results, "Muon"))
    known = 100 * spread_of(BEST_TEST, results.finals("Muon")).median
    assert max(ours) < min(arrivals(results, "Muon"))
    assert (
        f"before Muon without BatchNorm, which needs {muon:,.0f}, and knows more of the test images: {known:.4g} %"
        in TEXT
    )
    promised = sorted(arrivals(results, "C-SGD-promise"))
    nearly = {name: spread_of(NEARLY, results.finals(name)) for name in ("C-SGD-promise", "C-Nesterov", "Muon")}
    assert max(nearly["C-SGD-promise"].values) < min(*nearly["C-Nesterov"].values, *nearly["Muon"].values)
    told = f"knows 99 % after {nearly['C-SGD-promise'].median:,.0f} steps, before all others, and 100 % after "
    told += f"{promised[1]:,.0f}, with seeds from {promised[0]:,.0f} to {promised[2]:,.0f}"
    assert told in TEXT
    untuned = results.task.measure.arrival(unpacked(results.trials("C-SGD-promise")[0]["curve"]))
    assert f"it was there after {untuned:,} in its first trial" in TEXT
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
