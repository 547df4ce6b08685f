"""The JSON file of the faults that were tried, and how some of its rows are tried anew while the others stay.

The file says what made it. A row that was made later says so itself, under "made_by".
"""

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from consequent_lab.records import provenance
from faults.soak import Soak
from faults.trial import Trial


def new_record(trials: list[Trial], soaked: Soak | None, *, quick: bool) -> dict[str, Any]:
    """Returns what was tried, and what made it."""
    return {
        "study": "faults",
        "quick": quick,
        **provenance(workers=1),
        "trials": [asdict(trial) for trial in trials],
        "soak": None if soaked is None else _soak_row(soaked),
    }


def read_record(path: Path, *, quick: bool) -> dict[str, Any]:
    """Returns what the file holds; raises unless it can be added to."""
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if record.get("study") != "faults":
        raise ValueError(f"{path}: not a file of this study")
    if record["quick"] != quick:
        there = "with" if record["quick"] else "without"
        raise ValueError(f"{path} was made {there} --quick: try the rest in the same way, or name another --output")
    return record


def updated(record: dict[str, Any], trials: list[Trial], soaked: Soak | None) -> dict[str, Any]:
    """Returns the record with these rows in place of those of the same faults, or after all others."""
    made_by = provenance(workers=1)
    rows = {row["fault"]: row for row in record["trials"]}
    rows |= {trial.fault: {**asdict(trial), "made_by": made_by} for trial in trials}
    soak = record["soak"] if soaked is None else {**_soak_row(soaked), "made_by": made_by}
    return {**record, "trials": list(rows.values()), "soak": soak}


def recorded(record: dict[str, Any]) -> tuple[list[Trial], Soak | None]:
    """Returns what was tried, and the long run."""
    trials = [Trial(**{field.name: row[field.name] for field in fields(Trial)}) for row in record["trials"]]
    row = record["soak"]
    return trials, None if row is None else Soak(**{field.name: row[field.name] for field in fields(Soak)})


def _soak_row(soaked: Soak) -> dict[str, Any]:
    return {**asdict(soaked), "as_expected": soaked.is_as_expected}
