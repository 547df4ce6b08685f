"""Everything that a report consists of, written to disk."""

from collections.abc import Sequence
from pathlib import Path

from consequent_lab.paper.findings import Finding
from consequent_lab.records import write_atomically
from consequent_lab.report.page import page
from consequent_lab.report.static import draw


def write_report(findings: Sequence[Finding], output: Path, figures: Path) -> list[Path]:
    """Writes the page and, to a folder, the static figures; returns the files of these."""
    drawn = [figure for finding in findings for figure in finding.figures]
    for kind, names in (("experiment", [one.name for one in findings]), ("figure", [one.name for one in drawn])):
        if len(set(names)) < len(names):
            raise ValueError(f"each {kind} needs a name of its own, got {', '.join(names)}")
    text = page(findings)
    written = [path for figure in drawn for path in draw(figure, figures)]
    write_atomically(output, lambda file: file.write(text.encode()))
    return written
