"""Verdicts on ResNet-20, from both sides of their thresholds."""

from dataclasses import replace

import pytest
from synthetic import by_reading, entry, kept

from consequent_lab.paper.resnet20 import _headlines
from consequent_lab.paper.resnet20_recipe import LABELS
from consequent_lab.paper.resnet20_statements import statements
from consequent_lab.train_config import TrainConfig

(
    BEATS_PLAIN, ADAM, SGD, C_ADAM, ALL_CORRECT, NONE_FORGOTTEN, BN_FORGETS, FORGETS_LESS, CROSSES, RESEMBLES,
    NESTEROV_CORRECT, NESTEROV_NONE, BN_HELPS, PARAMETERS, GRADIENTS, CONFLICT, PLAIN_IN_TIME, EQUAL_IN_TIME,
    NESTEROV_IN_TIME,
) = range(19)  # fmt: skip
CONFIG = TrainConfig(log_every=100)
EPOCH = 500  # iterations
EPOCHS = 80


def falling(factor=1.0, rate=0.9):
    return [2.0 * factor * rate**number for number in range(EPOCHS)]


def rising(place=12):
    """Accuracies that are at 1 from an epoch on."""
    return [min(1.0, (number + 1) / place) for number in range(EPOCHS)]


def run(
    seed=0, losses=None, accuracies=None, batches=None, forgotten=None, norms=None, every=EPOCH, outcome="finished"
):
    accuracies = accuracies or rising()
    readings = {
        "epoch_loss": losses or falling(),
        "epoch_accuracy": accuracies,
        "batch_accuracy": batches or accuracies,
        "forgotten": forgotten or [0] * EPOCHS,
        "gradient_norms": [{"plain": norms or {"0": 1.0, "2.first": 2.0}}] * EPOCHS,
    }
    return kept(by_reading(every, **readings), seed=seed, config=CONFIG, outcome=outcome)


def verdict(number, **runs):
    """With `c_sgd=[run(…), …]` and so on; the others have no run."""
    seconds = runs.pop("seconds", {})
    entries = {
        label: entry(label, *runs.get(key, ()), seconds=seconds.get(key))
        for label in LABELS
        if (key := label.lower().replace("-", "_"))
    }
    return statements(entries)[number].verdict


def test_nothing_is_measured_without_runs():
    found = [statement.verdict for statement in statements({label: entry(label) for label in LABELS})]
    assert found.pop(PARAMETERS) == "does not hold", "this needs no run"
    assert set(found) == {"not measured"}


def test_better_than_plain_in_every_pair_of_seeds():
    good, bad = [run(losses=falling(0.5)), run(1, losses=falling(0.6))], [run(), run(1, losses=falling(0.9))]
    assert verdict(BEATS_PLAIN, c_sgd=good, sgd=bad, c_nesterov=good, nesterov=bad) == "holds"
    assert verdict(BEATS_PLAIN, c_sgd=good, sgd=bad) == "holds in part"
    mixed = [*good[:1], run(1, losses=falling(0.95))]
    assert verdict(BEATS_PLAIN, c_sgd=mixed, sgd=bad, c_nesterov=mixed, nesterov=bad) == "does not hold"
    slow = {"c_sgd": 0.02, "sgd": 0.001, "c_nesterov": 0.02, "nesterov": 0.001}
    in_time = {"c_sgd": good, "sgd": bad, "c_nesterov": good, "nesterov": bad}
    assert verdict(PLAIN_IN_TIME, **in_time, seconds=dict.fromkeys(slow, 0.01)) == "holds"
    assert verdict(PLAIN_IN_TIME, **in_time, seconds=slow) == "does not hold"
    assert verdict(PLAIN_IN_TIME, **in_time) == "not measured", "side by side is no measurement"


def test_adam_is_never_better_and_c_adam_changes_little():
    others = {"sgd": [run()], "nesterov": [run()], "sgd_bn": [run()], "nesterov_bn": [run()]}
    worse, better = [run(losses=falling(1.1))], [run(losses=falling(0.9))]
    assert verdict(ADAM, adam=worse, adam_bn=worse, **others) == "holds"
    assert verdict(ADAM, adam=better, adam_bn=worse, **others) == "holds in part"
    assert verdict(ADAM, adam=better, adam_bn=better, **others) == "does not hold"
    assert verdict(SGD, adam=worse, adam_bn=worse, **others) == "holds in part", "as good as Nesterov is not better"
    assert verdict(SGD, adam=better, adam_bn=better, **others) == "does not hold"
    assert verdict(C_ADAM, adam=worse, c_adam=better) == "holds"  # 0.09 decades
    assert verdict(C_ADAM, adam=worse, c_adam=[run(losses=falling(0.8))]) == "does not hold"
    good_then_bad = [loss * (0.6 + 0.9 * place / EPOCHS) for place, loss in enumerate(falling())]
    assert verdict(C_ADAM, adam=[run()], c_adam=[run(losses=good_then_bad)]) == "holds in part"


@pytest.mark.parametrize(
    ("number", "name", "epoch"), [(ALL_CORRECT, "c_sgd", 16), (NESTEROV_CORRECT, "c_nesterov", 14)]
)
def test_all_correct_in_both_readings_and_every_seed(number, name, epoch):
    in_time, late = run(accuracies=rising(epoch)), run(1, accuracies=rising(epoch + 1))
    assert verdict(number, **{name: [in_time]}) == "holds"
    assert verdict(number, **{name: [in_time, late]}) == "does not hold"
    batches = [1.0] * EPOCHS
    batches[20] = 127 / 128  # the paper's reading leaves 100 % once more
    assert verdict(number, **{name: [run(accuracies=rising(epoch), batches=batches)]}) == "holds in part"


def test_a_run_that_is_too_short_does_not_refute():
    short = run(every=50, accuracies=[0.5] * EPOCHS)
    assert verdict(ALL_CORRECT, c_sgd=[short]) == "not measured"
    diverged = run(every=50, accuracies=[0.5] * EPOCHS, outcome="diverged")
    assert verdict(ALL_CORRECT, c_sgd=[diverged]) == "does not hold"


def test_forgetting_counts_after_the_limit_only():
    early, late = [0] * EPOCHS, [0] * EPOCHS
    early[15], late[16] = 3, 1  # at iterations 8,000 and 8,500
    assert verdict(NONE_FORGOTTEN, c_sgd=[run(forgotten=early)]) == "holds"
    assert verdict(NONE_FORGOTTEN, c_sgd=[run(forgotten=early), run(1, forgotten=late)]) == "does not hold"
    assert verdict(BN_FORGETS, sgd_bn=[run(forgotten=late)]) == "holds"
    assert verdict(BN_FORGETS, sgd_bn=[run(forgotten=early)]) == "does not hold"
    assert verdict(FORGETS_LESS, c_sgd=[run(forgotten=late)], sgd_bn=[run(forgotten=early)]) == "holds"
    assert verdict(FORGETS_LESS, c_sgd=[run(forgotten=early)], sgd_bn=[run(forgotten=late)]) == "does not hold"


def crossing_at(epoch):
    """Losses that are above `falling()` before an epoch and far below it after."""
    return [2.0 * loss if number < epoch else loss / 100 for number, loss in enumerate(falling())]


def test_crossing_after_25000_iterations():
    assert verdict(CROSSES, c_sgd=[run()], sgd_bn=[run(losses=crossing_at(55))]) == "holds"
    assert verdict(CROSSES, c_sgd=[run()], sgd_bn=[run(losses=crossing_at(45))]) == "holds in part"
    assert verdict(CROSSES, c_sgd=[run()], sgd_bn=[run(losses=falling(2.0))]) == "holds in part"
    assert verdict(CROSSES, c_sgd=[run()], sgd_bn=[run(losses=falling(0.5))]) == "does not hold"
    short = run(every=100, losses=falling(2.0))
    assert verdict(CROSSES, c_sgd=[run(every=100)], sgd_bn=[short]) == "holds in part", "no crossing was measured"


def test_resemblance_of_accuracies():
    near, far = [0.985] * EPOCHS, [0.975] * EPOCHS
    same = [1.0] * EPOCHS
    assert verdict(RESEMBLES, c_sgd=[run(accuracies=same)], sgd_bn=[run(accuracies=near)]) == "holds"
    assert verdict(RESEMBLES, c_sgd=[run(accuracies=same)], sgd_bn=[run(accuracies=far)]) == "does not hold"


def test_gradients_are_of_one_scale():
    fine, vanished = {"0": 1.0, "2.first": 900.0}, {"0": 1.0, "2.first": 1100.0}
    both = {"c_sgd": [run(norms=fine)], "sgd_bn": [run(norms={"0.0": 1.0, "0.1": 1e-9, "2": 5.0})]}
    assert verdict(GRADIENTS, **both) == "holds", "a BatchNorm is no layer here"
    assert verdict(GRADIENTS, **both | {"c_sgd": [run(norms=vanished)]}) == "holds in part"


def test_batchnorm_beside_the_correction():
    alone = {"c_sgd": [run()], "sgd_bn": [run(losses=falling(1.1))]}
    assert verdict(CONFLICT, c_sgd_bn=[run(losses=falling(1.2))], **alone) == "holds"
    assert verdict(CONFLICT, c_sgd_bn=[run(losses=falling(1.05))], **alone) == "holds in part"
    assert verdict(CONFLICT, c_sgd_bn=[run(losses=falling(0.9))], **alone) == "does not hold"
    nesterov = {"nesterov": [run()], "nesterov_bn": [run(losses=falling(0.5))]}
    assert verdict(BN_HELPS, c_nesterov=[run(losses=falling(0.4))], **nesterov) == "holds"
    assert verdict(BN_HELPS, c_nesterov=[run(losses=falling(0.6))], **nesterov) == "holds in part"


def test_time_to_a_high_accuracy():
    seconds = {"c_sgd": 0.012, "sgd_bn": 0.01, "c_nesterov": 0.01, "nesterov_bn": 0.011}
    runs = {name: [run()] for name in seconds}
    assert verdict(EQUAL_IN_TIME, **runs, seconds=seconds) == "holds"
    assert verdict(EQUAL_IN_TIME, **runs, seconds=seconds | {"c_sgd": 0.013}) == "does not hold"
    assert verdict(NESTEROV_IN_TIME, **runs, seconds=seconds) == "holds"
    assert verdict(NESTEROV_IN_TIME, **runs, seconds=seconds | {"c_nesterov": 0.012}) == "does not hold"
    never = [0.9] * EPOCHS
    assert verdict(NESTEROV_IN_TIME, **runs | {"nesterov_bn": [run(accuracies=never)]}, seconds=seconds) == "holds"


def test_runs_of_different_lengths_are_compared_after_an_epoch_that_all_have():
    """A run's last reading may be in the midst of an epoch."""

    def lines(last):
        places = [*range(EPOCH, last + 1, EPOCH), *([last] if last % EPOCH else [])]
        return [(at, {"epoch_loss": 1 / at, "test_accuracy": at / 1e4, "forgotten": 1}) for at in places]

    entries = []
    for label, last in (("C-SGD", 4 * EPOCH), ("SGD", 2 * EPOCH + 100)):
        found = entry(label, kept(lines(last), config=CONFIG))
        entries.append(replace(found, contestant=replace(found.contestant, headline=True)))
    table = _headlines(entries)
    assert "loss over the epoch until 1,000" in table.columns
    for row in table.rows:
        assert row[-3:] == ["0.001", "0.100", "2"]
