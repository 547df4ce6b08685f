"""What becomes of the paper's statements on ResNet-20, and how they are measured on runs."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, product
from statistics import fmean, median
from typing import Any

from consequent_lab.kept_runs import KeptRun, TrainedRun
from consequent_lab.models import resnet20
from consequent_lab.paper.findings import Statement
from consequent_lab.paper.kept_contestants import (
    KeptContestant,
    Places,
    all_above,
    all_below,
    all_earlier,
    decades,
    late_if_never,
    lowered,
    spread,
)
from consequent_lab.paper.measures import (
    about,
    advantage,
    crossing,
    distance,
    first_above,
    smoothed,
    stays_above,
    up_to,
)
from consequent_lab.paper.race_finding import circumstances
from consequent_lab.paper.recipes import Race
from consequent_lab.paper.statements import Found, Outcome, judged, statement_rows

NAME = "resnet20"
CONTROL = " control"  # plain, with the inputs' range and the last layer's rate that the paper has for C- alone
ALL_CORRECT = 0.9999  # over an epoch: 5 of 50,000 samples may be wrong, each was seen before its step
C_SGD_AT, C_NESTEROV_AT, CROSSING_AT = 8_000, 7_000, 25_000  # iterations that the paper names
EQUAL_WINDOW = 10_000  # iterations that every contestant has
BEGINNING = 10  # epochs
MUCH = 0.3  # decades of loss: half
CHANGES_LITTLE = 0.1  # decades of loss
RESEMBLANCE = 2.0  # points of accuracy
HIGH_ACCURACY = 0.99  # over an epoch; the times to it are compared
ABOUT_EQUAL = 1.25  # times as long, or as short
SIGNIFICANT = 0.05  # of the parameters
LIKE_BATCH_NORM = 2.0  # times its span of gradients' norms
SMOOTHED = 5  # epochs, before it is looked where losses cross

# What measures have in common.
EVERY_PAIR = "holds if it is above 0 in every pair of seeds"
LOWER = "Decades by which the loss over the epoch is lower, on average over the stretch that both have"
BY_HEART = (
    f"The iteration from which the accuracy is there, over a whole epoch ({100 * ALL_CORRECT:g} %) and for the last "
    "mini-batch of every 100 iterations, as the paper has it. About: up to a quarter earlier or later, in every seed."
)

# What the differences of two losses, of every pair of seeds, have to be.
RULES: dict[str, Callable[[list[float]], bool | None]] = {
    "above 0": all_above,
    "much above 0": partial(all_above, limit=MUCH),
    "at most 0": lambda values: max(values) <= 0 if values else None,
    "below 0": lambda values: max(values) < 0 if values else None,
    "about 0": lambda values: max(map(abs, values)) <= CHANGES_LITTLE if values else None,
}


# ---- measures of runs --------------------------------------------------------------------------------------------


def reaches(run: KeptRun) -> float | None:
    """Returns the iteration at which all samples of an epoch are first known, but for a few."""
    return first_above(run.curve("epoch_accuracy"), ALL_CORRECT)


def stays_at_all(run: TrainedRun) -> float | None:
    """Returns the iteration from which the paper's curve, one mini-batch every 100 iterations, stays at 100 %."""
    shown = [(place, value) for place, value in run.curve("batch_accuracy") if place % run.config.log_every == 0]
    return stays_above(shown, 1.0)


def forgotten(run: KeptRun, after: float = 0, until: float = math.inf) -> float:
    """Returns how many samples of the training set were correct at one evaluation and wrong at the next, in all."""
    return float(sum(value for place, value in run.curve("forgotten") if after < place <= until))


def last_common_epoch(contestants: Sequence[KeptContestant]) -> float:
    """Returns the iteration of the last epoch that all runs of the headlines have; 0 if there is none."""
    headlines = [run for one in contestants if one.headline for run in one.runs]
    epochs = [dict(run.curve("epoch_loss")).keys() & dict(run.curve("test_accuracy")).keys() for run in headlines]
    return max(set.intersection(*map(set, epochs)), default=0) if epochs else 0


def layer_norms(run: KeptRun) -> list[tuple[int, list[float]]]:
    """Returns the norms of the plain gradient, layer by layer from the first to the last, at a few iterations.

    Layers are convolutions and the last one; a BatchNorm, kept as the second of a pair, is none.
    """
    found = []
    for line in run.lines:
        norms = line.get("gradient_norms", {}).get("plain", {})
        layers = [name for name in norms if not (name.endswith(".1") and f"{name.removesuffix('.1')}.0" in norms)]
        if layers:
            found.append((line["iteration"], [norms[name] for name in layers]))
    return found


def span_of_norms(runs: Sequence[KeptRun]) -> float | None:
    """Returns the largest norm of a layer's gradient ÷ the smallest at the same time, median over iterations."""
    ratios = [
        max(norms) / min(norms) if min(norms) > 0 else float("inf") for run in runs for _, norms in layer_norms(run)
    ]
    return median(ratios) if ratios else None


# ---- statements --------------------------------------------------------------------------------------------------


def statements(race: Race, kept: dict[str, KeptContestant]) -> list[Statement]:
    """Returns the paper's statements on what is kept, and controls, whose runs judge none of the paper's."""
    of_the_paper = without_controls(kept)
    on_the_paper, on_all = Judge(of_the_paper), Judge(kept)
    at = last_common_epoch(list(of_the_paper.values()))
    outcomes = {
        name: Outcome(
            *(on_all if "control" in row else on_the_paper).found(name, row),
            circumstances(race, [kept[label] for label in labels_of(row)], at),
        )
        for name, row in statement_rows(NAME).items()
        if not row.get("not_run")
    }
    return judged(NAME, "empirical", outcomes, globals())


def labels_of(row: dict[str, Any]) -> list[str]:
    """Returns the contestants whose test accuracies stand beside a statement: those that it names, else its pairs'."""
    return row.get("on") or list(dict.fromkeys(chain.from_iterable(row.get("pairs", ()))))


def without_controls(kept: dict[str, KeptContestant]) -> dict[str, KeptContestant]:
    """Returns the contestants that the paper has, too."""
    return {label: one for label, one in kept.items() if not label.endswith(CONTROL)}


class Judge:
    """Measures what the statements are about; behind an underscore a method has the name of its statement."""

    def __init__(self, kept: dict[str, KeptContestant]) -> None:
        self._kept = kept

    def found(self, name: str, row: dict[str, Any]) -> Found:
        """Returns what was measured for a statement."""
        if "pairs" not in row:
            result: Found = getattr(self, f"_{name}")()
            return result
        by = "seconds" if row.get("timed") else "iteration"
        gains = {(one, two): lowered(self._kept[one], self._kept[two], by) for one, two in row["pairs"]}
        shown = [f"{one} below {two} {decades(values)}" for (one, two), values in gains.items() if values]
        return f"{'; '.join(shown)}.", [RULES[row.get("holds", "above 0")](values) for values in gains.values()]

    def _c_adam_changes_nothing(self) -> Found:
        gaps = lowered(self._kept["C-Adam"], self._kept["Adam"], measure=partial(distance, in_decades=True))
        mean = lowered(self._kept["C-Adam"], self._kept["Adam"])
        return f"{decades(gaps)}; with their signs {decades(mean)}.", [
            all(gap <= CHANGES_LITTLE for gap in gaps) if gaps else None
        ]

    def _c_sgd_is_all_correct(self) -> Found:
        return self._all_correct("C-SGD", C_SGD_AT)

    def _c_nesterov_is_all_correct(self) -> Found:
        return self._all_correct("C-Nesterov", C_NESTEROV_AT)

    def _all_correct(self, label: str, place: int) -> Found:
        runs = self._kept[label].runs
        long_enough = bool(runs) and all(run.outcome["iteration"] >= 1.25 * place or run.diverged for run in runs)
        found = {
            f"{100 * ALL_CORRECT:.2f} % over an epoch": [reaches(run) for run in runs],
            "every later mini-batch that is read at 100 %": [stays_at_all(run) for run in runs],
        }
        shown = [f"{what}: {spread(places, within=self._iterations(label))}" for what, places in found.items()]
        return f"{'; '.join(shown)}.", [
            all(about(at, place) for at in places) if long_enough else None for places in found.values()
        ]

    def _none_forgotten(self) -> Found:
        counts = self._forgotten_late("C-SGD")
        return f"{spread(counts)}.", [not any(counts) if counts else None]

    def _bn_forgets(self) -> Found:
        counts = self._forgotten_late("SGD-BN")
        return f"{spread(counts)}.", [all(counts) if counts else None]

    def _forgotten_late(self, label: str) -> list[float]:
        runs = [run for run in self._kept[label].runs if run.outcome["iteration"] > C_SGD_AT]
        return [forgotten(run, after=C_SGD_AT) for run in runs]

    def _faster_in_the_beginning(self) -> Found:
        pairs = list(product(*(self._kept[label].curves("epoch_loss") for label in ("C-SGD", "SGD-BN"))))
        early = [zip(one[:BEGINNING], two[:BEGINNING], strict=False) for one, two in pairs]
        won = [float(sum(mine < yours for (_, mine), (_, yours) in both)) for both in early]
        mean = lowered(self._kept["C-SGD"], self._kept["SGD-BN"], measure=partial(advantage, until=CROSSING_AT))
        text = (
            f"{spread(won, '.1f', 'pairs of seeds')} epochs. "
            f"From iteration {self._below_from('SGD-BN')} on it stays below, as far as {EQUAL_WINDOW:,}. "
            f"A mean until {CROSSING_AT:,}, which hides this: {decades(mean)} decades below."
        )
        return text, [all_above(won, BEGINNING / 2)]

    def _below_from(self, label: str) -> str:
        """From which iteration on C-SGD's loss stays below another one's, as far as all are compared."""
        curves = (self._kept[one].curves("epoch_loss") for one in ("C-SGD", label))
        found = [crossing(*(up_to(curve, EQUAL_WINDOW) for curve in pair)) for pair in product(*curves)]
        return spread(found, of="pairs of seeds", within=EQUAL_WINDOW)

    def _stays_stable(self) -> Found:
        rough = {label: self._kept[label].unsteadiness("epoch_loss") for label in ("C-SGD", "SGD-BN")}
        return f"{_spreads(rough, '.4f', '; ')}.", [all_below(*rough.values())]

    def _crosses_late(self) -> Found:
        smooth = {
            label: [
                smoothed(run.curve("epoch_loss"), SMOOTHED)
                for run in self._kept[label].runs
                if run.outcome["iteration"] >= 1.25 * CROSSING_AT
            ]
            for label in ("SGD-BN", "C-SGD")
        }
        found = [crossing(one, two) for one, two in product(*smooth.values())]
        within = min(self._iterations(label) for label in smooth)
        return f"{spread(found, of='pairs of seeds', within=within)}.", [
            all(about(place, CROSSING_AT) for place in found) if found else None
        ]

    def _resembles(self) -> Found:
        points = {label: self._points_apart(label, EQUAL_WINDOW) for label in self._kept if label != "SGD-BN"}
        mine, overall = points.pop("C-SGD"), self._points_apart("C-SGD", math.inf)
        others = sorted((value, label) for label, value in points.items() if value is not None)
        text = (
            f"C-SGD {mine or 0:.1f} points; {', '.join(f'{label} {value:.1f}' for value, label in others)}. "
            f"Over all iterations, most of them near 100 %, C-SGD's is {overall or 0:.1f}."
        )
        return text, [None if mine is None else mine <= RESEMBLANCE]

    def _points_apart(self, label: str, until: float) -> float | None:
        near = partial(distance, until=until)
        gaps = lowered(self._kept[label], self._kept["SGD-BN"], quantity="epoch_accuracy", measure=near)
        return 100 * fmean(gaps) if gaps else None

    def _gradients_keep_their_scale(self) -> Found:
        spans = {label: span_of_norms(self._kept[label].runs) for label in ("C-SGD", "SGD-BN", "SGD")}
        mine, norm, plain = spans.values()
        shown = [f"{label} {value:,.1f}" for label, value in spans.items() if value is not None]
        return f"{', '.join(shown)}.", [
            None if mine is None or norm is None else mine <= LIKE_BATCH_NORM * norm,
            None if mine is None or plain is None else mine < plain,
        ]

    def _fewer_parameters(self) -> Found:
        without, with_bn = (sum(p.numel() for p in resnet20(batch_norm).parameters()) for batch_norm in (False, True))
        saved = (with_bn - without) / with_bn
        text = f"{without:,} instead of {with_bn:,}: {100 * saved:.1f} % less, as its convolutions have biases instead."
        return text, [saved >= SIGNIFICANT]

    def _about_equal_in_time(self) -> Found:
        times = self._seconds(("C-SGD", "SGD-BN"), HIGH_ACCURACY)
        if not all(times.values()):
            return "", [None]
        mine, yours = (fmean(late_if_never(values)) for values in times.values())
        equal = None if mine == yours == math.inf else 1 / ABOUT_EQUAL <= mine / yours <= ABOUT_EQUAL
        return self._shown_times(times, HIGH_ACCURACY), [equal]

    def _nesterov_wins_in_time(self) -> Found:
        times = self._seconds(("C-Nesterov", "Nesterov-BN"), HIGH_ACCURACY)
        return self._shown_times(times, HIGH_ACCURACY), [all_earlier(*times.values())]

    def _highest_accuracies_in_less_time(self) -> Found:
        labels = ("C-SGD", "C-Nesterov", "SGD-BN", "Nesterov-BN", "Adam-BN")
        times = self._seconds(labels, ALL_CORRECT)
        others = [value for label in labels[2:] for value in times[label]]
        earlier = [all_earlier(times[label], others) for label in labels[:2]]
        return self._shown_times(times, ALL_CORRECT) + " Test accuracy: below.", [*earlier, self._generalises_best()]

    def _generalises_best(self) -> bool | None:
        at = last_common_epoch(list(self._kept.values()))
        found = {label: [run.at("test_accuracy", at) for run in one.runs] for label, one in self._kept.items()}
        known = {label: [value for value in values if value is not None] for label, values in found.items()}
        means = {label: fmean(values) for label, values in known.items() if values}
        return max(means, key=lambda label: means[label]).startswith("C-") if len(means) > 1 else None

    def _forgets_less(self) -> Found:
        labels = ("C-SGD", "SGD-BN")
        common = min(self._iterations(label) for label in labels)
        totals = {label: [forgotten(run, until=common) for run in self._kept[label].runs] for label in labels}
        return f"In {common:,} iterations: {_spreads(totals)}.", [all_below(*totals.values())]

    def _earlier_than_controls(self) -> Found:
        shown, parts = [], []
        controls = [label for label in self._kept if label.endswith(CONTROL)]
        for level in (HIGH_ACCURACY, ALL_CORRECT):
            found = {label: self._kept[label].first_at(level) for label in ("C-SGD", *controls)}
            places = [f"{label} {spread(some, within=self._iterations(label))}" for label, some in found.items()]
            shown.append(f"{100 * level:g} %: {', '.join(places)}")
            parts += [all_earlier(found["C-SGD"], found[label]) for label in controls]
        below = ", ".join(f"{label} {self._below_from(label)}" for label in controls)
        shown.append(f"C-SGD's loss stays below from iteration: {below}")
        return f"{'; '.join(shown)}.", parts

    def _iterations(self, label: str) -> int:
        """How long the shortest run of a contestant is."""
        return min((run.outcome["iteration"] for run in self._kept[label].runs), default=0)

    def _seconds(self, labels: Sequence[str], level: float) -> dict[str, Places]:
        return {label: self._kept[label].first_at(level, "seconds") for label in labels}

    def _shown_times(self, times: dict[str, Places], level: float) -> str:
        shown = [
            f"{label} {spread(values, ',.1f') if any(values) else f'not within {self._iterations(label):,} iterations'}"
            for label, values in times.items()
            if values
        ]
        return f"Seconds until {100 * level:g} %: {'; '.join(shown)}."


def _spreads(values: dict[str, list[float]], form: str = ",.0f", between: str = ", ") -> str:
    return between.join(f"{label} {spread(some, form)}" for label, some in values.items())
