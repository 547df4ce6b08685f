"""A headless Chromium that opens pages from disk, as a reader would; tests with it are skipped where there is none."""

import os
import shutil
from contextlib import contextmanager

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium here: install chromium to test the page in it"
)

# Nothing but the page: a browser that is looked at by its own maker's services would be the only one to use a network.
OPTIONS = ["--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync"]


@contextmanager
def launched():
    """A browser."""
    as_root = ["--no-sandbox"] if os.geteuid() == 0 else []
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=[*OPTIONS, *as_root])
        yield browser
        browser.close()


def opener(browser, address):
    """Returns how to open a page, and a check that it has complained of nothing and asked for nothing but itself."""
    complaints, requests = [], []

    def open_page(**options):
        page = browser.new_context(**options).new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: complaints.append(dialog.message))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(address)
        return page

    def check():
        assert complaints == []
        assert {url for url in requests if not url.startswith("data:")} == {address}

    return open_page, check


@contextmanager
def own_pages(opening, **usual):
    """How a test opens pages of its own, by default with the usual options; they are closed and checked behind it."""
    open_page, check = opening
    pages = []

    def open_own_page(**options):
        pages.append(open_page(**(options or usual)))
        return pages[-1]

    yield open_own_page
    for page in pages:
        page.context.close()
    check()
