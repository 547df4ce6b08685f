"""Verdicts on what was looked at on the digits, from both sides."""

from dataclasses import replace

import pytest
from synthetic import contestant, kept, metric_lines, verdict

from consequent_lab.paper import inside
from consequent_lab.paper.digits import (
    DAMPING,
    DAMPINGS,
    MOMENTA,
    damped,
    failed_factorisations,
    race,
    statements,
    with_momentum,
)

LOSSES = [1.0, 0.5, 0.2]


def run(factor=1.0, failed=0):
    found = kept(metric_lines(45, epoch_loss=[factor * loss for loss in LOSSES], test_accuracy=[0.9] * 3))
    found.lines[-1]["failed"] = failed
    return found


def judged(words, **runs):
    """With `label=run`; the others have a run with factor 1."""
    one = race()
    every = {contestant_.label: contestant(contestant_.label, run()) for contestant_ in one.contestants}
    every |= {label: contestant(label, found) for label, found in runs.items()}
    return verdict(statements(one, every), words)


def test_applicable_means_lower_than_the_plain_version():
    better = {f"C-{name}": run(0.5) for name in ("RMSprop", "Adam", "Nesterov")}
    assert judged("RMSProp, Adam, and NAG", **better) == "holds"
    assert judged("RMSProp, Adam, and NAG", **better | {"C-Adam": run(1.1)}) == "holds in part"


def test_the_best_momentum_is_the_one_with_the_lowest_loss():
    papers = {with_momentum(name, 0.95): run(0.5) for name in ("SGD", "Nesterov")}
    assert judged("momentum value", **papers) == "holds"
    assert judged("momentum value", **papers | {with_momentum("SGD", MOMENTA[0]): run(0.4)}) == "holds in part"


def test_ridge_prevents_failures_and_lowers_the_loss():
    least, chosen = damped(DAMPINGS[0]), damped(DAMPING)
    assert judged("ill-conditioning", **{least: run(2.0, failed=3)}) == "holds"
    assert judged("ill-conditioning", **{least: run(2.0)}) == "holds in part", "nothing failed that it could prevent"
    assert judged("ill-conditioning", **{least: run(0.5, failed=3), chosen: run(1.0, failed=1)}) == "does not hold"


def test_failures_in_runs_of_former_versions_are_in_their_counters():
    found = kept([(45, {"counters": {"steps": 45, "rescued": 3, "skipped": 1}})])
    assert failed_factorisations(found) == 4


@pytest.fixture(scope="module")
def trained():
    """Short trainings in place of the real ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inside, "STEPS", 45)
        inside.train.cache_clear()
        yield {label: inside.train(label, 0.1, 0) for label in ("C-SGD", "SGD", "First extension")}
        inside.train.cache_clear()


def test_each_layer_by_itself_moves_straight_and_all_at_once_do_not(trained):
    ours = trained["C-SGD"]
    assert min(inside.by_layer(ours.own)) > 0.999
    assert max(inside.by_layer(ours.real)[1:]) < 0.999, "the first layer's inputs stay as they are"
    assert ours.losses[-1] < ours.losses[0]
    assert all(value <= 1 for value in ours.damped)
    assert len(trained["SGD"].real) == 45
    assert max(inside.by_layer(trained["SGD"].own)) < min(inside.by_layer(ours.own))


def test_verdicts_on_the_inside_follow_the_trainings(trained):
    ours, plain, extension = trained.values()
    others = {"plain": [plain] * 3, "c_sgd": {inside.C_RATE: [ours] * 3}, "extension": {0.1: [extension] * 3}}
    found = inside.statements(**others)
    assert verdict(found, "best possible direction") == "holds"
    bent = replace(ours, own=[[0.5] * 9], damped=[0.1])
    found = inside.statements(**others | {"c_sgd": {inside.C_RATE: [ours, ours, bent]}})
    assert verdict(found, "best possible direction") == "does not hold"
    found = inside.statements(**others | {"c_sgd": {inside.C_RATE: [bent] * 3}})
    assert verdict(found, "from changing dramatically") == "holds"
    blown_up = replace(extension, losses=[*extension.losses[:-1], 99.0])
    found = inside.statements(**others | {"extension": {0.1: [blown_up] * 3}})
    assert verdict(found, "observed instabilities") == "holds in part", "its steadiness was not measured then"
