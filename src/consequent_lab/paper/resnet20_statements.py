"""The paper's statements on ResNet-20, one function each: the words, the measure with its limit, then the value."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from statistics import fmean

from consequent_lab.models import resnet20
from consequent_lab.paper.findings import Statement
from consequent_lab.paper.kept_contestants import (
    NOT_MEASURED,
    NOT_TIMED,
    KeptContestant,
    all_above,
    circumstances,
    lowered,
    spread,
)
from consequent_lab.paper.measures import about, advantage, apart, crossing, distance, roughness, smoothed, up_to
from consequent_lab.paper.recipes import Race
from consequent_lab.paper.resnet20_measures import (
    ALL_CORRECT,
    forgotten_after,
    last_common_epoch,
    reaches,
    seconds_to,
    span_of_norms,
    stays_at_all,
)

C_SGD_AT, C_NESTEROV_AT, CROSSING_AT = 8_000, 7_000, 25_000  # iterations that the paper names
EQUAL_WINDOW = 10_000  # iterations that every contestant has
BEGINNING = 10  # epochs
MUCH = 0.3  # decades of loss: half
CHANGES_LITTLE = 0.1  # decades of loss
RESEMBLANCE = 0.02  # of accuracy
HIGH_ACCURACY = 0.99  # over an epoch; the times to it are compared
ABOUT_EQUAL = 1.25  # times as long, or as short
SIGNIFICANT = 0.05  # of the parameters
LIKE_BATCH_NORM = 2.0  # times its span of gradients' norms
SMOOTHED = 5  # epochs, before it is looked where losses cross

EVERY_PAIR = "holds if it is above 0 in every pair of seeds"
LOWER = "Decades by which the loss over the epoch is lower, on average over the stretch that both have"

# What the paper says and nobody has run: the words, and what would have to be measured.
NOT_RUN = {
    "it has the potential to learns faster if it is combined with a suitable regularization method.": "C-SGD against "
    "SGD-BN, both with augmentation and weight decay, each searched.",
    "there would be no necessity to change or tune the hyper-parameters, such as learning rate, during the training.": (
        "A constant learning rate against schedules, each searched; every run here has a constant one."
    ),
    "it is possible to use multiple GPUs to train a network asynchronously with the proposed algorithm in practice. "
    "Therefore, the computation time of pseudoinverse would be negligible": "An iteration on several GPUs, timed.",
}


@dataclass(frozen=True)
class Judge:
    """What is judged: the contestants of a race by their labels."""

    race: Race
    kept: dict[str, KeptContestant]

    def statement(
        self,
        paper: str,
        measure: str,
        measured: str,
        parts: Sequence[bool | None],
        on: Sequence[str],
        *,
        missing: str = NOT_MEASURED,
        remark: str = "",
    ) -> Statement:
        """Returns a statement on some contestants, with their test accuracies, seeds and search beside it."""
        at = last_common_epoch([self.kept[label] for label in self.kept])
        beside = circumstances(self.race, [self.kept[label] for label in on], at)
        known = any(part is not None for part in parts)
        shown = measured if known else missing
        return Statement(paper, "empirical", measure, shown, tuple(parts), beside, remark)

    def iterations(self, label: str) -> int:
        """Returns how long the shortest run of a contestant is."""
        return min((run.outcome["iteration"] for run in self.kept[label].runs), default=0)

    def gains(self, pairs: Sequence[tuple[str, str]], by: str = "iteration") -> dict[str, list[float]]:
        """Returns by how many decades the first of each pair has the lower loss."""
        return {f"{one} below {two}": lowered(self.kept[one], self.kept[two], by) for one, two in pairs}


def statements(race: Race, kept: dict[str, KeptContestant]) -> list[Statement]:
    """Returns the paper's statements on what is kept.

    Args:
        race: which it was.
        kept: its contestants by label.
    """
    judge = Judge(race, kept)
    return [
        _beats_plain(judge),
        _adam_is_never_better(judge),
        _c_adam_changes_nothing(judge),
        _sgd_is_best(judge),
        _all_correct(judge, "C-SGD", C_SGD_AT, "C-SGD achieved 100% train accuracy […] after about 8000 iterations"),
        _none_forgotten(judge),
        _bn_forgets(judge),
        _faster_in_the_beginning(judge),
        _stays_stable(judge),
        _crosses_late(judge),
        _resembles(judge),
        _gradients_keep_their_scale(judge),
        _bn_helps_nesterov(judge),
        _c_nesterov_competes(judge),
        _all_correct(
            judge, "C-Nesterov", C_NESTEROV_AT, "C-Nesterov […] reached 100% accuracy at about 7000 iterations"
        ),
        _fewer_parameters(),
        _conflicts_with_bn(judge),
        _plain_beats_adam_in_time(judge),
        _beats_plain_in_time(judge),
        _about_equal_in_time(judge),
        _nesterov_wins_in_time(judge),
        _highest_accuracies_in_less_time(judge),
        _forgets_less(judge),
        *(
            Statement(paper, "empirical", measure, "No such runs were made.", (None,))
            for paper, measure in NOT_RUN.items()
        ),
    ]


def _beats_plain(judge: Judge) -> Statement:
    gains = judge.gains([("C-SGD", "SGD"), ("C-Nesterov", "Nesterov")])
    return judge.statement(
        "As the non-BN graphs display, C-SGD and C-Nesterov perform better than SGD and Nesterov respectively.",
        f"{LOWER}; {EVERY_PAIR}.",
        _shown(gains),
        [all_above(values) for values in gains.values()],
        ("C-SGD", "SGD", "C-Nesterov", "Nesterov"),
    )


def _adam_is_never_better(judge: Judge) -> Statement:
    gains = judge.gains([("Adam", "SGD"), ("Adam", "Nesterov")])
    return judge.statement(
        "Adam optimizer did not perform better than the other two optimizers at all",
        f"{LOWER}, without BatchNorm, of which the sentence speaks; holds if Adam is lower in no pair of seeds.",
        _shown(gains),
        [not max(values) > 0 if values else None for values in gains.values()],
        ("Adam", "SGD", "Nesterov"),
    )


def _c_adam_changes_nothing(judge: Judge) -> Statement:
    gaps = lowered(judge.kept["C-Adam"], judge.kept["Adam"], measure=apart)
    mean = lowered(judge.kept["C-Adam"], judge.kept["Adam"])
    return judge.statement(
        "C-Adam did not change the outcome.",
        "Decades between the losses over the epoch, whichever is lower, on average: ahead at first and behind later "
        f"do not cancel. Holds up to {CHANGES_LITTLE:g}.",
        f"{_range(gaps)}; with their signs {_range(mean)}.",
        [all(gap <= CHANGES_LITTLE for gap in gaps) if gaps else None],
        ("C-Adam", "Adam"),
    )


def _sgd_is_best(judge: Judge) -> Statement:
    gains = judge.gains([("SGD", "Nesterov"), ("SGD", "Adam"), ("SGD-BN", "Nesterov-BN"), ("SGD-BN", "Adam-BN")])
    return judge.statement(
        "SGD does better than other optimizers such as Adam and Nesterov.",
        f"{LOWER}; {EVERY_PAIR}.",
        _shown(gains),
        [all_above(values) for values in gains.values()],
        ("SGD", "Nesterov", "Adam", "SGD-BN", "Nesterov-BN", "Adam-BN"),
        remark="Said in the section on perceptrons, of this experiment, where the paper's SGD has momentum.",
    )


def _all_correct(judge: Judge, label: str, place: int, paper: str) -> Statement:
    runs = judge.kept[label].runs
    long_enough = bool(runs) and all(run.outcome["iteration"] >= 1.25 * place or run.diverged for run in runs)
    found = {
        f"{100 * ALL_CORRECT:.2f} % over an epoch": [reaches(run) for run in runs],
        "every later mini-batch that is read at 100 %": [stays_at_all(run) for run in runs],
    }
    return judge.statement(
        paper,
        f"The iteration from which the accuracy is there, over a whole epoch ({100 * ALL_CORRECT:g} %) and for the "
        "last mini-batch of every 100 iterations, as the paper has it. About: up to a quarter earlier or later, in "
        "every seed.",
        "; ".join(f"{what}: {spread(places, within=judge.iterations(label))}" for what, places in found.items()) + ".",
        [all(about(at, place) for at in places) if long_enough else None for places in found.values()],
        (label,),
    )


def _none_forgotten(judge: Judge) -> Statement:
    runs = [run for run in judge.kept["C-SGD"].runs if run.outcome["iteration"] > C_SGD_AT]
    forgotten = [forgotten_after(run, C_SGD_AT) for run in runs]
    return judge.statement(
        "without forgetting any sample after about 8000 iterations",
        f"Samples of the training set that are right at the end of an epoch after iteration {C_SGD_AT:,} and wrong at "
        "the end of the next; holds if there is none in any seed.",
        f"{spread(forgotten)}.",
        [None if not runs else not any(forgotten)],
        ("C-SGD",),
    )


def _bn_forgets(judge: Judge) -> Statement:
    runs = [run for run in judge.kept["SGD-BN"].runs if run.outcome["iteration"] > C_SGD_AT]
    forgotten = [forgotten_after(run, C_SGD_AT) for run in runs]
    return judge.statement(
        "the SGD with BN, sometimes forgot some samples.",
        "The same count, with BatchNorm's running statistics; holds if there is one in every seed.",
        f"{spread(forgotten)}.",
        [None if not runs else all(forgotten)],
        ("SGD-BN",),
    )


def _faster_in_the_beginning(judge: Judge) -> Statement:
    pairs = list(product(judge.kept["C-SGD"].curves("epoch_loss"), judge.kept["SGD-BN"].curves("epoch_loss")))
    won = [sum(one < two for (_, one), (_, two) in zip(a[:BEGINNING], b[:BEGINNING], strict=False)) for a, b in pairs]
    until = [crossing(*(up_to(curve, EQUAL_WINDOW) for curve in pair)) for pair in pairs]
    mean = lowered(judge.kept["C-SGD"], judge.kept["SGD-BN"], measure=partial(advantage, until=CROSSING_AT))
    return judge.statement(
        "Overall, C-SGD converged faster in the beginning",
        f"In how many of the first {BEGINNING} epochs its loss is below that of SGD-BN; holds if in more than half of "
        "them, in every pair of seeds.",
        f"{spread([float(count) for count in won], '.1f', 'pairs of seeds')} epochs. From iteration "
        f"{spread(until, of='pairs of seeds', within=EQUAL_WINDOW)} on it stays below, as far as {EQUAL_WINDOW:,}. A "
        f"mean until {CROSSING_AT:,}, which hides this: "
        f"{_range(mean)} decades below.",
        [all(count > BEGINNING / 2 for count in won) if won else None],
        ("C-SGD", "SGD-BN"),
    )


def _stays_stable(judge: Judge) -> Statement:
    rough = {
        label: [roughness([loss for _, loss in curve]) for curve in judge.kept[label].curves("epoch_loss")]
        for label in ("C-SGD", "SGD-BN")
    }
    known = all(rough.values())
    return judge.statement(
        "and maintained its stability to the end of the training",
        "Mean rise of log₁₀ of the loss from one epoch to the next, falls counted as 0; holds if it is smaller than "
        "SGD-BN's in every pair of seeds.",
        "; ".join(f"{label} {spread(values, '.4f')}" for label, values in rough.items()) + ".",
        [max(rough["C-SGD"]) < min(rough["SGD-BN"]) if known else None],
        ("C-SGD", "SGD-BN"),
    )


def _crosses_late(judge: Judge) -> Statement:
    smooth = {
        label: [
            smoothed(run.curve("epoch_loss"), SMOOTHED)
            for run in judge.kept[label].runs
            if run.outcome["iteration"] >= 1.25 * CROSSING_AT
        ]
        for label in ("SGD-BN", "C-SGD")
    }
    found = [crossing(one, two) for one, two in product(*smooth.values())]
    within = min(judge.iterations(label) for label in smooth)
    return judge.statement(
        "but SGD with BN finally crossed the C-SGD line after 25000 iterations.",
        "The iteration from which SGD-BN's loss stays below C-SGD's, both smoothed over five epochs; holds if it is "
        "25,000, a quarter earlier or later, in every pair of seeds.",
        f"{spread(found, of='pairs of seeds', within=within)}.",
        [all(about(place, CROSSING_AT) for place in found) if found else None],
        ("C-SGD", "SGD-BN"),
    )


def _resembles(judge: Judge) -> Statement:
    def gap(label: str, until: float = EQUAL_WINDOW) -> float | None:
        near = partial(distance, until=until)
        gaps = lowered(judge.kept[label], judge.kept["SGD-BN"], quantity="epoch_accuracy", measure=near)
        return fmean(gaps) if gaps else None

    others = {label: value for label in judge.kept if label != "SGD-BN" and (value := gap(label)) is not None}
    mine = others.pop("C-SGD", None)
    return judge.statement(
        "the striking resemblance between their accuracy graphs.",
        f"Mean distance of the accuracies over the epoch from SGD-BN's, in the first {EQUAL_WINDOW:,} iterations, "
        f"which all contestants have; holds if C-SGD's is at most {100 * RESEMBLANCE:g} points. The others' beside it.",
        f"C-SGD {100 * (mine or 0):.1f} points; "
        + ", ".join(f"{label} {100 * value:.1f}" for label, value in sorted(others.items(), key=lambda item: item[1]))
        + f". Over all iterations, most of them near 100 %, C-SGD's is {100 * (gap('C-SGD', math.inf) or 0):.1f}.",
        [None if mine is None else mine <= RESEMBLANCE],
        ("C-SGD", "SGD-BN", "Adam-BN"),
    )


def _gradients_keep_their_scale(judge: Judge) -> Statement:
    spans = {label: span_of_norms(judge.kept[label].runs) for label in ("C-SGD", "SGD-BN", "SGD")}
    mine, norm, plain = spans.values()
    return judge.statement(
        "our method, like BN, does not suffer from the vanishing and exploding gradients",
        "The largest norm of a layer's plain gradient ÷ the smallest in the same step, median over the run. Like BN: "
        f"at most {LIKE_BATCH_NORM:g} times SGD-BN's. A cure: less than that of SGD without BatchNorm.",
        ", ".join(f"{label} {value:,.1f}" for label, value in spans.items() if value is not None) + ".",
        [
            None if mine is None or norm is None else mine <= LIKE_BATCH_NORM * norm,
            None if mine is None or plain is None else mine < plain,
        ],
        ("C-SGD", "SGD-BN", "SGD"),
        remark="Where not even plain SGD's gradients are of different scale, a network cannot show a cure.",
    )


def _bn_helps_nesterov(judge: Judge) -> Statement:
    gains = judge.gains([("Nesterov-BN", "Nesterov")])
    return judge.statement(
        "For the Nesterov, […] applying the BN layers improved the convergence",
        f"{LOWER}; {EVERY_PAIR}.",
        _shown(gains),
        [all_above(values) for values in gains.values()],
        ("Nesterov-BN", "Nesterov"),
    )


def _c_nesterov_competes(judge: Judge) -> Statement:
    gains = judge.gains([("C-Nesterov", "Nesterov-BN")])
    return judge.statement(
        "C-Nesterov maintained its competitiveness",
        f"{LOWER}; {EVERY_PAIR}.",
        _shown(gains),
        [all_above(values) for values in gains.values()],
        ("C-Nesterov", "Nesterov-BN"),
    )


def _fewer_parameters() -> Statement:
    without, with_bn = (
        sum(parameter.numel() for parameter in resnet20(batch_norm).parameters()) for batch_norm in (False, True)
    )
    saved = (with_bn - without) / with_bn
    return Statement(
        "despite having significantly less learnable parameters.",
        "toy",
        f"The parameters of ResNet-20 with and without BatchNorm, counted; holds if {100 * SIGNIFICANT:g} % or more "
        "are saved.",
        f"{without:,} instead of {with_bn:,}: {100 * saved:.1f} % less, as its convolutions have biases instead.",
        (saved >= SIGNIFICANT,),
    )


def _conflicts_with_bn(judge: Judge) -> Statement:
    gains = judge.gains([("C-SGD-BN", "C-SGD"), ("C-SGD-BN", "SGD-BN")])
    return judge.statement(
        "we observed the combination of them did not help, and even they had some conflicts.",
        f"{LOWER}; holds if C-SGD with BatchNorm is above either alone in every pair of seeds.",
        _shown(gains),
        [max(values) < 0 if values else None for values in gains.values()],
        ("C-SGD-BN", "C-SGD", "SGD-BN"),
    )


def _plain_beats_adam_in_time(judge: Judge) -> Statement:
    gains = judge.gains([("SGD", "Adam"), ("Nesterov", "Adam")], "seconds")
    return judge.statement(
        "According to the left-hand side graphs, SGD and Nesterov performed better than Adam.",
        f"{LOWER}, at equal seconds and without BatchNorm; {EVERY_PAIR}.",
        _shown(gains),
        [all_above(values) for values in gains.values()],
        ("SGD", "Nesterov", "Adam"),
        missing=NOT_TIMED,
    )


def _beats_plain_in_time(judge: Judge) -> Statement:
    gains = judge.gains([("C-SGD", "SGD"), ("C-Nesterov", "Nesterov")], "seconds")
    return judge.statement(
        "C-SGD and C-Nesterov performed much better than their plain counterparts.",
        f"{LOWER}, at equal seconds. Much: half the loss or less ({MUCH:g} decades), in every pair of seeds.",
        _shown(gains),
        [all_above(values, MUCH) for values in gains.values()],
        ("C-SGD", "SGD", "C-Nesterov", "Nesterov"),
        missing=NOT_TIMED,
    )


def _about_equal_in_time(judge: Judge) -> Statement:
    times = _seconds(judge, ("C-SGD", "SGD-BN"))
    ratio = _ratio(*times.values())
    return judge.statement(
        "BatchNorm versions of SGD performed almost the same by considering the time.",
        f"Seconds until {100 * HIGH_ACCURACY:.0f} % over an epoch, means over seeds; holds within a factor of "
        f"{ABOUT_EQUAL:g} of C-SGD's, either way.",
        _times(judge, times),
        [None if ratio is None else 1 / ABOUT_EQUAL <= ratio <= ABOUT_EQUAL],
        ("C-SGD", "SGD-BN"),
        missing=NOT_TIMED,
    )


def _nesterov_wins_in_time(judge: Judge) -> Statement:
    times = _seconds(judge, ("C-Nesterov", "Nesterov-BN"))
    return judge.statement(
        "C-Nesterov also did better than Nesterov-BN.",
        f"Seconds until {100 * HIGH_ACCURACY:.0f} % over an epoch; holds if every seed is earlier than every one of "
        "the other's.",
        _times(judge, times),
        [_earlier(*times.values())],
        ("C-Nesterov", "Nesterov-BN"),
        missing=NOT_TIMED,
    )


def _highest_accuracies_in_less_time(judge: Judge) -> Statement:
    labels = ("C-SGD", "C-Nesterov", "SGD-BN", "Nesterov-BN", "Adam-BN")
    times = {label: seconds_to(judge.kept[label], ALL_CORRECT) for label in labels}
    others = [value for label in labels[2:] for value in times[label]]
    return judge.statement(
        "consequentialism can help to reach to highest accuracies in less time.",
        f"Training accuracy: seconds until {100 * ALL_CORRECT:g} % over an epoch; holds for each of C-SGD and "
        "C-Nesterov if every seed is earlier than all with BatchNorm. Test accuracy: holds if a C- version has the "
        "highest mean.",
        _times(judge, times, ALL_CORRECT) + " Test accuracy: below.",
        [_earlier(times[label], others) for label in labels[:2]] + [_generalises_best(judge)],
        labels,
        missing=NOT_TIMED,
    )


def _generalises_best(judge: Judge) -> bool | None:
    at = last_common_epoch(list(judge.kept.values()))
    means = {
        label: fmean(values)
        for label, one in judge.kept.items()
        if (values := [value for run in one.runs if (value := run.at("test_accuracy", at)) is not None])
    }
    return max(means, key=lambda label: means[label]).startswith("C-") if len(means) > 1 else None


def _forgets_less(judge: Judge) -> Statement:
    labels = ("C-SGD", "SGD-BN")
    common = min(judge.iterations(label) for label in labels)
    totals = {
        label: [
            float(sum(lost for at, lost in run.curve("forgotten") if at <= common)) for run in judge.kept[label].runs
        ]
        for label in labels
    }
    return judge.statement(
        "it forgets the previous mini-batches less often.",
        "Samples of the training set forgotten from one epoch to the next, in all; holds if every seed has fewer than "
        "every one of SGD-BN.",
        f"In {common:,} iterations: " + ", ".join(f"{label} {spread(all_)}" for label, all_ in totals.items()) + ".",
        [max(totals["C-SGD"]) < min(totals["SGD-BN"]) if all(totals.values()) else None],
        labels,
    )


def _seconds(judge: Judge, labels: Sequence[str]) -> dict[str, list[float | None]]:
    return {label: seconds_to(judge.kept[label], HIGH_ACCURACY) for label in labels}


def _ratio(times: Sequence[float | None], others: Sequence[float | None]) -> float | None:
    """Returns the mean time ÷ the other; one that is not there in time is infinitely late."""
    if not times or not others:
        return None
    mine, yours = (fmean(math.inf if value is None else value for value in values) for values in (times, others))
    return None if mine == yours == math.inf else mine / yours


def _earlier(times: Sequence[float | None], others: Sequence[float | None]) -> bool | None:
    if not times or not others:
        return None
    latest, earliest = (
        pick(math.inf if value is None else value for value in values) for pick, values in ((max, times), (min, others))
    )
    return latest < earliest


def _times(judge: Judge, times: dict[str, list[float | None]], level: float = HIGH_ACCURACY) -> str:
    shown = [
        f"{label} {spread(values, ',.1f') if any(values) else f'not within {judge.iterations(label):,} iterations'}"
        for label, values in times.items()
        if values
    ]
    return f"Seconds until {100 * level:g} %: {'; '.join(shown)}."


def _shown(gains: dict[str, list[float]]) -> str:
    return "; ".join(f"{name} {_range(values)}" for name, values in gains.items() if values) + "."


def _range(values: Sequence[float]) -> str:
    """Returns mean and range of decades.

    >>> _range([0.5, 0.7]), _range([0.5]), _range([])
    ('+0.60 (+0.50 to +0.70 over 2 pairs of seeds)', '+0.50', 'not measured')
    """
    if len(values) < 2:
        return f"{values[0]:+.2f}" if values else "not measured"
    return f"{fmean(values):+.2f} ({min(values):+.2f} to {max(values):+.2f} over {len(values)} pairs of seeds)"
