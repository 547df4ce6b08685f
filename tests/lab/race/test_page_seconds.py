"""What docs/race.md says of seconds is in results/race."""

import re
import statistics

import pytest
from race_page import CHINA, MLP, PERCEPTRONS, ROOT, TEXT, N, arrivals, milliseconds

from consequent_lab.race.contestants import CONTESTANTS
from consequent_lab.race.curves import unpacked
from consequent_lab.race.measures import TimeTo
from consequent_lab.race.results import Results, read_lines, seconds_until

PROMISED = ("C-SGD-promise", "C-SGD")


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
    """Eagerly averages are, at 128 in all forms alike; in CUDA graphs C-SGD is."""
    for batch in (32, 128):
        results = PERCEPTRONS[batch]
        timed = [name for name in CONTESTANTS if results.of_kind("time", name) and all(arrivals(results, name))]
        assert {"C-Adam", "C-SGD", "C-Nesterov", "Muon", "FOOF", "C-Adam-averaged"} <= {*timed}
        firsts = {32: ["C-Adam-averaged"], 128: ["FOOF-sparing", "C-Adam-averaged", "C-Nesterov-averaged"]}[batch]
        for how, level in (("eager", firsts), ("graph", ["C-SGD"])):
            seconds = {name: found for name in timed if (found := seconds_to_target(results, name, how)) is not None}
            assert sorted(seconds, key=seconds.get)[: len(level)] == level
            others = [found for name, found in seconds.items() if name not in level]
            assert max(seconds[name] for name in level) < 1.02 * min(seconds.values()) < 0.9 * min(others)
    assert seconds["Muon"] / seconds["C-SGD"] == pytest.approx(3, abs=0.1)
    assert seconds_to_target(PERCEPTRONS[128], "SOAP") > seconds_to_target(PERCEPTRONS[128], "Muon")
    assert min(arrivals(PERCEPTRONS[128], "SOAP")) > max(arrivals(PERCEPTRONS[128], "Muon"))


def test_seconds_of_foof_and_of_averages_are_in_the_results():
    races = [PERCEPTRONS[32], PERCEPTRONS[128]]
    names = ("C-Adam-averaged", "FOOF", "C-SGD", "C-Adam")
    of = {name: [f"{seconds_to_target(results, name):.3g}" for results in races] for name in names}
    said = re.search(
        rf"C-Adam-averaged arrives after {N} and {N} s at 32 and 128, FOOF after {N} and {N}, C-SGD after {N} and "
        rf"{N}\. But our FOOF inverts its averages at each of its first (\d+) steps, which then take {N} and {N} ms; "
        rf"later ones, of which every tenth does, take {N} and {N}\. At that pace it would need {N} s at 32",
        TEXT,
    ).groups()
    assert list(said[:6]) == [one for name in names[:3] for one in of[name]]
    lines = [results.of_kind("time", "FOOF")[0] for results in races]
    assert {line["first"]["steps"] for line in lines} == {int(said[6])}
    assert list(said[7:9]) == [f"{line['first']['milliseconds']:.3g}" for line in lines]
    assert list(said[9:11]) == [f"{milliseconds(results, 'FOOF'):.3g}" for results in races]
    assert said[11] == f"{statistics.median(arrivals(PERCEPTRONS[32], 'FOOF')) * milliseconds(MLP, 'FOOF') / 1e3:.3g}"
    choosing = " ".join((ROOT / "docs" / "choosing.md").read_text().split())
    assert f"at 32 ({of['C-Adam-averaged'][0]} s, C-SGD {of['C-SGD'][0]})" in choosing
    assert f"at 128 ({of['C-Adam-averaged'][1]} s, C-SGD {of['C-SGD'][1]}, C-Adam {of['C-Adam'][1]})" in choosing
    for results in races:  # of one day
        timed = [line for line in results.lines if line["kind"] == "time"]
        assert len({line["contestant"] for line in timed}) == len(timed)
        assert len({line["date"] for line in timed}) == 1


def test_what_is_said_of_sparing_foof():
    said = re.search(
        rf"At 128 it needs {N} steps, too, and {N} s; C-Nesterov-averaged, of which it is another form, {N}\. At 32 it "
        rf"needs ([\d,]+) steps and {N} s: of its twelve trials two arrived and six diverged, five of these with "
        rf"dampings of {N} or less\. FOOF's own settings there, {N} and {N}, were not among them",
        TEXT,
    ).groups()
    steps = {batch: statistics.median(arrivals(race, "FOOF-sparing")) for batch, race in PERCEPTRONS.items()}
    in_seconds = [seconds_to_target(PERCEPTRONS[128], name) for name in ("FOOF-sparing", "C-Nesterov-averaged")]
    of_32 = [f"{steps[32]:,.0f}", f"{seconds_to_target(MLP, 'FOOF-sparing'):.3g}"]
    assert list(said[:5]) == [f"{steps[128]:.0f}", *(f"{one:.3g}" for one in in_seconds), *of_32]
    trials = MLP.trials("FOOF-sparing")
    diverged = sorted(line["settings"]["damping"] for line in trials if line["score"] > 1e3)
    reached = [MLP.task.measure.arrival(unpacked(line["curve"])) for line in trials]
    assert (len(trials), len(diverged), sum(step is not None for step in reached)) == (12, 6, 2)
    assert sum(damping <= float(said[5]) for damping in diverged) == 5
    assert list(said[6:]) == [f"{MLP.best('FOOF')['settings'][name]:.2g}" for name in ("lr", "damping")]


def test_what_is_said_of_a_promise():
    steps = [[statistics.median(arrivals(race, name)) for race in PERCEPTRONS.values()] for name in PROMISED]
    told = [", ".join(f"{one:,.0f}" for one in three[:2]) + f" and {three[2]:,.0f}" for three in steps]
    assert f"needs more steps than C-SGD once both have been searched for: {told[0]} against {told[1]}." in TEXT
    sooner = TimeTo("train_loss", 0.1)
    for race in PERCEPTRONS.values():
        first, second = (
            statistics.median(sooner.arrival(unpacked(line["curve"])) for line in race.finals(name))
            for name in PROMISED
        )
        assert first == second
    timed = {
        batch: Results(race.task, ROOT, read_lines(ROOT / "results" / "promise-times" / f"{race.task.name}.jsonl"))
        for batch, race in PERCEPTRONS.items()
        if batch != 512
    }
    costs = [milliseconds(timed[32], name, how) for how in ("graph", "eager") for name in PROMISED]
    said = rf"its step costs more: {N} ms instead of {N} in a CUDA graph at 32, {N} instead of {N} eagerly"
    assert [float(one) for one in re.search(said, TEXT).groups()] == pytest.approx(costs, rel=0.01)
    assert milliseconds(timed[32], PROMISED[0], "graph") < milliseconds(MLP, PROMISED[0], "graph")
    ratios = [
        milliseconds(race, PROMISED[0], how) / milliseconds(race, PROMISED[1], how)
        for how in ("graph", "eager")
        for race in timed.values()
    ]
    choosing = " ".join((ROOT / "docs" / "choosing.md").read_text().split())
    told = "{:.2f} times as long in a CUDA graph at 32 and {:.2f} times at 128, eagerly {:.2f} and {:.2f} times"
    assert told.format(*ratios) in choosing
    firsts, all_firsts = {}, {"C-SGD-promise": [], "Muon": []}
    for race, searched in zip(PERCEPTRONS.values(), steps[0], strict=True):
        measure = race.task.measure
        firsts = {
            name: measure.arrival(unpacked(race.trials(name)[0]["curve"])) for name in CONTESTANTS if race.trials(name)
        }
        assert firsts["C-SGD-promise"] <= 1.1 * searched
        for name, found in all_firsts.items():
            found.append(firsts[name])
    assert min(step for step in firsts.values() if step is not None) == firsts["C-SGD-promise"]  # at 512
    ours, muon = all_firsts.values()
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert "after {:,}, {:,} and {:,} steps with batches of 32, 128 and 512, and Muon".format(*ours) in readme
    assert "Muon, not searched for either, after {:,}, {:,} and not at all".format(*muon[:2]) in readme
    assert muon[2] is None
