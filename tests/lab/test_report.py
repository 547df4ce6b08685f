"""The report's page as text, and the static figures. How the page behaves in a browser: test_report_in_browser.py."""

import base64
import hashlib
import json
import math
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from html.parser import HTMLParser
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import numpy as np
import pytest
from sample_findings import HOSTILE, bare, findings, hostile, loss_surface, output_paths, resnet

from consequent_lab import cli
from consequent_lab.paper.findings import Axis, Figure, Panel, Series, Statement, Table
from consequent_lab.report.curve_styles import HUES, curve_styles
from consequent_lab.report.page import page
from consequent_lab.report.payload import choices, contour_lines
from consequent_lab.report.static import draw
from consequent_lab.report_command import Report

ROOT = Path(__file__).parents[2]
MOST_BYTES = 2_000_000


class Reader(HTMLParser):
    """What a browser finds in the page."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.texts, self._open = [], [], None
        self.scripts, self.styles = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag in ("script", "style"):
            self._open = {"script": self.scripts, "style": self.styles}[tag]
            self._open.append("")

    def handle_endtag(self, tag):
        if tag in ("script", "style"):
            self._open = None

    def handle_data(self, data):
        if self._open is None:
            self.texts.append(data.strip())
        else:
            self._open[-1] += data


@pytest.fixture(scope="module")
def text():
    return page(findings())


@pytest.fixture(scope="module")
def read(text):
    return Reader(text)


# ---- the page -------------------------------------------------------------------------------------------------------


def test_data_in_the_page_are_the_data_given(read):
    shown = {figure["name"]: figure for figure in json.loads(read.scripts[0])}
    for finding in findings():
        for figure in finding.figures:
            legend = list(curve_styles(figure))
            for panel, drawn in zip(figure.panels, shown[figure.name]["panels"], strict=True):
                runs = {curve["label"]: curve for curve in drawn["curves"] if curve["role"] != "median"}
                assert len(runs) == len(panel.series)
                for series in panel.series:
                    curve = runs[series.label]
                    assert legend[curve["group"]] == series.group
                    for axis in (*panel.x, *panel.y):
                        given = [None if v is None or not math.isfinite(v) else v for v in series.columns[axis.column]]
                        assert [v is None for v in curve["columns"][axis.column]] == [v is None for v in given]
                        np.testing.assert_allclose(
                            np.array(curve["columns"][axis.column], float), np.array(given, float), rtol=1e-4
                        )
                assert [axis["log"] for axis in drawn["y"]] == [axis.log for axis in panel.y]
                if panel.contours:
                    assert drawn["extent"] == {"x": [-5, 5], "y": [-2, 4]}


def test_several_runs_get_their_median_and_a_diverged_one_ends_it(read):
    (figure,) = (figure for figure in json.loads(read.scripts[0]) if figure["name"] == "resnet20")
    medians = [curve for panel in figure["panels"] for curve in panel["curves"] if curve["role"] == "median"]
    assert len(medians) == 12
    panel = resnet(400).figures[0].panels[0]
    for name, whole in (("C-SGD", True), ("Adam", False)):
        (curve,) = (curve for curve in medians if curve["label"] == f"{name}, median of 3")
        runs = [series for series in panel.series if series.group == name]
        for column in ("seconds", "loss", "accuracy"):
            values = np.array([run.columns[column] for run in runs], float)
            expected = np.median(np.where(np.isfinite(values), values, np.nan), axis=0)
            np.testing.assert_allclose(np.array(curve["columns"][column], float), expected, rtol=1e-4)
        assert (curve["columns"]["loss"][-1] is not None) == whole


def test_paths_of_several_samples_are_no_seeds(read):
    (figure,) = (figure for figure in json.loads(read.scripts[0]) if figure["name"] == "output-paths")
    assert {curve["role"] for curve in figure["panels"][0]["curves"]} == {"alone"}


def test_markup_in_names_is_shown_as_text(text, read):
    assert "<script>alert" not in text
    assert len(read.scripts) == 3, "the data, the charts and the page's own"
    assert read.texts.count(HOSTILE) >= 15, "in every place that shows a name or a text"
    assert not [name for _, attributes in read.elements for name in attributes if name.startswith("on")]
    (series,) = (figure for figure in json.loads(read.scripts[0]) if figure["name"] == "hostile")
    assert series["panels"][0]["curves"][0]["label"] == HOSTILE


def test_nothing_is_loaded(read):
    for tag, attributes in read.elements:
        assert not {"src", "srcset", "data", "action", "formaction", "poster", "background"} & set(attributes), tag
        if "href" in attributes and not attributes["href"].startswith("#"):
            assert tag == "a", f"<{tag}> would load {attributes['href']}"
    assert "url(" not in read.styles[0]
    assert "@import" not in read.styles[0]


def test_the_security_policy_knows_the_two_scripts_and_allows_no_other_source(read):
    (policy,) = (
        attributes["content"]
        for tag, attributes in read.elements
        if tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy"
    )
    rules = {rule.split()[0]: rule.split()[1:] for rule in policy.split(";")}
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in read.scripts[1:]]
    assert rules["script-src"] == [f"'sha256-{digest}'" for digest in digests]
    assert rules["default-src"] == ["'none'"]
    assert rules["img-src"] == ["data:", "blob:"]
    assert "connect-src" not in rules


def test_contours_are_lines_of_equal_height():
    contours = loss_surface().figures[0].panels[0].contours
    lines = contour_lines(contours)
    assert len(lines) >= 16
    for xs, ys in lines:
        heights = [0.5 * ((0.5 * (x - 1)) ** 2 + (2 * (y - 1)) ** 2) for x, y in zip(xs, ys, strict=True)]
        assert max(heights) - min(heights) < 0.05 * max(heights) + 0.02


def test_every_statement_stands_once_with_measure_value_and_verdict_in_words(read):
    given = [statement for finding in findings() for statement in finding.statements]
    ids = {attributes["id"] for _, attributes in read.elements if "id" in attributes}
    links = {attributes["href"][1:] for tag, attributes in read.elements if tag == "a" and attributes["href"][0] == "#"}
    assert links <= ids
    for verdict in ("holds", "holds in part", "does not hold", "not measured"):
        count = sum(statement.verdict == verdict for statement in given)
        assert read.texts.count(verdict) == count + 1, "with each statement, and once as a heading"
    assert "2 of 3" in read.texts
    for statement in given:
        for text in (statement.paper, statement.measure, statement.measured, statement.circumstances):
            assert read.texts.count(text.strip()) == 1 or text in ("", HOSTILE)


def test_kinds_are_counted_apart(read):
    start = read.texts.index("the paper's networks and data")
    counts = [int(text) for text in read.texts[start:] if text.isdigit()][:12]
    assert counts == [0, 1, 0, 1, 1, 0, 0, 0, 2, 0, 1, 0]


def test_the_page_begins_with_the_lead(read):
    shown = resnet(400).lead
    first = read.texts.index("The paper, reproduced")
    sentence = next(place for place, text in enumerate(read.texts) if shown.sentences[0] in text)
    effects = read.texts.index(shown.effects.title)
    assert first < sentence < effects < read.texts.index("Verdicts", effects)
    figures = [attributes["data-figure"] for _, attributes in read.elements if "data-figure" in attributes]
    assert figures[0] == shown.figure
    assert len(figures) == len(set(figures)), "each stands once"


def test_the_machinery_gives_no_verdicts_and_says_so():
    small = replace(resnet(20), statements=[], lead=None, is_small=True, summary="What was run.")
    read = Reader(page([loss_surface(), small]))
    assert "This page shows the machinery, on the digits." in read.texts
    assert "What was run." in read.texts
    assert not {"Verdicts", "holds", "does not hold"} & set(read.texts)


def test_headings_are_in_order(read):
    levels = [int(tag[1]) for tag, _ in read.elements if tag in {"h1", "h2", "h3", "h4"}]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))


def test_ids_are_unique(read):
    ids = [attributes["id"] for _, attributes in read.elements if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_same_findings_same_bytes_and_not_too_many(text):
    assert page(findings()) == text
    assert len(text.encode()) < MOST_BYTES


# ---- styles of curves -----------------------------------------------------------------------------------------------


def test_a_pair_has_one_hue_and_no_two_contestants_are_alike():
    appearance = curve_styles(resnet(3).figures[0])
    assert len({(style.colour, style.dash) for style in appearance.values()}) == len(appearance)
    for name in ("SGD", "Nesterov", "Adam", "RMSprop"):
        assert appearance[f"C-{name}"].dash == "solid"
        assert appearance[name].dash == "dash"
        assert appearance[f"C-{name}"].width > appearance[name].width
        reds = [int(appearance[each].colour.light[1:3], 16) for each in (name, f"C-{name}")]
        assert reds[0] > reds[1] or name == "Nesterov", "the plain one is lighter"
    assert appearance["SGD-BN"].colour == appearance["SGD"].colour
    assert appearance["SGD-BN"].dash == "dot"
    assert list(appearance)[:4] == ["C-SGD", "SGD", "SGD-BN", "C-SGD-BN"], "a family is together in the legend"


def contrast(one, other):
    """Returns WCAG's contrast of two colours."""

    def luminance(colour):
        channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted([luminance(one), luminance(other)])
    return (high + 0.05) / (low + 0.05)


def test_every_line_can_be_seen_on_light_and_dark():
    card = re.search(
        r"--card: light-dark\((#\w+), (#\w+)\)", files("consequent_lab.report").joinpath("page.css").read_text()
    )
    for hue in HUES:
        for colour in (hue.strong, hue.soft):
            assert contrast(colour.light, card[1]) >= 3
            assert contrast(colour.dark, card[2]) >= 3
        assert contrast(hue.strong.light, card[1]) > 1.15 * contrast(hue.soft.light, card[1])
        assert contrast(hue.strong.dark, card[2]) > 1.15 * contrast(hue.soft.dark, card[2])


def test_without_a_c_version_nothing_stands_back():
    series = [Series(name, {"a": [1.0], "b": [1.0]}) for name in ("LMS", "NLMS")]
    panel = Panel("", series, [Axis("a", "a")], [Axis("b", "b")])
    first, second = curve_styles(Figure("filters", "", "", [panel])).values()
    assert first.dash == second.dash == "solid"
    assert first.colour != second.colour


def test_variants_of_one_optimiser_alone_get_a_hue_each():
    series = [Series(name, {"a": [1.0], "b": [1.0]}) for name in ("C-SGD", "SGD", "SGD-BN")]
    panel = Panel("", series, [Axis("a", "a")], [Axis("b", "b")])
    styles = curve_styles(Figure("headline", "", "", [panel])).values()
    assert len({style.colour for style in styles}) == len({style.dash for style in styles}) == 3


def test_stages_of_one_thing_get_one_ramp_of_colours():
    series = [Series(f"iteration {n:,}", {"a": [1.0], "b": [1.0]}) for n in (20_000, 100, 3_000, 1_000)]
    panel = Panel("", series, [Axis("a", "a")], [Axis("b", "b")])
    appearance = curve_styles(Figure("norms", "", "", [panel]))
    assert list(appearance) == ["iteration 100", "iteration 1,000", "iteration 3,000", "iteration 20,000"]
    greens = [int(style.colour.light[3:5], 16) for style in appearance.values()]
    assert greens == sorted(greens, reverse=True)
    assert len(set(greens)) == 4


# ---- choices --------------------------------------------------------------------------------------------------------


def test_panels_that_offer_the_same_axes_share_a_choice():
    def panel(*columns):
        return Panel("", [], [Axis("x", "x")], [Axis(column, column) for column in columns])

    offered = choices([panel("a", "b"), panel("p", "q"), panel("a", "b"), panel("z")], "y")
    assert [[axis.column for axis in axes] for axes in offered] == [["a", "b"], ["p", "q"]]
    assert choices([panel("a", "b")], "x") == []


# ---- static figures -------------------------------------------------------------------------------------------------


def test_a_file_for_every_choice_of_axes(tmp_path):
    paths = draw(resnet(20).figures[0], tmp_path)
    stems = ["resnet20", "resnet20-accuracy", "resnet20-seconds", "resnet20-accuracy-seconds"]
    expected = sorted(f"{stem}.{kind}" for stem in stems for kind in ("png", "svg"))
    assert sorted(path.name for path in paths) == sorted(path.name for path in tmp_path.iterdir()) == expected


@pytest.mark.parametrize("finding", [loss_surface(), output_paths(), hostile()], ids=lambda finding: finding.name)
def test_static_figures_are_the_same_every_time(finding, tmp_path):
    (figure,) = finding.figures
    once, again = draw(figure, tmp_path / "once"), draw(figure, tmp_path / "again")
    assert [path.read_bytes() for path in once] == [path.read_bytes() for path in again]
    png, svg = (path.read_bytes() for path in once)
    assert png.startswith(b"\x89PNG")
    assert ElementTree.fromstring(svg).tag == "{http://www.w3.org/2000/svg}svg"
    assert b"dc:date" not in svg


def test_numbers_that_are_not_finite_are_none():
    assert Series("s", {"a": [1.0, math.nan, math.inf]}).columns == {"a": [1.0, None, None]}
    assert Table("t", ["a", "b"], [["x", math.nan]]).rows == [["x", None]]


# ---- the command and the package ------------------------------------------------------------------------------------


def command(monkeypatch, found, *arguments):
    """Runs the command with experiments that found this."""
    module = ModuleType("consequent_lab.paper.experiments")
    module.experiments = lambda: {finding.name: None for finding in found}
    module.find = lambda names, *runs: [finding for finding in found if finding.name in names]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return cli.main(["report", *map(str, arguments)])


def test_the_command_writes_page_and_figures(tmp_path, monkeypatch, capsys):
    output, figures = tmp_path / "out" / "report.html", tmp_path / "figures"
    found = [hostile(), bare()]
    assert command(monkeypatch, found, "--runs", tmp_path, "--output", output, "--figures", figures) == 0
    assert output.read_text(encoding="utf-8") == page(found)
    assert sorted(path.name for path in figures.iterdir()) == [
        f"{name}.{kind}" for name in ("begun-c", "begun-e", "begun", "hostile") for kind in ("png", "svg")
    ], "none for a figure without anything measured"
    assert "8 files" in capsys.readouterr().out


def test_the_command_says_what_is_not_measured(tmp_path, monkeypatch, capsys):
    unmeasured = replace(hostile(), statements=[Statement("", "toy", "", "", ()), *hostile().statements])
    paths = ["--runs", tmp_path, "--output", tmp_path / "report.html", "--figures", tmp_path / "figures"]
    for found, said in ((hostile(), False), (unmeasured, True)):
        assert command(monkeypatch, [found], *paths) == 0
        assert ("1 of 2 statements are not measured" in capsys.readouterr().out) is said


def test_runs_that_are_not_there_are_missed(monkeypatch, capsys):
    assert command(monkeypatch, [bare()], "--runs", "nowhere") == 1
    assert "--runs nowhere: no such folder; make the runs with `consequent reproduce all`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"output": Path("report.pdf")}, "--output must end in .html, got report.pdf"),
        ({"figures": Path(__file__)}, "--figures must be a folder"),
        ({"runs": ()}, "--runs needs at least one folder"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Report(**options)


def test_an_installed_wheel_has_template_style_and_script(tmp_path):
    assets = {
        path.name for path in files("consequent_lab.report").iterdir() if path.name.startswith(("page.", "chart."))
    }
    assert assets == {"page.py", "page.html", "page.css", "page.js", "chart.js"}
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=tmp_path, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    packed = set(zipfile.ZipFile(wheel).namelist())
    assert {"consequent_lab/paper/statements.toml", *(f"consequent_lab/report/{name}" for name in assets)} <= packed
