"""The table of a task, made from its lines, in Markdown: the docs have it, and the terminal shows it."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from consequent_lab.race.contestants import CONTESTANTS
from consequent_lab.race.curves import unpacked
from consequent_lab.race.measures import Measure, TimeTo, shown
from consequent_lab.race.results import Line, Results, seconds_until

NEAR_THE_END = 0.03  # of a knob's range, on its logarithmic scale
WAYS = {"eager": "eager", "graph": "CUDA graph"}  # in which steps are timed, and their names


@dataclass(frozen=True)
class Spread:
    """The median and the range over seeds; infinite where a target was not reached."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle value; of an even number, between the two."""
        return statistics.median(self.values)

    def text(self, form: str, metric: str | None = None) -> str:
        """Returns the median and the range.

        >>> Spread((3.0, 1.0, 2.0)).text(",.0f"), Spread((1.0, math.inf, math.inf)).text(",.0f")
        ('2 (1–3)', '– (1–…)')
        >>> Spread((0.5, 0.4, 0.6)).text("", "test_accuracy")
        '50 % (40–60)'
        """

        def one(value: float, missing: str) -> str:
            if not math.isfinite(value):
                return missing
            return format(value, form) if metric is None else shown(metric, value)

        low, high = min(self.values), max(self.values)
        if not math.isfinite(low):
            return "–"
        if low == high:
            return one(low, "–")
        ends = (one(low, "–"), one(high, "…"))
        return f"{one(self.median, '–')} ({'–'.join(end.split()[0] for end in ends)})"  # the unit stands once


@dataclass(frozen=True)
class Row:
    """A contestant's line of the table."""

    contestant: str
    settings: str
    cells: tuple[str, ...]


def spread_of(measure: Measure, lines: Sequence[Line]) -> Spread:
    """Returns what finals come to by a measure, in its own unit: steps to a target, or a metric."""
    values = []
    for line in lines:
        curve = unpacked(line["curve"])
        if isinstance(measure, TimeTo):
            step = measure.arrival(curve)
            values.append(math.inf if step is None else float(step))
        else:
            score = measure.score(curve, line["steps"])
            values.append(-score if measure.rising else score)
    return Spread(tuple(values))


def headings(results: Results) -> list[str]:
    """Returns the heads of the columns after the contestant and its settings; a lone one of seconds is short."""
    heads = []
    names = [WAYS[way] for way in _ways(results)]
    measures = (results.task.measure, *results.task.reported)
    is_lone = len(names) * sum(isinstance(measure, TimeTo) for measure in measures) == 1
    for measure in measures:
        heads.append(str(measure))
        if isinstance(measure, TimeTo):
            until = str(measure).replace("steps", "seconds")
            heads += ["seconds"] if is_lone else [f"{until}, {name}" for name in names]
    if not names:
        return heads
    first = _first_steps(results)
    together = "" if is_lone else f", {' / '.join(names)}"
    return [*heads, f"ms a step{together.replace('eager', f'eager ({first})') if first else together}"]


def _first_steps(results: Results) -> str:
    """Returns how many first steps of a run were timed by themselves, if any."""
    return next((f"first {line['first']['steps']}" for line in results.lines if "first" in line), "")


def rows(results: Results) -> list[Row]:
    """Returns the lines of the table, the best by the search's measure first."""
    ways = _ways(results)
    found = []
    for name in CONTESTANTS:
        finals = results.finals(name)
        if not finals:
            continue
        timed: Line = next(iter(results.of_kind("time", name)), {"milliseconds": {}})
        cells = []
        for measure in (results.task.measure, *results.task.reported):
            spread = spread_of(measure, finals)
            if isinstance(measure, TimeTo):
                cells.append(spread.text(",.0f"))
                cells += [_seconds(spread, timed, way) for way in ways]
            else:
                cells.append(spread.text(".3g", measure.metric))
        if ways:
            cells.append(" / ".join(_milliseconds(timed, way) for way in ways))
        scores = [results.task.measure.score(unpacked(line["curve"]), line["steps"]) for line in finals]
        seeds = "1 seed" if len(finals) == 1 else f"{len(finals)} seeds"
        row = Row(name, f"{settings_of(results, name)} ({seeds})", tuple(cells))
        found.append((statistics.median(scores), row))
    return [row for _, row in sorted(found, key=lambda ranked: ranked[0])]


def _seconds(spread: Spread, timed: Line, way: str) -> str:
    seconds = seconds_until(spread.median, timed, way) if math.isfinite(spread.median) else None
    return "–" if seconds is None else f"{seconds:.3g}"


def _milliseconds(timed: Line, way: str) -> str:
    """Returns those of a later step, and in brackets those of a first one, where both were timed."""
    if way not in timed["milliseconds"]:
        return "–"
    first = f" ({timed['first']['milliseconds']:.3g})" if way == "eager" and "first" in timed else ""
    return f"{timed['milliseconds'][way]['median']:.3g}{first}"


def _ways(results: Results) -> list[str]:
    """Returns in which ways steps were timed."""
    timed = [line["milliseconds"] for line in results.lines if line["kind"] == "time"]
    return [way for way in WAYS if any(way in milliseconds for milliseconds in timed)]


def settings_of(results: Results, contestant: str) -> str:
    """Returns the settings of a contestant's finals."""
    return ", ".join(_setting(results, contestant, *one) for one in results.finals(contestant)[0]["settings"].items())


def _setting(results: Results, contestant: str, name: str, value: float) -> str:
    """Returns a setting, with a star where it is so near the end of its range that a better one may lie beyond."""
    (knob,) = (knob for knob in CONTESTANTS[contestant].space(results.task) if knob.name == name)
    place = math.log(value / knob.low) / math.log(knob.high / knob.low)
    return f"{name} {value:.2g}{'' if NEAR_THE_END < place < 1 - NEAR_THE_END else '*'}"


def caption(results: Results) -> str:
    """Returns what was done, and who is missing."""
    trials = max((len(results.trials(name)) for name in CONTESTANTS), default=0)
    known = results.task.settings_from
    here = "then, for some, the best of a few others on samples held out" if trials else "not searched here"
    how = f"found in {known}, {here}" if known else f"{trials} trials each, successive halving"
    sentences = [
        f"{results.task.title[0].upper()}{results.task.title[1:]}.",
        f"Settings by {results.task.measure} ({how}), then other seeds: median (lowest–highest).",
    ]
    if _ways(results):
        first = _first_steps(results)
        apart = f", eagerly the {first} by themselves" if first else ""
        sentences.append(f"Seconds are steps × the time of a step measured alone{apart}.")
    if any("*" in row.settings for row in rows(results)):
        sentences.append("A star: at the end of the range that was searched.")
    missing = [name for name in results.task.contestants if not results.finals(name)]
    begun = {name: len(results.trials(name)) for name in missing if results.trials(name)}
    unfinished = [f"{name} ({number} trials)" for name, number in begun.items() if number < trials]
    if unfinished:
        sentences.append(f"Searches that were not finished: {', '.join(unfinished)}.")
    without_finals = [name for name, number in begun.items() if number == trials]
    if without_finals:
        sentences.append(f"Searched, without finals: {', '.join(without_finals)}.")
    absent = [name for name in missing if not results.trials(name)]
    if absent:
        sentences.append(f"Not run: {', '.join(absent)}.")
    return " ".join(sentences)


def markdown_table(results: Results) -> str:
    """Returns what was done, and the table."""
    return f"{caption(results)}\n\n{markdown_rows(results)}"


def markdown_rows(results: Results) -> str:
    """Returns the table alone, without what was done."""
    heads = ["contestant", *headings(results), "settings"]
    lines = [f"| {' | '.join(heads)} |", f"|---|{'---:|' * (len(heads) - 2)}---|"]
    lines += [f"| {' | '.join([row.contestant, *row.cells, row.settings])} |" for row in rows(results)]
    return "\n".join(lines) + "\n"
