"""No relative link of README, CONTRIBUTING, CHANGELOG or docs/ is dead, anchors included."""

import re
from urllib.parse import unquote

import pytest
from markdown.extensions.toc import slugify_unicode
from pages import PAGES, ROOT, without_code

LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(page):
    """The anchors of a page's headings, as they are made by those who show Markdown."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.S), re.M)
    return {slugify_unicode(re.sub(r"[`*]", "", heading), "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_relative_links_lead_somewhere(page):
    dead = []
    for link in LINK.findall(without_code(page)):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = unquote(link).partition("#")
        target = (page.parent / name) if name else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            dead.append(link)
    assert dead == []


def test_dead_links_are_found(tmp_path):
    (tmp_path / "other.md").write_text("# Other\n\n## A part: `of it`\n")
    page = tmp_path / "page.md"
    page.write_text("[a](other.md#a-part-of-it) [b](other.md) [c](https://example.org) `[no](link.md)`\n")
    test_relative_links_lead_somewhere(page)
    for bad in ("[d](none.md)", "[d](other.md#none)", "[d](#none)"):
        page.write_text(bad)
        with pytest.raises(AssertionError):
            test_relative_links_lead_somewhere(page)


def test_links_exist_at_all():
    assert len(LINK.findall(without_code(ROOT / "README.md"))) > 20
