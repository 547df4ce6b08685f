"""Findings as one HTML page that needs nothing else: no network, no other file."""

import base64
import hashlib
from collections import Counter
from collections.abc import Sequence
from importlib.resources import files
from typing import get_args

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from consequent_lab.paper.findings import KINDS, Finding, Number, Table, Verdict
from consequent_lab.records import package_version
from consequent_lab.report.curve_styles import curve_styles
from consequent_lab.report.payload import aspect, choices, columns_of, payload, rounded

VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
MARKS: dict[Verdict, str] = {  # the name of an icon, which is also that of a style
    "holds": "yes",
    "holds in part": "partly",
    "does not hold": "no",
    "not measured": "unknown",
}


def page(findings: Sequence[Finding]) -> str:
    """Returns the page. If any finding only shows the machinery, the page has no verdicts at all, and says why."""
    environment = Environment(
        loader=PackageLoader("consequent_lab", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "ensure_ascii": False, "allow_nan": False}
    environment.filters["number"] = number
    environment.tests["numeric"] = lambda value: value is None or isinstance(value, int | float)
    scripts = [_asset("chart.js"), _asset("page.js")]
    return environment.get_template("page.html").render(
        findings=findings,
        payloads=[payload(figure) for finding in findings for figure in finding.figures],
        lead=next((finding.lead for finding in findings if finding.lead), None),
        is_small=any(finding.is_small for finding in findings),
        counts=Counter((one.kind, one.verdict) for finding in findings for one in finding.statements),
        judged=sum(one.kind == "empirical" for finding in findings for one in finding.statements),
        kinds=KINDS,
        verdicts=VERDICTS,
        marks=MARKS,
        curve_styles=curve_styles,
        choices=choices,
        aspect=aspect,
        columns_of=columns_of,
        is_numeric=is_numeric,
        style=Markup(_asset("page.css")),
        # Files of this package; nothing else on the page is marked as safe.
        scripts=[Markup(script) for script in scripts],
        script_digests=[_digest(script) for script in scripts],
        version=package_version("consequent"),
    )


def is_numeric(table: Table, column: int) -> bool:
    """Tells whether a column holds numbers, at least one, and no text."""
    values = [row[column] for row in table.rows if row[column] is not None]
    return bool(values) and all(isinstance(value, int | float) for value in values)


def number(value: Number) -> str:
    """Returns a number as tables show it.

    >>> number(40000.0), number(0.0123456), number(12345.6), number(1e-7), number(None)
    ('40,000', '0.01235', '12,346', '1e-07', '–')
    """
    if value is None:
        return "–"
    whole = rounded(value)
    if isinstance(whole, int):
        return f"{whole:,}"
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e9 else f"{value:.4g}"


def _asset(name: str) -> str:
    return files("consequent_lab.report").joinpath(name).read_text(encoding="utf-8")


def _digest(script: str) -> str:
    """Returns what the page's security policy knows a script by; no other script runs."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
