"""Verdicts on ResNet-20, from both sides of their thresholds."""

from dataclasses import replace

import pytest
from synthetic import contestant, kept, metric_lines
from synthetic import verdict as verdict_among

from consequent_lab.paper.resnet20 import LABELS, headlines_table, race
from consequent_lab.paper.resnet20_statements import CONTROL, statements
from consequent_lab.train_config import TrainConfig

BEATS_PLAIN, ADAM, C_ADAM, SGD = "Nesterov respectively", "at all", "C-Adam did not change", "SGD does better"
ALL_CORRECT, NONE_FORGOTTEN, BN_FORGETS = "C-SGD achieved", "without forgetting", "sometimes forgot"
BEGINNING, STABLE, CROSSES, RESEMBLES = "in the beginning", "its stability", "finally crossed", "striking resemblance"
NESTEROV_CORRECT, BN_HELPS, COMPETES = "at about 7000", "improved the convergence", "maintained its competitiveness"
PARAMETERS, GRADIENTS, CONFLICT = "less learnable parameters", "vanishing and exploding", "the combination"
PLAIN_IN_TIME, EQUAL_IN_TIME = "much better than their plain", "almost the same"
ADAM_IN_TIME, NESTEROV_IN_TIME = "performed better than Adam", "better than Nesterov-BN"
HIGHEST, FORGETS_LESS = "highest accuracies", "less often"
BEATS_CONTROLS, EARLIER, CHANGE_LITTLE = "also better than SGD", "knows the training set earlier", "change little"
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
    metrics = {
        "epoch_loss": losses or falling(),
        "epoch_accuracy": accuracies,
        "batch_accuracy": batches or accuracies,
        "forgotten": forgotten or [0] * EPOCHS,
        "gradient_norms": [{"plain": norms or {"0": 1.0, "2.first": 2.0}}] * EPOCHS,
    }
    return kept(metric_lines(every, **metrics), seed=seed, config=CONFIG, outcome=outcome)


def verdict(words, **runs):
    """With `c_sgd=[run(…), …]` and so on; the others have no run."""
    seconds = runs.pop("seconds", {})
    contestants = {
        label: contestant(label, *runs.get(key, ()), seconds=seconds.get(key))
        for label in LABELS
        if (key := label.lower().replace("-", "_").replace(" ", "_"))
    }
    return verdict_among(statements(race(), contestants), words)


def test_nothing_is_measured_without_runs():
    found = statements(race(), {label: contestant(label) for label in LABELS})
    assert [PARAMETERS in one.paper for one in found if one.kind == "toy"] == [True]
    assert {one.verdict for one in found if one.kind in ("empirical", "control")} == {"not measured"}


def test_better_than_plain_in_every_pair_of_seeds():
    good, bad = [run(losses=falling(0.3)), run(1, losses=falling(0.4))], [run(), run(1, losses=falling(0.9))]
    assert verdict(BEATS_PLAIN, c_sgd=good, sgd=bad, c_nesterov=good, nesterov=bad) == "holds"
    assert verdict(BEATS_PLAIN, c_sgd=good, sgd=bad) == "holds in part"
    mixed = [*good[:1], run(1, losses=falling(0.95))]
    assert verdict(BEATS_PLAIN, c_sgd=mixed, sgd=bad, c_nesterov=mixed, nesterov=bad) == "does not hold"
    slow = {"c_sgd": 0.02, "sgd": 0.001, "c_nesterov": 0.02, "nesterov": 0.001}
    in_time = {"c_sgd": good, "sgd": bad, "c_nesterov": good, "nesterov": bad}
    assert verdict(PLAIN_IN_TIME, **in_time, seconds=dict.fromkeys(slow, 0.01)) == "holds"
    assert verdict(PLAIN_IN_TIME, **in_time, seconds=slow) == "does not hold"
    assert verdict(PLAIN_IN_TIME, **in_time) == "not measured", "side by side is no measurement"


def test_adam_is_never_better_and_c_adam_changes_nothing():
    others = {"sgd": [run()], "nesterov": [run()], "sgd_bn": [run()], "nesterov_bn": [run()]}
    worse, better = [run(losses=falling(1.1))], [run(losses=falling(0.9))]
    assert verdict(ADAM, adam=worse, **others) == "holds"
    assert verdict(ADAM, adam=worse, **others | {"sgd": [run(), run(1, losses=falling(1.2))]}) == "holds in part"
    assert verdict(ADAM, adam=better, **others) == "does not hold"
    seconds = dict.fromkeys(("sgd", "nesterov", "adam"), 0.01)
    assert verdict(ADAM_IN_TIME, adam=worse, **others, seconds=seconds) == "holds"
    assert verdict(ADAM_IN_TIME, adam=better, **others, seconds=seconds) == "does not hold"
    assert verdict(ADAM_IN_TIME, adam=worse, **others) == "not measured"
    assert verdict(SGD, adam=worse, adam_bn=worse, **others) == "holds in part", "as good as Nesterov is not better"
    assert verdict(SGD, adam=better, adam_bn=better, **others) == "does not hold"
    assert verdict(C_ADAM, adam=worse, c_adam=better) == "holds"  # 0.09 decades
    assert verdict(C_ADAM, adam=worse, c_adam=[run(losses=falling(0.8))]) == "does not hold"
    good_then_bad = [loss * (0.5 if place < EPOCHS / 2 else 2.0) for place, loss in enumerate(falling())]
    assert verdict(C_ADAM, adam=[run()], c_adam=[run(losses=good_then_bad)]) == "does not hold", "signs do not cancel"


@pytest.mark.parametrize(("words", "name", "epoch"), [(ALL_CORRECT, "c_sgd", 16), (NESTEROV_CORRECT, "c_nesterov", 14)])
def test_about_is_a_quarter_earlier_or_later_in_every_seed(words, name, epoch):
    in_time = run(accuracies=rising(epoch))
    assert verdict(words, **{name: [in_time]}) == "holds"
    for other in (round(0.7 * epoch), round(1.3 * epoch)):
        assert verdict(words, **{name: [in_time, run(1, accuracies=rising(other))]}) == "does not hold", other
    batches = [1.0] * EPOCHS
    batches[30] = 127 / 128  # the mini-batch that the paper shows leaves 100 % once more
    assert verdict(words, **{name: [run(accuracies=rising(epoch), batches=batches)]}) == "holds in part"


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


def test_crossing_about_25000_iterations():
    for epoch, expected in ((30, "does not hold"), (45, "holds"), (55, "holds"), (70, "does not hold")):
        assert verdict(CROSSES, c_sgd=[run()], sgd_bn=[run(losses=crossing_at(epoch))]) == expected, epoch
    assert verdict(CROSSES, c_sgd=[run()], sgd_bn=[run(losses=falling(2.0))]) == "does not hold", "it never does"
    short = run(every=100, losses=falling(2.0))
    assert verdict(CROSSES, c_sgd=[run(every=100)], sgd_bn=[short]) == "not measured"


def test_the_beginning_is_its_first_ten_epochs():
    late = [2.0 * loss if number < 6 else loss / 100 for number, loss in enumerate(falling())]
    assert verdict(BEGINNING, c_sgd=[run(losses=falling(0.5))], sgd_bn=[run()]) == "holds"
    assert verdict(BEGINNING, c_sgd=[run(losses=late)], sgd_bn=[run()]) == "does not hold", "far below later is no help"
    both = [run(losses=falling(0.5)), run(1, losses=late)]
    assert verdict(BEGINNING, c_sgd=both, sgd_bn=[run()]) == "does not hold", "every pair of seeds"


def test_stability_is_a_smaller_mean_rise():
    rough = [loss * (1 + number % 2) for number, loss in enumerate(falling())]
    assert verdict(STABLE, c_sgd=[run()], sgd_bn=[run(losses=rough)]) == "holds"
    assert verdict(STABLE, c_sgd=[run(losses=rough)], sgd_bn=[run()]) == "does not hold"


def test_resemblance_of_accuracies_in_the_first_10000_iterations():
    same, near, far = [1.0] * EPOCHS, [0.985] * EPOCHS, [0.975] * EPOCHS
    late = [*far[:20], *same[20:]]  # most of a long run together does not help
    for accuracies, expected in ((near, "holds"), (far, "does not hold"), (late, "does not hold")):
        both = {"c_sgd": [run(accuracies=same)], "sgd_bn": [run(accuracies=accuracies)]}
        assert verdict(RESEMBLES, **both) == expected


def test_gradients_are_of_one_scale_as_with_batchnorm_and_more_so_than_without():
    with_norm = [run(norms={"0.0": 1.0, "0.1": 1e-9, "2": 5.0})]  # a BatchNorm is no layer here
    plain = [run(norms={"0": 1.0, "2.first": 20.0})]
    for span, expected in ((9.0, "holds"), (11.0, "holds in part"), (21.0, "does not hold")):
        norms = {"0": 1.0, "2.first": span}
        assert verdict(GRADIENTS, c_sgd=[run(norms=norms)], sgd_bn=with_norm, sgd=plain) == expected


def test_batchnorm_beside_the_correction():
    alone = {"c_sgd": [run()], "sgd_bn": [run(losses=falling(1.1))]}
    assert verdict(CONFLICT, c_sgd_bn=[run(losses=falling(1.2))], **alone) == "holds"
    assert verdict(CONFLICT, c_sgd_bn=[run(losses=falling(1.05))], **alone) == "holds in part"
    assert verdict(CONFLICT, c_sgd_bn=[run(losses=falling(0.9))], **alone) == "does not hold"
    nesterov = {"nesterov": [run()], "nesterov_bn": [run(losses=falling(0.5))]}
    assert verdict(BN_HELPS, **nesterov) == "holds"
    assert verdict(COMPETES, c_nesterov=[run(losses=falling(0.4))], **nesterov) == "holds"
    assert verdict(COMPETES, c_nesterov=[run(losses=falling(0.6))], **nesterov) == "does not hold"


def test_time_to_a_high_accuracy():
    seconds = {"c_sgd": 0.012, "sgd_bn": 0.01, "c_nesterov": 0.01, "nesterov_bn": 0.011}
    runs = {name: [run()] for name in seconds}
    assert verdict(EQUAL_IN_TIME, **runs, seconds=seconds) == "holds"
    assert verdict(EQUAL_IN_TIME, **runs, seconds=seconds | {"c_sgd": 0.013}) == "does not hold"
    assert verdict(NESTEROV_IN_TIME, **runs, seconds=seconds) == "holds"
    assert verdict(NESTEROV_IN_TIME, **runs, seconds=seconds | {"c_nesterov": 0.012}) == "does not hold"
    never = [0.9] * EPOCHS
    assert verdict(NESTEROV_IN_TIME, **runs | {"nesterov_bn": [run(accuracies=never)]}, seconds=seconds) == "holds"
    assert verdict(HIGHEST, **runs, seconds=seconds | {"sgd_bn": 0.013, "nesterov_bn": 0.013}) == "holds in part"


def test_controls_are_judged_by_the_limits_of_the_paper_s_statements():
    def controls(*runs):
        return {"sgd_control": runs, "sgd_bn_control": runs}

    ours, better = [run(losses=falling(0.5))], [run(), run(1, losses=falling(0.4))]
    assert verdict(BEATS_CONTROLS, c_sgd=ours, **controls(run())) == "holds"
    assert verdict(BEATS_CONTROLS, c_sgd=ours, sgd_control=[run()], sgd_bn_control=better) == "holds in part"
    assert verdict(BEATS_CONTROLS, c_sgd=ours, **controls(*better)) == "does not hold"
    late, early = run(accuracies=rising(13)), run(accuracies=rising(11))
    assert verdict(EARLIER, c_sgd=[run()], **controls(late)) == "holds"
    assert verdict(EARLIER, c_sgd=[run()], sgd_control=[late], sgd_bn_control=[late, early]) == "holds in part"
    assert verdict(EARLIER, c_sgd=[run()], **controls(early)) == "does not hold"
    plain = {"sgd": [run()], "sgd_bn": [run()]}
    for factor, expected in ((0.85, "holds"), (1.2, "holds"), (0.75, "does not hold"), (1.3, "does not hold")):
        assert verdict(CHANGE_LITTLE, **plain, **controls(run(losses=falling(factor)))) == expected, factor


def test_controls_change_nothing_that_is_said_of_the_paper():
    """Not even if they are best in everything, or too short to be compared."""

    def tested(one, accuracy):
        return replace(one, lines=[line | {"test_accuracy": accuracy} for line in one.lines])

    def found(*of_controls):
        contestants = {}
        for one in race().contestants:
            runs = [tested(run(), 0.9 if one.label == "C-SGD" else 0.8)]
            shown = contestant(one.label, *(of_controls if one.label.endswith(CONTROL) else runs), seconds=0.01)
            contestants[one.label] = replace(shown, **vars(one))
        return [one for one in statements(race(), contestants) if one.kind != "control"]

    best = tested(run(losses=falling(1e-3), accuracies=[1.0] * EPOCHS), 1.0)
    assert found(best) == found(replace(best, lines=best.lines[:3])) == found()


def test_runs_of_different_lengths_are_compared_after_an_epoch_that_all_have():
    """A run's last line may be in the midst of an epoch."""

    def lines(last):
        places = [*range(EPOCH, last + 1, EPOCH), *([last] if last % EPOCH else [])]
        return [(at, {"epoch_loss": 1 / at, "test_accuracy": at / 1e4, "forgotten": 1}) for at in places]

    contestants = []
    for label, last in (("C-SGD", 4 * EPOCH), ("SGD", 2 * EPOCH + 100)):
        found = contestant(label, kept(lines(last), config=CONFIG))
        contestants.append(replace(found, headline=True))
    table = headlines_table(contestants)
    assert "loss over the epoch until 1,000" in table.columns
    for row in table.rows:
        assert row[-3:] == ["0.001", "0.100", "2"]
