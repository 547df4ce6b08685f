"""Verdicts on the perceptrons, from both sides of their thresholds."""

from itertools import product
from pathlib import Path

import pytest
from synthetic import contestant, kept, metric_lines
from synthetic import verdict as verdict_among

from consequent_lab.paper.archive import Archive
from consequent_lab.paper.mlp import finding, race, statements
from consequent_lab.paper.recipes import STEPS

KEPT = Path(__file__).parents[3] / "results" / "paper"

DATASETS = ("cifar10", "cifar100", "fashion-mnist")
NORMALISATIONS = ("unit", "features")
PLAIN = [2.0, 1.5, 1.0, 0.7, 0.5, 0.3, 0.15, 0.1]
BETTER = [2.0, 1.0, 0.5, 0.3, 0.15, 0.1, 0.05, 0.02]
FROM_THE_BEGINNING, STEADIER, DEPENDENCE = "from the beginning", "overall stability", "more sensitive"
BOTH_DROP, EARLIER = "drops sharply", "usually occurs earlier"
IN_TIME, SAME_IN_TIME, SUBSTANTIAL = "taking the time into account", "almost identical", "improvement is substantial"
FASTER, HELPS_NEITHER = "CIFAR-100 drops faster", "does help neither"


def curve(label, losses, seconds=None, accuracy=0.5):
    lines = metric_lines(100, train_loss=losses, test_accuracy=[accuracy] * len(losses))
    return contestant(label, kept(lines), seconds=seconds)


def cells(sgd=PLAIN, c_sgd=BETTER, seconds=(0.01, 0.01), **others):
    """All six, alike but for `dataset_normalisation=(SGD's losses, C-SGD's losses)`."""
    found = {}
    for dataset, normalisation in product(DATASETS, NORMALISATIONS):
        plain, better = others.get(f"{dataset.replace('-', '_')}_{normalisation}", (sgd, c_sgd))
        found[dataset, normalisation] = {
            "SGD": curve("SGD", plain, seconds[0]),
            "C-SGD": curve("C-SGD", better, seconds[1]),
        }
    return found


def several(label, *losses, seconds=None):
    """A contestant with a run for each of these curves."""
    runs = [kept(metric_lines(100, train_loss=some), seed=seed) for seed, some in enumerate(losses)]
    return contestant(label, *runs, seconds=seconds)


def measured(words, some):
    (found,) = (statement for statement in statements(race(), some) if words in statement.paper)
    return found.measured


def verdict(words, some):
    return verdict_among(statements(race(), some), words)


def test_nothing_is_measured_without_runs():
    empty = {
        cell: {label: contestant(label) for label in ("SGD", "C-SGD")} for cell in product(DATASETS, NORMALISATIONS)
    }
    assert {statement.verdict for statement in statements(race(), empty)} == {"not measured"}


def test_from_the_beginning_means_every_one_of_the_first_epochs():
    assert verdict(FROM_THE_BEGINNING, cells()) == "holds"
    late = [2.0, 1.6, *BETTER[2:]]
    assert verdict(FROM_THE_BEGINNING, cells(c_sgd=late)) == "does not hold"
    assert verdict(FROM_THE_BEGINNING, cells(cifar10_unit=(PLAIN, late))) == "holds in part"


def test_what_comes_after_the_first_epochs_does_not_count_there():
    overtaken = [*BETTER[:6], 1.0, 1.0]
    assert verdict(FROM_THE_BEGINNING, cells(c_sgd=overtaken)) == "holds"


def test_steadier_is_a_smaller_mean_rise():
    rising = [2.0, 1.5, 1.7, 0.7, 0.9, 0.3, 0.4, 0.1]
    assert verdict(STEADIER, cells(sgd=rising)) == "holds"
    assert verdict(STEADIER, cells(c_sgd=rising)) == "does not hold"
    assert verdict(STEADIER, cells()) == "does not hold", "two that never rise are equally steady"


# The loss falls to less than a tenth within five epochs: after the fourth, and after the eighth.
EARLY = [2.0, 1.5, 1.3, 0.3, 0.1, 0.05, 0.04, 0.03, 0.03, 0.03, 0.03, 0.03]
LATE = [2.0, 1.5, 1.4, 1.3, 1.2, 1.1, 1.0, 0.3, 0.1, 0.05, 0.04, 0.04]
NEVER = [2.0, *(1.5 * 0.7**epoch for epoch in range(11))]  # a tenth of its start, but gradually


def test_the_drop_is_to_a_tenth_within_five_epochs():
    assert verdict(EARLIER, cells(sgd=LATE, c_sgd=EARLY)) == "holds"
    assert verdict(EARLIER, cells(sgd=EARLY, c_sgd=LATE)) == "does not hold"
    assert verdict(EARLIER, cells(sgd=NEVER, c_sgd=LATE)) == "holds"
    assert verdict(EARLIER, cells(sgd=LATE, c_sgd=NEVER)) == "does not hold"
    assert verdict(EARLIER, cells()) == "not measured", "with so few epochs there is hardly one to compare"
    assert "CIFAR-10 700 and not in 100 epochs" in measured(EARLIER, cells(sgd=NEVER, c_sgd=EARLY))


def test_both_must_drop():
    assert verdict(BOTH_DROP, cells(sgd=LATE, c_sgd=EARLY)) == "holds"
    assert verdict(BOTH_DROP, cells(sgd=NEVER, c_sgd=EARLY)) == "holds in part"
    assert verdict(BOTH_DROP, cells(sgd=NEVER, c_sgd=NEVER)) == "does not hold"
    assert measured(BOTH_DROP, cells(sgd=NEVER, c_sgd=EARLY)) == "C-SGD has one in 6, SGD in 0 of 6."


def test_dependence_on_the_inputs_is_that_of_the_loss_and_of_test_accuracy():
    far = [2.0, *(3 * loss for loss in PLAIN[1:])]
    near = [2.0, *(1.1 * loss for loss in BETTER[1:])]
    features = {f"{dataset.replace('-', '_')}_features": (far, near) for dataset in DATASETS}
    some = cells(**features)
    assert verdict(DEPENDENCE, some) == "holds in part", "equal test accuracies do not speak for it"
    for dataset in DATASETS:
        some[dataset, "features"]["SGD"] = curve("SGD", far, accuracy=0.4)
    assert verdict(DEPENDENCE, some) == "holds"
    for dataset in DATASETS:
        some[dataset, "features"]["C-SGD"] = curve("C-SGD", near, accuracy=0.3)
    assert verdict(DEPENDENCE, some) == "holds in part"
    assert verdict(DEPENDENCE, cells(**dict.fromkeys(features, (PLAIN, near)))) == "does not hold"


@pytest.mark.parametrize(("slower", "expected"), [(1.0, "holds"), (1.5, "holds"), (4.0, "does not hold")])
def test_competitive_in_time(slower, expected):
    assert verdict(IN_TIME, cells(seconds=(0.01, 0.01 * slower))) == expected


def test_almost_identical_in_time():
    close = [2.0, *(loss / 1.2 for loss in PLAIN[1:])]  # 0.08 decades
    apart = [2.0, *(loss / 1.6 for loss in PLAIN[1:])]  # 0.2 decades
    same = {"fashion_mnist_unit": (PLAIN, close), "fashion_mnist_features": (PLAIN, close)}
    assert verdict(SAME_IN_TIME, cells(**same)) == "holds"
    same["fashion_mnist_features"] = PLAIN, apart
    assert verdict(SAME_IN_TIME, cells(**same)) == "holds in part"


def test_cifar100_is_improved_substantially_and_drops_fastest():
    half = [2.0, *(loss / 2.8 for loss in PLAIN[1:])]
    little = [2.0, *(loss / 1.2 for loss in PLAIN[1:])]
    much = {"cifar100_unit": (PLAIN, half), "cifar100_features": (PLAIN, half)}
    assert verdict(SUBSTANTIAL, cells(**much)) == "holds"
    assert verdict(SUBSTANTIAL, cells(**much | {"cifar100_unit": (PLAIN, little)})) == "holds in part"
    early = {"cifar100_unit": (LATE, EARLY), "cifar100_features": (LATE, EARLY)}
    assert verdict(FASTER, cells(sgd=LATE, c_sgd=LATE, **early)) == "holds"
    assert verdict(FASTER, cells(sgd=LATE, c_sgd=EARLY)) == "does not hold"


def test_where_sgd_gets_below_is_said():
    overtaken = [*BETTER[:6], 0.2, 0.2]
    assert "SGD's is lower, from iteration: CIFAR-10 700;" in measured(FROM_THE_BEGINNING, cells(c_sgd=overtaken))
    assert "CIFAR-10 not in 100 epochs" in measured(FROM_THE_BEGINNING, cells())


def test_normalising_helps_neither():
    assert verdict(HELPS_NEITHER, cells()) == "holds"
    lower = [2.0, *(loss / 1.3 for loss in PLAIN[1:])]
    assert verdict(HELPS_NEITHER, cells(cifar100_features=(lower, BETTER))) == "holds in part"
    assert verdict(HELPS_NEITHER, cells(cifar100_features=(lower, lower[:1] + [v / 2 for v in BETTER[1:]]))) == (
        "does not hold"
    )


# ---- several seeds -----------------------------------------------------------------------------------------------


def of_cifar10(sgd, c_sgd, others=(PLAIN, BETTER), seconds=None):
    """All six, with several seeds in one of them."""
    some = cells(*others, seconds=(seconds, seconds))
    some["cifar10", "unit"] = {
        "SGD": several("SGD", *sgd, seconds=seconds),
        "C-SGD": several("C-SGD", *c_sgd, seconds=seconds),
    }
    return some


def test_one_pair_of_seeds_that_is_behind_at_first_is_enough():
    late = [2.0, 1.6, *BETTER[2:]]
    assert verdict(FROM_THE_BEGINNING, of_cifar10([PLAIN, PLAIN], [BETTER, BETTER])) == "holds"
    assert verdict(FROM_THE_BEGINNING, of_cifar10([PLAIN, PLAIN], [BETTER, late])) == "holds in part"


def test_it_is_said_in_how_many_pairs_sgd_gets_below():
    overtaken = [*BETTER[:6], 0.2, 0.2]
    found = measured(FROM_THE_BEGINNING, of_cifar10([PLAIN], [BETTER, overtaken]))
    assert "SGD's is lower, from iteration: CIFAR-10 in 1 of 2 pairs of seeds (700);" in found


def test_steadier_is_so_in_every_pair_of_seeds():
    rising = [2.0, 1.5, 1.7, 0.7, 0.9, 0.3, 0.4, 0.1]
    a_little = [2.0, 1.5, 1.51, 0.7, 0.5, 0.3, 0.2, 0.1]
    others = rising, BETTER
    assert verdict(STEADIER, of_cifar10([rising, rising], [BETTER, a_little], others)) == "holds"
    assert verdict(STEADIER, of_cifar10([rising, BETTER], [BETTER, a_little], others)) == "holds in part"


def test_a_seed_of_sgd_without_a_drop_does_not_hide_one_that_drops_first():
    others = LATE, EARLY
    assert verdict(EARLIER, of_cifar10([LATE, NEVER], [EARLY, EARLY], others)) == "holds"
    hidden = of_cifar10([EARLY, NEVER], [LATE, LATE], others)
    assert verdict(EARLIER, hidden) == "holds in part"
    assert "CIFAR-10 900 (900–900; 2 seeds) and in 1 of 2 seeds (700);" in measured(EARLIER, hidden)
    assert verdict(FASTER, of_cifar10([LATE], [LATE, EARLY], (LATE, EARLY))) == "does not hold"


def test_both_must_drop_with_every_seed():
    assert verdict(BOTH_DROP, of_cifar10([LATE, LATE], [EARLY, EARLY], (LATE, EARLY))) == "holds"
    missing = of_cifar10([LATE, NEVER], [EARLY, EARLY], (LATE, EARLY))
    assert measured(BOTH_DROP, missing) == "C-SGD has one in 6, SGD in 5 of 6."


def test_competitive_in_time_is_so_in_every_pair_of_seeds():
    behind = [2.0, *(1.5 * loss for loss in PLAIN[1:])]
    assert verdict(IN_TIME, of_cifar10([PLAIN, PLAIN], [BETTER, BETTER], seconds=0.01)) == "holds"
    found = of_cifar10([PLAIN, PLAIN], [BETTER, behind], seconds=0.01)
    assert verdict(IN_TIME, found) == "holds in part", "their mean is above the limit"


def test_the_seeds_that_are_kept_are_named():
    assert "Seeds: CIFAR-10 0, CIFAR-100 0, Fashion-MNIST 0." in finding().summary
    assert "Seeds: CIFAR-10 3, CIFAR-100 2, Fashion-MNIST 3." in finding(KEPT).summary


def test_nothing_of_the_experiment_is_missing_in_what_is_kept():
    assert race().jobs(Archive(KEPT), STEPS) == []
