"""The paper's statements: their words and measures, from statements.toml, with what an experiment found."""

import re
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from consequent_lab.paper.findings import Kind, Statement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

NOT_MEASURED = "The runs are missing."
NOT_TIMED = "The runs are missing, or an iteration was not timed with nothing beside it."
NOT_RUN = "No such runs were made."


Found = tuple[str, list[bool | None]]  # the first two of an outcome


class Outcome(NamedTuple):
    """What an experiment found out about a statement."""

    measured: str
    parts: Sequence[bool | None]  # what became of each part of the statement, or setting; None: not measured
    circumstances: str = ""


@cache
def statement_rows(experiment: str) -> dict[str, dict[str, Any]]:
    """Returns what statements.toml has of an experiment, by the names of the statements."""
    text = files("consequent_lab.paper").joinpath("statements.toml").read_text(encoding="utf-8")
    rows: dict[str, dict[str, Any]] = tomllib.loads(text)[experiment]
    return rows


def judged(experiment: str, kind: Kind, outcomes: Mapping[str, Outcome], names: Mapping[str, Any]) -> list[Statement]:
    """Returns the statements of an experiment with their outcomes, given by the names of the statements.

    They are of one kind, unless their rows say otherwise. In braces in their measures stand `names`.
    """
    found = []
    for name, row in statement_rows(experiment).items():
        measured, parts, circumstances = Outcome(NOT_RUN, [None]) if row.get("not_run") else outcomes[name]
        if not row.get("not_run") and all(part is None for part in parts):
            measured = NOT_TIMED if row.get("timed") else NOT_MEASURED
        measure = re.sub(r"(?<=\d)%", " %", row["measure"].format_map(names))
        remark = row.get("remark", "")
        words, kind_of_this = row.get("paper", ""), row.get("kind", kind)
        if "control" in row:
            words, kind_of_this = row["control"], "control"
        found.append(Statement(words, kind_of_this, measure, measured, tuple(parts), circumstances, remark))
    return found
