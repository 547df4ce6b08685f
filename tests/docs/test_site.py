"""`make docs`: the site is built without a warning, opens from disk and asks the network for nothing."""

import os
import re
import subprocess
import sys

import pytest
from chromium import launched, needs_chromium
from pages import ROOT

pytestmark = pytest.mark.slow

DESKTOP = {"viewport": {"width": 1280, "height": 800}}
PHONE = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def test_every_page_is_in_the_navigation(site):
    front = (site / "index.html").read_text()
    pages = {page.stem for page in (ROOT / "docs").glob("*.md")} | {"notebook", "playground", "report"}
    assert {name for name in pages if f'href="{name}.html"' not in front} == set()


def test_links_inside_of_the_site_lead_somewhere(site):
    for page in set(site.rglob("*.html")) - {site / "404.html"}:  # which is for servers
        without_scripts = re.sub(r"<script\b.*?</script>", "", page.read_text(), flags=re.S)
        links = re.findall(r'(?:href|src)="([^"#?]+)[^"]*"', without_scripts)
        local = {link for link in links if not re.match(r"[a-z]+:|//", link)}
        dead = [link for link in local if not (page.parent / link).exists()]
        assert dead == [], page.name


def test_public_names_are_described_and_no_markup_is_left_over(site):
    text = (site / "api.html").read_text()
    for name in ("attach.attach", "Correction", "CSGD", "CAdam", "CAdamW", "CRMSprop", "filters.apa", "paper"):
        assert f'id="consequent.{name}"' in text, name
    for name in ("attach", "foresight"):
        assert re.search(rf'id="consequent.{name}.{name}"[^>]*>\s*consequent.{name}\b', text), name
    assert not re.findall(r":\w+:<code>|\.\. math|\\frac|<blockquote>", text)


@needs_chromium
@pytest.mark.parametrize("device", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_opens_from_disk_without_a_network(site, device, scheme):
    asked, complaints = [], []
    with launched() as browser:
        page = browser.new_context(color_scheme=scheme, **device).new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        for name in ("index", "idea", "choosing", "defaults", "notebook", "api"):
            page.goto((site / f"{name}.html").as_uri())
            page.wait_for_load_state("load")
            assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), name
            shown = page.evaluate("document.body.getAttribute('data-md-color-scheme')")
            assert shown == {"light": "default", "dark": "slate"}[scheme]
    assert complaints == []
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []


@needs_chromium
def test_search_works_from_disk(site):
    with launched() as browser:
        page = browser.new_context(**DESKTOP).new_page()
        page.goto((site / "index.html").as_uri())
        page.locator(".md-search__input").click()
        page.keyboard.type("affine projection")
        found = page.locator(".md-search-result__item").first
        found.wait_for(timeout=20_000)
        assert "projection" in page.locator(".md-search-result__list").inner_text().lower()


@needs_chromium
def test_tables_fit_a_desktop(site):
    with launched() as browser:
        page = browser.new_context(**DESKTOP).new_page()
        for name in ("race", "race-tables", "defaults", "speed", "demo", "loops"):
            page.goto((site / f"{name}.html").as_uri())
            page.locator(".md-typeset__scrollwrap").first.wait_for()
            frames = "[...document.querySelectorAll('.md-typeset__scrollwrap')]"
            too_wide = f"{frames}.filter(frame => frame.scrollWidth > frame.clientWidth).map(frame => frame.innerText)"
            assert page.evaluate(too_wide) == [], name
