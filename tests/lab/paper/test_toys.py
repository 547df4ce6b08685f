"""The experiments that only compute: their verdicts follow what was computed."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from consequent_lab.paper import filters, loss_surface, output_paths
from consequent_lab.paper.measures import detour, overshoot, roughness, steps_until, swings

NOWHERE = Path("nowhere")


@pytest.mark.parametrize("experiment", [loss_surface, output_paths, filters])
def test_a_finding_is_complete_and_the_same_every_time(experiment):
    found = experiment.finding(NOWHERE)
    assert found == experiment.finding(NOWHERE)
    assert found.name == experiment.NAME
    assert {statement.verdict for statement in found.statements} <= {"holds", "holds in part"}
    assert {statement.kind for statement in found.statements} == {"toy"}
    for figure in found.figures:
        for panel in figure.panels:
            for series in panel.series:
                assert len({len(values) for values in series.columns.values()}) == 1
                assert {axis.column for axis in (*panel.x, *panel.y)} <= series.columns.keys()


def test_another_path_gets_another_verdict():
    paths = {
        (label, rate): loss_surface.walk(label, rate)
        for label in loss_surface.LABELS
        for rate in (loss_surface.HIGH_RATE, loss_surface.LOW_RATE)
    }
    swapped = {
        (label, rate): paths["SGD" if label == "C-SGD" else "C-SGD" if label == "SGD" else label, rate]
        for label, rate in paths
    }
    verdicts = [statement.verdict for statement in loss_surface.statements(swapped)]
    assert verdicts[0] == verdicts[1] == "does not hold"


def test_what_is_said_of_momentum_is_looked_at_in_twenty_settings():
    *_, reduces, passes, _ = loss_surface.finding(NOWHERE).statements
    assert (reduces.share, passes.share) == ("7 of 20", "16 of 20")
    assert "together with the statement before in 4." in passes.measured


def test_sgd_is_not_straight_only_because_samples_share_the_weights():
    straight = output_paths.walk("C-SGD", 0.7)
    assert max(straight.detours) < 1e-9
    bent = output_paths.walk("SGD", 0.01)
    walks = {(one.label, one.rate): one for one in (straight, bent)}
    walks |= {("C-SGD", 0.1): output_paths.walk("C-SGD", 0.1), ("SGD", 0.03): output_paths.walk("SGD", 0.03)}
    walks |= {("First extension", rate): straight for rate in output_paths.EXTENSION_RATES}
    assert output_paths.statements(walks)[3].verdict == "does not hold"
    walks["C-SGD", 0.1] = bent
    assert output_paths.statements(walks)[0].verdict == "holds in part"


def test_filters_swapped_refute():
    inputs, targets = filters.samples()
    streams = {
        "LMS": filters.Stream(filters.nlms(inputs, targets, 0.2)),
        "NLMS": filters.Stream(filters.lms(inputs, targets, 0.2)),
    }
    assert {statement.verdict for statement in filters.statements(streams)} == {"does not hold"}


def test_the_outlier_is_one_sample_off_by_one():
    inputs, targets = filters.samples()
    off = targets - inputs @ torch.tensor(filters.WEIGHTS, dtype=torch.float64)
    assert off.nonzero().flatten().tolist() == [filters.OUTLIER_AT]
    assert inputs[filters.OUTLIER_AT].norm() == pytest.approx(filters.OUTLIER_NORM)


def test_measures_of_paths():
    assert detour([(0, 0), (2, 0), (1, 0)]) == pytest.approx(1.0), "beyond the end is off the line, too"
    assert detour([(1, 1), (1, 1)]) == 0
    assert swings([-1.0, 0.5, -0.25, 0.125], 0.0) == 3
    assert overshoot([-1.0, 0.5], 0.0) == 0.5
    assert steps_until([1.0, float("nan")]) is None
    assert roughness([1.0, 0.0, 1.0]) > 1, "a loss of 0 has a logarithm here"


def test_a_walk_that_diverges_ends():
    walk = output_paths.walk("First extension", 1.9)
    assert len(walk.outputs) < output_paths.STEPS
    assert walk.last_distance > 1e5
    assert replace(walk, rate=1.0).label == "First extension"
