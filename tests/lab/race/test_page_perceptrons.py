"""What docs/race.md and docs/choosing.md say of perceptrons is in results/race."""

import re
import statistics

from race_page import (
    BEST_TEST,
    C_VERSIONS,
    PAGE,
    PERCEPTRONS,
    RACE,
    ROOT,
    TEXT,
    accuracies,
    arrivals,
    medians,
)

from consequent_lab.race.contestants import CONTESTANTS
from consequent_lab.race.curves import unpacked
from consequent_lab.race.results import Results
from consequent_lab.race.table import spread_of
from consequent_lab.race.tasks import TASKS

CHOOSING = " ".join((ROOT / "docs" / "choosing.md").read_text().split())


def test_what_is_said_of_test_accuracy_is_in_the_results():
    said = re.search(
        r"At 32 SGD's ([\d.]+) % and Adam's ([\d.]+) % are above ([\d.]+) to ([\d.]+) % of ours, "
        r"at 128 Adam's ([\d.]+) % and Muon's ([\d.]+) % above ([\d.]+) to ([\d.]+) %, "
        r"at 512 Adam's ([\d.]+) % above ([\d.]+) to ([\d.]+) %",
        TEXT,
    ).groups()
    averaged = ("C-Adam-averaged", "C-Nesterov-averaged")
    ours = {
        32: (*C_VERSIONS, averaged[0]),
        128: (*C_VERSIONS, *averaged),
        512: ("C-SGD", "C-Adam", averaged[0]),
    }
    better = {32: ("SGD", "Adam"), 128: ("Adam", "Muon"), 512: ("Adam",)}
    found = []
    for batch, names in ours.items():
        of_ours, of_better = accuracies(batch, names), accuracies(batch, better[batch])
        found += [*reversed(medians(of_better)), *medians(of_ours)[:: len(names) - 1]]
    assert list(said) == found


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


def test_what_is_said_of_other_sets_is_in_the_results():
    cifar100, fashion = (Results.of(TASKS[f"mlp-{name}-b32"], RACE.output) for name in ("cifar100", "fashion-mnist"))
    assert arrivals(cifar100, "C-SGD") == [None] * 3
    muon, *ours = (statistics.median(arrivals(fashion, name)) for name in ("Muon", "C-Adam", "C-SGD"))
    assert set(ours) == {2625}
    assert f"({muon:,.0f} against {ours[0]:,.0f} steps), and Adam arrives" in TEXT
    assert all(arrivals(fashion, "Adam"))
    found = [100 * spread_of(BEST_TEST, fashion.finals(one)).median for one in CONTESTANTS if fashion.finals(one)]
    assert f"all are between {min(found):.3g} and {max(found):.3g} %, with ranges that overlap" in TEXT


def test_what_is_said_of_searches_for_test_accuracy_is_in_the_results():
    small, large = (
        {name: spread_of(BEST_TEST, found.finals(name)) for name in CONTESTANTS if found.finals(name)}
        for batch in (32, 128)
        for found in [Results.of(TASKS[f"mlp-cifar10-b{batch}-test"], RACE.output)]
    )
    above = 100 * (small["C-SGD"].median - small["SGD"].median)
    assert f"At 32 C-SGD ends at {100 * small['C-SGD'].median:.4g} %, {above:.1f} points above SGD" in TEXT
    assert min(small["C-SGD"].values) < max(small["SGD"].values)
    behind = f"{100 * (large['Muon'].median - large['C-SGD'].median):.2f} points above C-SGD"
    assert f"At 128 Muon has {100 * large['Muon'].median:.4g} %, {behind}, whose best seed is at Muon's median" in TEXT
    assert max(large["C-SGD"].values) == large["Muon"].median


def test_what_is_said_of_averages_is_in_the_results():
    steps = {
        name: [f"{statistics.median(arrivals(results, name)):,.0f}" for results in PERCEPTRONS.values()]
        for name in ("C-Adam", "C-Adam-averaged")
    }
    assert "the fewest steps: {}, {} and {} at 32, 128 and 512".format(*steps["C-Adam-averaged"]) in TEXT
    told = (
        "needed {}, {} and {} steps at batches of 32, 128 and 512, where C-Adam with own inputs needed {}, {} and {}."
    )
    assert told.format(*steps["C-Adam-averaged"], *steps["C-Adam"]) in CHOOSING
    forms = ("FOOF", "FOOF-sparing")
    foof = [min(statistics.median(arrivals(race, name)) for name in forms) for race in PERCEPTRONS.values()]
    assert "needs {:,.0f}, {:.0f} and {:.0f}, in the better of its two forms".format(*foof) in TEXT
    lost = []
    for batch, name in ((128, "C-Nesterov"), (32, "C-Adam"), (128, "C-Adam"), (512, "C-Adam")):
        found = accuracies(batch, [name, f"{name}-averaged"])
        lost.append(100 * (found[name].median - found[f"{name}-averaged"].median))
    assert [round(min(lost[:3])), round(max(lost[:3])), lost[3] <= 0] == [1, 4, True]


def test_what_searches_chose_is_what_the_advice_says():
    low, high, nesterov = re.search(
        r"chose ([\d.]+) to ([\d.]+) for C-SGD and ([\d.]+) for C-Nesterov", CHOOSING
    ).groups()
    chosen = {name: [results.best(name)["settings"] for results in PERCEPTRONS.values()] for name in C_VERSIONS}
    assert not PERCEPTRONS[512].finals("C-Nesterov")
    del chosen["C-Nesterov"][2]
    rates = [f"{settings['lr']:.2g}" for settings in chosen["C-SGD"]]
    assert (min(rates), max(rates)) == (low, high)
    assert {f"{settings['lr']:.2g}" for settings in chosen["C-Nesterov"]} == {nesterov}
    for name in ("C-SGD", "C-Nesterov"):
        assert all(0.01 <= settings["relative_damping"] < 0.035 for settings in chosen[name])
    assert chosen["C-Adam"][1] == {"lr": 3e-4, "relative_damping": 0.1}
