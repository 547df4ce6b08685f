"""What docs/race.md says of perceptrons is in results/race."""

import re
import statistics
from dataclasses import replace

import pytest
from race_page import BEST_TEST, C_VERSIONS, MLP, PAGE, PERCEPTRONS, RACE, ROOT, TEXT, N, accuracies, arrivals, medians

from consequent.maths.damping import DEFAULT
from consequent_lab.race.contestants import CONTESTANTS
from consequent_lab.race.curves import unpacked
from consequent_lab.race.results import Results
from consequent_lab.race.table import spread_of
from consequent_lab.race.tasks import TASKS


def test_what_is_said_of_test_accuracy_is_in_the_results():
    said = re.search(
        r"At 32 SGD's ([\d.]+) % and Adam's ([\d.]+) % are above ([\d.]+) to ([\d.]+) % of ours, "
        r"at 128 Adam's ([\d.]+) % and Muon's ([\d.]+) % above ([\d.]+) to ([\d.]+) %, "
        r"at 512 Adam's ([\d.]+) % above ([\d.]+) to ([\d.]+) %",
        TEXT,
    ).groups()
    averaged = ("C-Adam-averaged", "C-Nesterov-averaged")
    promised = "C-SGD-promise"
    ours = {
        32: (*C_VERSIONS, averaged[0], promised),
        128: (*C_VERSIONS, *averaged, promised),
        512: ("C-SGD", "C-Adam", averaged[0], promised),
    }
    better = {32: ("SGD", "Adam"), 128: ("Adam", "Muon"), 512: ("Adam",)}
    found = []
    for batch, names in ours.items():
        of_ours, of_better = accuracies(batch, names), accuracies(batch, better[batch])
        found += [*reversed(medians(of_better)), *medians(of_ours)[:: len(names) - 1]]
        assert max(max(spread.values) for spread in of_ours.values()) < min(of_better["Adam"].values)
        assert medians(of_ours)[-1] < medians(of_better)[0]
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


def test_searches_that_were_not_finished():
    trials, steps = re.search(r"after (\d) trials the best had needed ([\d,]+) steps", TEXT).groups()
    assert len(MLP.trials("K-FAC")) == int(trials)
    best = MLP.best("K-FAC")
    assert best["score"] * best["steps"] == pytest.approx(int(steps.replace(",", "")), abs=1)


def test_soap_is_behind_muon():
    for results in PERCEPTRONS.values():
        assert min(arrivals(results, "SOAP")) > max(arrivals(results, "Muon"))


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
    assert sorted(large, key=lambda name: -large[name].median)[:2] == ["Muon", "C-SGD"]
    behind = f"{100 * (large['Muon'].median - large['C-SGD'].median):.2f} points above C-SGD"
    assert f"At 128 Muon has {100 * large['Muon'].median:.4g} %, {behind}, whose best seed is at Muon's median" in TEXT
    assert max(large["C-SGD"].values) == large["Muon"].median
    before = accuracies(32, ("C-SGD", "SGD", "Muon"))
    said = re.search(rf"no decay, C-SGD had {N} % at 32, SGD {N} % and Muon {N} %", TEXT).groups()
    assert list(said) == [f"{100 * spread.median:.4g}" for spread in before.values()]
    assert races[32].best("C-SGD")["number"] == 4
    pairs = [(32, "SGD"), (32, "C-SGD"), (128, "C-Nesterov"), (128, "Muon")]
    held_out = [-100 * races[batch].best(name)["score"] for batch, name in pairs]
    told = (
        "SGD was above C-SGD at 32: {:.4g} against {:.4g} %, and C-Nesterov above Muon at 128: {:.4g} against {:.4g} %"
    )
    assert told.format(*held_out) in TEXT
    complete = {
        (batch, name): sum(
            line["state"] == "complete" and len(line["curve"]["step"]) == 49 for line in races[batch].trials(name)
        )
        for batch in races
        for name in spreads[batch]
    }
    of_32 = [count for (batch, _), count in complete.items() if batch == 32]
    assert (min(of_32), max(of_32)) == (1, 5)
    assert (complete[128, "SGD"], complete[128, "C-SGD"]) == (4, 14)
    assert "which one to five ran to their end" in TEXT
    assert "where four of its 24 ran to their end and 14 of C-SGD's" in TEXT
    assert {len(races[128].trials(name)) for name in large} == {24}
    near = [
        line
        for line in races[32].trials("SGD")
        if 0.001 < line["settings"]["decay"] < 0.004 and line["settings"]["lr"] > 0.02
    ]
    assert all(line["state"] == "pruned" for line in near)
    firsts = [(32, "Muon"), (32, "AdamW"), (32, "C-AdamW"), (128, "SGD")]
    assert [races[batch].best(name)["number"] for batch, name in firsts] == [0] * 4
    chosen = [
        races[batch].best(name)["settings"]["relative_damping"]
        for batch in races
        for name in ("C-SGD", "C-Nesterov", "C-AdamW")
    ]
    assert f"and {min(chosen):.2g} to {max(chosen):.2g} were chosen, at 128 C-SGD's {chosen[3]:.2g}" in TEXT
    assert {knob.low for knob in CONTESTANTS["C-SGD"].space(races[32].task) if "damping" in knob.name} == {0.3}


def test_what_twelve_more_trials_brought_is_in_the_results():
    race = Results.of(TASKS["mlp-cifar10-b128-test"], RACE.output)
    before, gains = {}, {}
    for name in CONTESTANTS:
        if race.trials(name):
            first = replace(race, lines=[line for line in race.lines if line.get("number", 0) < 12])
            now = spread_of(BEST_TEST, race.finals(name)).median
            before[name] = spread_of(BEST_TEST, first.finals(name))
            gains[name] = 100 * (now - before[name].median)
    told = "They brought Nesterov {:.1f} points, C-SGD {:.1f}, C-Nesterov {:.1f}, C-AdamW {:.1f}, Muon {:.2f}, SGD and"
    assert told.format(*(gains[name] for name in ("Nesterov", "C-SGD", "C-Nesterov", "C-AdamW", "Muon"))) in TEXT
    assert gains["SGD"] == gains["FOOF"] == 0
    assert f"and AdamW lost {-gains['AdamW']:.2f}." in TEXT
    muon, ours = before["Muon"], before["C-AdamW"]
    told = f"Then Muon had {100 * muon.median:.4g} %, {100 * (muon.median - ours.median):.1f} points above C-AdamW"
    assert told in TEXT
    assert min(muon.values) > max(max(one.values) for name, one in before.items() if name.startswith("C-"))
    decays = {name: race.best(name)["settings"]["decay"] for name in gains}
    told = "C-SGD and C-Nesterov have found decays of {:.2g} and {:.2g}, stronger".format(
        decays["C-SGD"], decays["C-Nesterov"]
    )
    assert told in TEXT
    assert sorted(decays, key=decays.get)[-2:] == ["C-SGD", "C-Nesterov"]


def test_what_is_said_of_averaged_steps_is_in_the_results():
    averaged = {batch: set(arrivals(results, "C-Adam-averaged")) for batch, results in PERCEPTRONS.items()}
    assert averaged == {32: {1500}, 128: {375}, 512: {101}}
    assert "the fewest steps: 1,500, 375 and 101 at 32, 128 and 512" in TEXT
    assert "At 512 there is less to gain: 101 steps against 116" in TEXT
    assert [len(results.finals("C-Adam-averaged")) for results in PERCEPTRONS.values()] == [5, 5, 5]
    assert MLP.best("C-Adam-averaged")["number"] == 0
    forms = ("FOOF", "FOOF-sparing")
    foof = [min(statistics.median(arrivals(race, name)) for name in forms) for race in PERCEPTRONS.values()]
    assert "needs {:,.0f}, {:.0f} and {:.0f}, in the better of its two forms".format(*foof) in TEXT
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
