"""The tables of ResNet-20 in docs/race.md, from the lines of benchmarks/resnet20_exploration.py.

    python benchmarks/resnet20_tables.py results/resnet20-exploration.jsonl

A table has the runs of one length on as many images whose blocks begin in one way, the best ones first; runs that
differ in their seed alone share a row.
"""

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

Line = dict[str, Any]

WITH_BATCH_NORM = "same"  # what lines of networks with BatchNorm say of how blocks begin: Kaiming's weights


def read(path: Path) -> list[Line]:
    """Returns the lines of a file that has one run each."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def runs_of(lines: list[Line], *, whole: bool, epochs: int, images: int, start: str = "tenth") -> list[Line]:
    """Returns the runs of one kind that went to their end, in bfloat16; those with BatchNorm are among them.

    Args:
        lines: all of them.
        whole: on all training images, judged by the test images; otherwise by images that were held out.
        epochs: how long.
        images: that were trained on.
        start: how blocks without BatchNorm begin.
    """
    kind = {"whole": whole, "epochs": epochs, "images": images, "half": True, "bound": None}
    return [
        line
        for line in lines
        if all(line.get(name) == value for name, value in kind.items())
        and line["start"] == (WITH_BATCH_NORM if line["contestant"].endswith("-BN") else start)
    ]


def table(runs: list[Line], judged: str) -> str:
    """Returns a Markdown table, a row for each contestant and its settings: medians over seeds, accuracies with ranges.

    Args:
        runs: of one kind.
        judged: what the accuracy is one of, for its heading.
    """
    rows: dict[str, list[Line]] = {}
    for line in runs:
        cells = [line["contestant"]] + [
            f"{line['settings'][name]:g}" if name in line["settings"] else "–"
            for name in ("lr", "relative_damping", "decay")
        ]
        rows.setdefault(" | ".join(cells), []).append(line["curve"][-1])
    accuracy = {row: median(end["test_accuracy"] for end in ends) for row, ends in rows.items()}
    lines = [
        f"| contestant | lr | damping | decay | seeds | {judged} accuracy | {judged} loss | training accuracy |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in sorted(rows, key=lambda row: -accuracy[row]):
        ends = rows[row]
        values = [100 * end["test_accuracy"] for end in ends]
        spread = f" ({min(values):.4g}–{max(values):.4g})" if len(ends) > 1 else ""
        loss, known = (median(end[name] for end in ends) for name in ("test_loss", "train_accuracy"))
        accuracies = f"{100 * accuracy[row]:.4g} %{spread} | {loss:.3g} | {100 * known:.4g} %"
        lines.append(f"| {row} | {len(ends)} | {accuracies} |")
    return "\n".join(lines)


def tables(lines: list[Line]) -> list[str]:
    """Returns those of the page, in their order."""
    return [
        table(runs_of(lines, whole=True, epochs=60, images=50_000), "test"),
        table(runs_of(lines, whole=False, epochs=20, images=45_000), "held-out"),
        table(runs_of(lines, whole=False, epochs=10, images=18_000), "held-out"),
    ]


if __name__ == "__main__":
    print("\n\n".join(tables(read(Path(sys.argv[1])))))
