"""The table of `consequent bench`, from its JSON files, and which targets are met."""

from collections.abc import Sequence
from typing import Any

from consequent_lab.numbers import three_digits

WAYS = {"own": "own inputs", "averages": "averages, `refresh=10`"}


def cost_table(records: Sequence[dict[str, Any]]) -> list[str]:
    """Returns the lines of the table of ratios: a line for each work and what it is compared with; none of none."""
    lines: dict[tuple[str, str, str], dict[str, dict[str, Any]]] = {}
    for record in records:
        for row in record["rows"]:
            if row["quantity"] == "time" or row["target"] is not None:
                what = "peak memory" if row["quantity"] == "memory" else row["mode"]
                work = f"{row['task']}, {machine(record)}, {what}"
                key = work.removesuffix(", eager") if record["device"]["type"] == "cpu" else work
                lines.setdefault((key, row["baseline"]["name"], row["unit"]), {})[row.get("way") or "own"] = row
    if not lines:
        return []
    head = ["| | plain |", *(f" {name} |" for name in WAYS.values()), " wanted |"]
    return ["".join(head), "|---" * (len(WAYS) + 3) + "|", *(_cost_line(*key, ways) for key, ways in lines.items())]


def _cost_line(work: str, baseline: str, unit: str, ways: dict[str, dict[str, Any]]) -> str:
    other = next((row["baseline"]["value"] for row in ways.values() if row["baseline"]["value"] is not None), None)
    plain = f"{baseline} {'–' if other is None else f'{three_digits(other)} {unit}'}"
    targets = {way: row["target"] for way, row in ways.items() if row["target"] is not None}
    wanted = [f"{'averages ' if way == 'averages' else ''}{target:g}" for way, target in targets.items()]
    return f"| {work} | {plain} | {' | '.join(_ratio(ways.get(way)) for way in WAYS)} | {', '.join(wanted) or '–'} |"


def _ratio(row: dict[str, Any] | None) -> str:
    if row is None:
        return "–"
    if row["ratio"] is None:
        return "failed"
    ratio = row["ratio"]
    return f"{ratio['median']:.2f} ({ratio['lower_quartile']:.2f}–{ratio['upper_quartile']:.2f})"


def machine(record: dict[str, Any]) -> str:
    """Returns where a file's numbers were measured, in a word or two."""
    device = record["device"]
    return "H200" if "H200" in device["name"] else str(device["name"]).replace("CPU, ", "CPU with ")


def verdicts(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Returns a line for every target that was judged, and for every comparison that failed."""
    lines = []
    for row in rows:
        what = f"{row['task']}, {row['mode']}: {row['ours']['name']} ÷ {row['baseline']['name']}"
        what += ", memory" if row["quantity"] == "memory" else ""
        if row["error"] is not None:
            lines.append(f"{what} failed: {row['error']}")
        elif row["met"] is not None:
            lines.append(f"{what} {row['ratio']['median']:.2f}, {'met' if row['met'] else 'missed'}: {row['target']:g}")
    return lines
