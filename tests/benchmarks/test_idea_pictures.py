"""The pictures of docs/idea.md: all are drawn by the script, and what is read off them is so."""

import pathlib
import re

import pytest

from benchmarks import idea_pictures

ROOT = pathlib.Path(__file__).parents[2]


def test_the_page_shows_what_the_script_draws():
    shown = re.findall(r"\]\(pictures/(.*?)\.svg\)", (ROOT / "docs" / "idea.md").read_text())
    assert sorted(shown) == sorted(idea_pictures.PICTURES)
    assert {path.stem for path in (ROOT / "docs" / "pictures").glob("*.svg")} == set(shown)


@pytest.mark.slow
def test_the_script_draws_them(tmp_path):
    idea_pictures.main(tmp_path)
    assert {path.stem for path in tmp_path.iterdir()} == set(idea_pictures.PICTURES)


@pytest.mark.slow
def test_cosines_in_a_deep_network_are_those_of_the_caption():
    (caption,) = re.findall(r"Cosines by layer: about (\S+) for backpropagation, (\S+) to (\S+) for", page())
    plain, low, high = map(float, caption)
    axes = idea_pictures.in_a_deep_network().axes[0]
    backpropagation, corrected = (line.get_ydata() for line in axes.lines)
    assert all(abs(value - plain) < 0.03 for value in backpropagation)
    assert (round(min(corrected), 1), round(max(corrected), 1)) == (low, high)


def page():
    return (ROOT / "docs" / "idea.md").read_text()
