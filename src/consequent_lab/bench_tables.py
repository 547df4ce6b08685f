"""The tables of README and docs/speed.md, from the JSON files of `consequent bench`.

`consequent bench --tables results/bench-h200.json results/bench-cpu.json` prints them, and the tests look for them in
the pages.
"""

from collections.abc import Sequence
from typing import Any

from consequent_lab.numbers import three_digits

WAYS = {"step": '`at="step"`', "backward": '`at="backward"`', "refresh": "`refresh=10`"}


def cost_table(records: Sequence[dict[str, Any]]) -> list[str]:
    """Returns the lines of the table of ratios: a line for each work and what it is compared with; none of none."""
    lines: dict[tuple[str, str, str], dict[str, dict[str, Any]]] = {}
    for record in records:
        for row in record["rows"]:
            if row["quantity"] == "time" or row["target"] is not None:
                what = "peak memory" if row["quantity"] == "memory" else row["mode"]
                work = f"{row['task']}, {_machine(record)}, {what}"
                key = work.removesuffix(", eager") if record["device"]["type"] == "cpu" else work
                lines.setdefault((key, row["baseline"]["name"], row["unit"]), {})[row.get("way") or "step"] = row
    if not lines:
        return []
    head = ["| | plain |", *(f" {name} |" for name in WAYS.values()), " wanted |"]
    return ["".join(head), "|---" * (len(WAYS) + 3) + "|", *(_cost_line(*key, ways) for key, ways in lines.items())]


def _cost_line(work: str, baseline: str, unit: str, ways: dict[str, dict[str, Any]]) -> str:
    other = next((row["baseline"]["value"] for row in ways.values() if row["baseline"]["value"] is not None), None)
    plain = f"{baseline} {'–' if other is None else f'{three_digits(other)} {unit}'}"
    cells = [_ratio(ways.get(way)) for way in WAYS]
    wanted = [f"{row['target']:g}" for way, row in ways.items() if way != "refresh" and row["target"] is not None][:1]
    if (row := ways.get("refresh")) is not None and row["target"] is not None:
        wanted.append(f"refresh {row['target']:g}")
    return f"| {work} | {plain} | {' | '.join(cells)} | {', '.join(wanted) or '–'} |"


def _ratio(row: dict[str, Any] | None) -> str:
    if row is None:
        return "–"
    if row["ratio"] is None:
        return "failed"
    ratio = row["ratio"]
    median = f"{ratio['median']:.2f}"
    spread = f"{ratio['lower_quartile']:.2f}–{ratio['upper_quartile']:.2f}"
    return f"{f'**{median}**' if row.get('best', True) else median} ({spread})"


def first_step_table(record: dict[str, Any]) -> list[str]:
    """Returns the lines of the table of first steps; none if they were not timed."""
    if not record.get("first_steps"):
        return []
    head = ["| first step of a new process | Triton's cache | seconds | wanted |", "|---|---|---|---|"]
    return head + [
        f"| {step['task']}, {_machine(record)} | {step['cache']} | "
        f"{'failed' if step['seconds'] is None else three_digits(step['seconds'])} | {step['target']:g} |"
        for step in record["first_steps"]
    ]


def _machine(record: dict[str, Any]) -> str:
    device = record["device"]
    return "H200" if "H200" in device["name"] else str(device["name"]).replace("CPU, ", "CPU with ")
