"""The paper's statements on ResNet-20, one function each. Thresholds are named here, measures in resnet20_measures."""

from collections.abc import Sequence
from statistics import fmean

from consequent_lab.paper.entries import NOT_MEASURED, NOT_TIMED, Entry, mean_over_pairs, spread
from consequent_lab.paper.findings import Statement
from consequent_lab.paper.measures import distance
from consequent_lab.paper.resnet20_measures import (
    ALL_CORRECT,
    crossings,
    forgotten_after,
    lowered,
    lowered_at_the_end,
    reaches,
    seconds_to,
    span_of_norms,
    stays_at_all,
)
from consequent_lab.paper.verdicts import all_of

Entries = dict[str, Entry]

C_SGD_BY, C_NESTEROV_BY = 8_000, 7_000  # iterations: "about" them in the paper
CROSSING_AFTER = 25_000
CHANGES_LITTLE = 0.1  # decades of loss
RESEMBLANCE = 0.02  # of accuracy, on average over the epochs
HIGH_ACCURACY = 0.99  # over an epoch; the times to it are compared
ABOUT_EQUAL = 1.25  # times as long, or as short
SIGNIFICANT = 0.05  # of the parameters
VANISHED = 1_000  # times the norm of another layer's gradient


def statements(entries: Entries) -> list[Statement]:
    """Returns the paper's statements on what is kept.

    Args:
        entries: the contestants by label.
    """
    return [
        _beats_plain(entries),
        _adam_is_never_better(entries),
        _sgd_is_best(entries),
        _c_adam_changes_little(entries),
        _all_correct(entries, "C-SGD", C_SGD_BY),
        _none_forgotten(entries, "C-SGD", C_SGD_BY),
        _bn_forgets(entries),
        _forgets_less(entries),
        _crosses_late(entries),
        _resembles(entries),
        _all_correct(entries, "C-Nesterov", C_NESTEROV_BY),
        _none_forgotten(entries, "C-Nesterov", C_NESTEROV_BY),
        _bn_helps_nesterov(entries),
        _fewer_parameters(),
        _neither_vanish_nor_explode(entries),
        _conflicts_with_bn(entries),
        _beats_plain_in_time(entries),
        _about_equal_in_time(entries),
        _nesterov_wins_in_time(entries),
    ]


def _beats_plain(entries: Entries) -> Statement:
    gains = {name: lowered(entries[f"C-{name}"], entries[name]) for name in ("SGD", "Nesterov")}
    return Statement(
        "Without BatchNorm, C-SGD and C-Nesterov perform better than SGD and Nesterov respectively.",
        _gains(gains, "Decades of loss below the plain version's, over the epochs: "),
        all_of(_all_positive(values) for values in gains.values()),
        remark="Holds if every pair of seeds says so.",
    )


def _beats_plain_in_time(entries: Entries) -> Statement:
    gains = {name: lowered(entries[f"C-{name}"], entries[name], "seconds") for name in ("SGD", "Nesterov")}
    return Statement(
        "In time, too, C-SGD and C-Nesterov perform much better than their plain counterparts without BatchNorm.",
        _gains(gains, "Decades of loss below the plain version's, at equal seconds: ", missing=NOT_TIMED),
        all_of(_all_positive(values) for values in gains.values()),
        remark="Holds if every pair of seeds says so.",
    )


def _adam_is_never_better(entries: Entries) -> Statement:
    families = {"Adam": ("SGD", "Nesterov"), "Adam-BN": ("SGD-BN", "Nesterov-BN")}
    gains = {
        f"{adam} against {other}": lowered(entries[adam], entries[other])
        for adam, others in families.items()
        for other in others
    }
    return Statement(
        "Adam did not perform better than the other two optimisers at all.",
        _gains(gains, "Decades of loss by which Adam is lower: "),
        all_of(None if not values else fmean(values) <= 0 for values in gains.values()),
        remark="Each at the learning rate that its search found.",
    )


def _sgd_is_best(entries: Entries) -> Statement:
    families = {"SGD": ("Nesterov", "Adam"), "SGD-BN": ("Nesterov-BN", "Adam-BN")}
    gains = {
        f"{sgd} against {other}": lowered(entries[sgd], entries[other])
        for sgd, others in families.items()
        for other in others
    }
    return Statement(
        "SGD does better than other optimisers such as Adam and Nesterov.",
        _gains(gains, "Decades of loss by which SGD is lower: "),
        all_of(None if not values else fmean(values) > 0 for values in gains.values()),
        remark="Said in the section on perceptrons, of this experiment. The paper's SGD has momentum here.",
    )


def _c_adam_changes_little(entries: Entries) -> Statement:
    pair = entries["C-Adam"], entries["Adam"]
    gains = {"on average over the epochs": lowered(*pair), "at the end": lowered_at_the_end(*pair)}
    return Statement(
        "C-Adam did not change the outcome.",
        _gains(gains, "Decades by which C-Adam's loss is below Adam's: "),
        all_of(None if not values else abs(fmean(values)) <= CHANGES_LITTLE for values in gains.values()),
        remark=f"Holds within {CHANGES_LITTLE:g} decades; the end is that of the shorter run.",
    )


def _all_correct(entries: Entries, label: str, limit: int) -> Statement:
    runs = entries[label].runs
    over_epoch = [reaches(run) for run in runs]
    mini_batches = [stays_at_all(run) for run in runs]
    long_enough = bool(runs) and all(run.outcome["iteration"] >= limit or run.diverged for run in runs)
    return Statement(
        f"{label} reaches 100 % training accuracy at about {limit:,} iterations.",
        f"Iteration of {100 * ALL_CORRECT:.2f} % over an epoch: {spread(over_epoch)}; iteration from which the last "
        f"mini-batch of every {runs[0].config.log_every} stays at 100 %: {spread(mini_batches)}."
        if runs
        else NOT_MEASURED,
        all_of(
            all(place is not None and place <= limit for place in places) if long_enough else None
            for places in (over_epoch, mini_batches)
        ),
        remark="Both readings: over the epoch, and the paper's. Every seed has to be in time.",
    )


def _none_forgotten(entries: Entries, label: str, limit: int) -> Statement:
    runs = [run for run in entries[label].runs if run.outcome["iteration"] > limit]
    forgotten = [forgotten_after(run, limit) for run in runs]
    return Statement(
        f"{label} forgets no sample after that.",
        f"Samples of the training set that were correct at the end of an epoch after iteration {limit:,} and wrong at "
        f"the end of the next: {spread(forgotten, '.1f')}."
        if runs
        else NOT_MEASURED,
        all_of([None if not runs else not any(forgotten)]),
    )


def _bn_forgets(entries: Entries) -> Statement:
    runs = [run for run in entries["SGD-BN"].runs if run.outcome["iteration"] > C_SGD_BY]
    forgotten = [forgotten_after(run, C_SGD_BY) for run in runs]
    return Statement(
        "SGD with BatchNorm sometimes forgot some samples.",
        f"After iteration {C_SGD_BY:,}, from one epoch to the next: {spread(forgotten, ',.1f')} samples."
        if runs
        else NOT_MEASURED,
        all_of([None if not runs else all(forgotten)]),
        remark="Evaluated on the training set, with BatchNorm's running statistics.",
    )


def _forgets_less(entries: Entries) -> Statement:
    common = min((run.outcome["iteration"] for label in ("C-SGD", "SGD-BN") for run in entries[label].runs), default=0)
    totals = {
        label: [sum(value for place, value in run.curve("forgotten") if place <= common) for run in entries[label].runs]
        for label in ("C-SGD", "SGD-BN")
    }
    measured = all(totals.values())
    return Statement(
        "Consequentialism forgets the previous mini-batches less often.",
        f"Samples forgotten from one epoch to the next, in {common:,} iterations: "
        + ", ".join(f"{label} {spread(values, ',.0f')}" for label, values in totals.items())
        + "."
        if measured
        else NOT_MEASURED,
        all_of([fmean(totals["C-SGD"]) < fmean(totals["SGD-BN"]) if measured else None]),
    )


def _crosses_late(entries: Entries) -> Statement:
    early = lowered(entries["C-SGD"], entries["SGD-BN"], until=CROSSING_AFTER)
    found = crossings(entries["SGD-BN"], entries["C-SGD"], beyond=CROSSING_AFTER)
    places = [place for place in found if place is not None]
    text = NOT_MEASURED
    if early:
        text = f"Until then C-SGD's loss is {_range(early)} decades below."
    if found:
        text += f" Iteration from which SGD-BN's stays below it: {spread(found, of='pairs of seeds')}."
    return Statement(
        "C-SGD converged faster in the beginning and stayed stable, but SGD with BatchNorm finally crossed its loss "
        f"after {CROSSING_AFTER:,} iterations.",
        text,
        all_of(
            [
                _all_positive(early),
                len(places) == len(found) and min(places) >= CROSSING_AFTER if found else None,
            ]
        ),
        remark="Losses over the epochs, for the crossing smoothed over five of them; every pair of seeds.",
    )


def _resembles(entries: Entries) -> Statement:
    def apart(label: str, other: str) -> float | None:
        return mean_over_pairs(
            entries[label].curves("epoch_accuracy"), entries[other].curves("epoch_accuracy"), distance
        )

    gap, yardstick = apart("C-SGD", "SGD-BN"), apart("SGD", "SGD-BN")
    text = NOT_MEASURED
    if gap is not None:
        text = f"Accuracies over the epochs are {100 * gap:.2f} % apart on average"
        text += f" (SGD without BatchNorm and SGD-BN: {100 * yardstick:.2f} %)." if yardstick is not None else "."
    return Statement(
        "There is a striking resemblance between the accuracy graphs of C-SGD and SGD with BatchNorm.",
        text,
        all_of([None if gap is None else gap <= RESEMBLANCE]),
        remark=f"Holds up to {100 * RESEMBLANCE:g} %.",
    )


def _bn_helps_nesterov(entries: Entries) -> Statement:
    helped = lowered(entries["Nesterov-BN"], entries["Nesterov"])
    against = lowered(entries["C-Nesterov"], entries["Nesterov-BN"])
    gains = {"Nesterov-BN below Nesterov": helped, "C-Nesterov below Nesterov-BN": against}
    return Statement(
        "Applying BatchNorm improved Nesterov's convergence; C-Nesterov maintained its competitiveness with it.",
        _gains(gains, "Decades of loss: "),
        all_of([_all_positive(helped), None if not against else fmean(against) >= 0]),
    )


def _fewer_parameters() -> Statement:
    from consequent_lab.models import resnet20

    without, with_bn = (
        sum(parameter.numel() for parameter in resnet20(batch_norm).parameters()) for batch_norm in (False, True)
    )
    saved = (with_bn - without) / with_bn
    return Statement(
        "Without BatchNorm the network has significantly less learnable parameters.",
        f"{without:,} instead of {with_bn:,}: {100 * saved:.1f} % less, as its convolutions have biases instead.",
        all_of([saved >= SIGNIFICANT]),
        remark=f"Significant: {100 * SIGNIFICANT:g} % or more.",
    )


def _neither_vanish_nor_explode(entries: Entries) -> Statement:
    spans = {label: span_of_norms(entries[label].runs) for label in ("C-SGD", "SGD-BN", "SGD")}
    shown = [f"{label} {value:,.0f}" for label, value in spans.items() if value is not None]
    return Statement(
        "C-SGD, like BatchNorm, does not suffer from vanishing and exploding gradients.",
        f"The largest norm of a layer's gradient ÷ the smallest, median: {', '.join(shown)}."
        if shown
        else NOT_MEASURED,
        all_of(
            None if value is None else value < VANISHED
            for label, value in spans.items()
            if label in ("C-SGD", "SGD-BN")
        ),
        remark=f"Holds below {VANISHED:,}: no layer's gradient is out of scale with the others'.",
    )


def _conflicts_with_bn(entries: Entries) -> Statement:
    gains = {
        f"{other}": lowered(entries["C-SGD-BN"], entries[other]) for other in ("C-SGD", "SGD-BN")
    }  # fmt: skip
    return Statement(
        "The combination of consequentialism and BatchNorm did not help, and even they had some conflicts.",
        _gains(gains, "Decades of loss by which C-SGD with BatchNorm is below: "),
        all_of(None if not values else fmean(values) <= 0 for values in gains.values()),
        remark="It helps if it is better than either alone.",
    )


def _about_equal_in_time(entries: Entries) -> Statement:
    times = {label: seconds_to(entries[label], HIGH_ACCURACY) for label in ("C-SGD", "SGD-BN")}
    ratio = _ratio(times["C-SGD"], times["SGD-BN"])
    return Statement(
        "By considering the time, SGD with BatchNorm performed almost the same as C-SGD.",
        _times(times),
        all_of([None if ratio is None else 1 / ABOUT_EQUAL <= ratio <= ABOUT_EQUAL]),
        remark=f"Holds within a factor of {ABOUT_EQUAL:g}.",
    )


def _nesterov_wins_in_time(entries: Entries) -> Statement:
    times = {label: seconds_to(entries[label], HIGH_ACCURACY) for label in ("C-Nesterov", "Nesterov-BN")}
    ratio = _ratio(times["C-Nesterov"], times["Nesterov-BN"])
    return Statement(
        "C-Nesterov also did better than Nesterov with BatchNorm in time.",
        _times(times),
        all_of([None if ratio is None else ratio < 1]),
    )


def _ratio(times: Sequence[float | None], others: Sequence[float | None]) -> float | None:
    """Returns the mean time ÷ the other; one that is never there is infinitely late."""
    if not times or not others:
        return None
    mine = fmean(float("inf") if value is None else value for value in times)
    yours = fmean(float("inf") if value is None else value for value in others)
    return None if mine == yours == float("inf") else mine / yours


def _times(times: dict[str, list[float | None]]) -> str:
    if not all(times.values()):
        return NOT_TIMED
    shown = "; ".join(f"{label} {spread(values, ',.1f')}" for label, values in times.items())
    return f"Seconds until {100 * HIGH_ACCURACY:.0f} % over an epoch: {shown}."


def _gains(gains: dict[str, list[float]], opening: str, missing: str = NOT_MEASURED) -> str:
    shown = [f"{name} {_range(values)}" for name, values in gains.items() if values]
    return f"{opening}{'; '.join(shown)}." if shown else missing


def _range(values: list[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:+.2f}"
    return f"{fmean(values):+.2f} ({min(values):+.2f} to {max(values):+.2f} over pairs of seeds)"


def _all_positive(values: list[float]) -> bool | None:
    return all(value > 0 for value in values) if values else None
