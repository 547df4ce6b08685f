"""Runs of the former editions that are kept are repeated, and come to the same losses: the formula is the same.

In float64 the editions agree to 13 digits. In float32 they round differently, which grows in training, and now and then
moves a unit across the kink of its ReLU; then losses differ by a per cent or so. Where that may happen within the steps
that are repeated, the median of three seeds is compared.
"""

import hashlib
import json
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import second_edition
from benchmarks.defaults import study
from consequent_lab import learner
from consequent_lab.paper.archive import Archive
from consequent_lab.runs import RunFolder
from consequent_lab.trainer import train

RESULTS = Path(__file__).parents[2] / "results"


def former_order(samples, batch_size, seed, epoch):
    """The order of samples in an epoch when the runs on the digits were made."""
    number = int.from_bytes(hashlib.sha256(f"seed {seed}, epoch {epoch}".encode()).digest()[:7], "big")
    return torch.randperm(samples, generator=torch.Generator().manual_seed(number))


@pytest.mark.parametrize("variant", ["c-sgd-damping-10-lr0.17", "c-nesterov-lr0.001", "c-sgd-damping-1e-07-lr0.017"])
def test_perceptrons_on_the_digits(tmp_path, monkeypatch, variant):
    """Measured, with three ways of rounding: medians of 2e-5 at most. Twice the λ: 0.4 and 4e-4 for the first two."""
    monkeypatch.setattr(learner, "order_of", former_order)
    differences = []
    for kept in Archive(RESULTS / "paper").runs("digits", variant):
        folder = RunFolder(tmp_path / f"seed{kept.seed}")
        train(replace(kept.config, epochs=None, iterations=15), folder)
        (loss,) = (line["batch_loss"] for line in folder.metrics() if line["iteration"] == 15)
        differences.append(abs(loss / kept.at("batch_loss", 15) - 1))
    assert len(differences) == 3
    assert statistics.median(differences) < 1e-4


AVERAGED = "relative 0.1, averaging 0.95, refresh 10"


@pytest.mark.parametrize(
    ("task", "contestant", "damping", "rate"),
    [
        ("smooth-function", "c-adam", AVERAGED, 0.001),
        ("table-regression", "c-sgd", f"{AVERAGED}, bound 0.2", 0.1),  # which shortened 15 gradients
        ("digits-cnn", "c-sgd", AVERAGED, 0.1),
        ("vae", "c-nesterov", "relative 0.1, bound 0.2", 0.01),  # which shortened 24 gradients
        ("table-classes", "c-adam", "relative 1", 0.001),
        ("digits-cnn", "c-nesterov", "relative 0.1, bound 0.2", 0.01),
    ],
)
def test_whole_runs_of_the_study_of_defaults(task, contestant, damping, rate):
    """Losses are kept with five digits. Measured, with four ways of rounding: 5e-5 at most."""
    run = study.Run(task, contestant, damping, rate, seed=0, steps=0)
    kept = study.Results(RESULTS / "defaults.jsonl.gz").records[run]
    assert study.train(run)["trajectory"] == pytest.approx(kept["trajectory"], rel=1e-3)


@pytest.mark.parametrize("name", second_edition.NAMES)
def test_the_first_steps_of_resnet20(name):
    """Measured, with two ways of rounding: 7e-7 at most; the two contestants differ by 1e-2."""
    kept = json.loads((RESULTS / "second-edition.json").read_text())
    assert kept["settings"] == second_edition.SETTINGS
    assert second_edition.losses(name) == pytest.approx(kept["losses"][name], rel=1e-5)
