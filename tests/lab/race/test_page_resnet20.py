"""What docs/race.md says of ResNet-20 is in results/race."""

import json
import re
import statistics

from race_page import BEST_TEST, RACE, RESNET, ROOT, TEXT, arrivals

from consequent_lab.race.results import Results
from consequent_lab.race.table import spread_of
from consequent_lab.race.tasks import TASKS


def spreads_of(results, *names):
    return [spread_of(results.task.measure, results.finals(name)) for name in names]


def results_of(name):
    return Results.of(TASKS[f"resnet20-cifar10-{name}"], RACE.output)


def test_augmented():
    ours, theirs, muon = spreads_of(results_of("cutout"), "C-Nesterov", "Nesterov-BN", "Muon")
    behind, ahead = (100 * (theirs.median - ours.median), 100 * (ours.median - muon.median))
    assert (
        f"ends at {100 * ours.median:.2f} % after 100 epochs with cutout, {behind:.2f} points below the one with "
        f"BatchNorm and {ahead:.2f} above Muon without either; after 20 epochs the three are level" in TEXT
    )
    ours, theirs = spreads_of(RESNET, "C-Nesterov", "Nesterov-BN")
    assert f"without cutout, it is {100 * (theirs.median - ours.median):.2g} below" in TEXT
    ours, theirs, muon, corrected = spreads_of(results_of("20ep"), "C-Nesterov", "Nesterov-BN", "Muon", "C-Muon")
    assert max(ours.values) > max(min(theirs.values), min(muon.values))
    assert max(corrected.values) < min(muon.values)
    assert f"Correcting before Muon makes it worse, by {100 * (muon.median - corrected.median):.2f} points" in TEXT
    trials = [len(results_of("cutout").trials(name)) for name in ("C-Nesterov", "Nesterov-BN", "Muon")]
    assert trials == [7, 7, 3]


def test_to_all_of_its_training_images():
    results = results_of("train")
    ours, theirs = (arrivals(results, name) for name in ("C-Nesterov", "Nesterov-BN"))
    assert max(ours) < min(theirs)
    assert f"after {statistics.median(ours) / statistics.median(theirs):.2f} of the steps" in TEXT
    best = [spread_of(BEST_TEST, results.finals(n)).median for n in ("Nesterov-BN", "C-Nesterov")]
    assert f"{100 * (best[0] - best[1]):.0f} points fewer of the test images" in TEXT


def test_single_runs_before_the_search():
    lines = [json.loads(line) for line in (ROOT / "results" / "resnet20-exploration.jsonl").read_text().splitlines()]
    counts = re.search(r"C-Nesterov's in (\d+) of them, BatchNorm's in (\w+), with one rate", TEXT).groups()
    with_norm = [line for line in lines if line["contestant"] == "Nesterov-BN"]
    assert counts == (str(sum(line["contestant"] == "C-Nesterov" for line in lines)), {6: "six"}[len(with_norm)])
    assert {line["settings"]["lr"] for line in with_norm} == {0.1}
