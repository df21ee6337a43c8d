"""A real browser for tests of the pages: Debian's chromium (`apt-get install chromium`), or any Chrome on the path.

Where there is none, the quick suite leaves such tests out and the full one fails. QUIRE_SCREENSHOTS=folder keeps
pictures of what was seen.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
drives_a_browser = pytest.mark.slow if BROWSER is None else lambda test: test
PATIENCE = 60_000  # milliseconds
expect.set_options(timeout=PATIENCE)  # a page's own timeout does not count for it: 5 s, which busy machines exceed


@contextmanager
def launched() -> Iterator[Browser]:
    assert BROWSER is not None, "these tests drive a browser; on Debian: apt-get install chromium"
    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])


@contextmanager
def watched(browser: Browser) -> Iterator[Any]:
    """Opens pages, and checks at the end that none complained: no script error, nothing that the CSP blocked."""
    complaints: list[str] = []
    context = browser.new_context(viewport={"width": 1280, "height": 900}, device_scale_factor=1)
    context.set_default_timeout(PATIENCE)

    def opened(url: str) -> Page:
        page = context.new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda said: complaints.append(said.text) if said.type == "error" else None)
        page.goto(url)
        return page

    yield opened
    context.close()
    refusals = re.compile("Failed to load resource: the server responded with a status of 40[13]")
    assert [text for text in complaints if not refusals.match(text)] == []


def keep(page: Page, name: str, **options: Any) -> None:
    if folder := os.environ.get("QUIRE_SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"{name}.png", **options)
