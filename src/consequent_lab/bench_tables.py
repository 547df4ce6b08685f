"""The tables and the figure of `consequent bench`, from its JSON files."""

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from consequent_lab.numbers import three_digits
from consequent_lab.paper.findings import Axis, Figure, Panel, Series
from consequent_lab.targets import BATCH_NORM, PLAIN, WAYS

Row = dict[str, Any]
AXES = {"width": "width of all layers", "depth": "hidden layers", "batch": "samples in a batch"}
LEGEND = "A step ÷ a plain one (wanted at most), bold where that is met; of first steps, the seconds more."


def tables(records: Sequence[Row]) -> list[str]:
    """Returns the lines of a table for each machine, with a row for each work and mode; none of none."""
    lines: list[str] = []
    for machine, rows in _by_machine(records, "rows").items():
        works: dict[tuple[str, str], dict[str, Row]] = {}
        for row in rows:
            works.setdefault((row["task"], row["mode"]), {})[row["way"]] = row
        ways = [way for way in WAYS if way != BATCH_NORM and any(way in its for its in works.values())]
        lines += [f"| {machine} | | {PLAIN} | {' | '.join(ways)} |", f"|---|---|{'---:|' * (1 + len(ways))}"]
        for (task, mode), its in works.items():
            rival = f" (with BatchNorm {cost(its[BATCH_NORM])})" if BATCH_NORM in its else ""
            plain = [f"{three_digits(row['plain']['median'])} {row['unit']}" for row in its.values() if row["plain"]]
            cells = [task + rival, mode, *(plain or ["failed"])[:1], *(_cell(its[w]) if w in its else "" for w in ways)]
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return [*lines, LEGEND] if lines else []


def _by_machine(records: Sequence[Row], kind: str) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for record in records:
        if record[kind]:
            found.setdefault(record["device"]["name"], []).extend(record[kind])
    return found


def cost(row: Row) -> str:
    """Returns what a way costs, in words."""
    if row["cost"] is None:
        return "failed"
    return f"{row['cost']['median']:+.1f} s" if row["unit"] == "s" else f"{row['cost']['median']:.2f}"


def _cell(row: Row) -> str:
    found, wanted = cost(row), row["wanted"]
    if wanted is None:
        return found
    met = row["cost"] is not None and row["cost"]["median"] <= wanted
    return f"{f'**{found}**' if met else found} ({wanted:g})"


def scaling_figure(records: Sequence[Row]) -> Figure:
    """Returns what a step costs by the width, depth and batch of a perceptron, three panels for each machine."""
    panels = []
    for machine, rows in _by_machine(records, "scaling").items():
        for axis, title in AXES.items():
            points = sorted((row for row in rows if row["axis"] == axis and row["cost"]), key=itemgetter(axis))
            series = [Series(PLAIN, {axis: [row[axis] for row in points], "cost": [1.0] * len(points)})]
            for way in dict.fromkeys(row["way"] for row in points):
                its = [row for row in points if row["way"] == way]
                columns = {axis: [row[axis] for row in its], "cost": [row["cost"]["median"] for row in its]}
                series += [Series(way, columns, style="markers" if way == "cheaper" else "line+markers")]
            fixed = [f"{other} {points[0][other]}" for other in AXES if points and other != axis]
            scales = [Axis(axis, title, log=True)], [Axis("cost", "a step ÷ a plain one", log=True)]
            panels.append(Panel(f"{machine}: {', '.join(fixed)}", series, *scales))
    if not panels:
        raise ValueError("--figure: none of these files has numbers of `consequent bench --only scaling`")
    return Figure("scaling", "What a step of a perceptron costs", "", panels)
