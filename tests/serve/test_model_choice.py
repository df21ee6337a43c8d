"""The live view of a server with several models, in a real browser."""

from __future__ import annotations

from typing import Any

import httpx
from browser_pages import PATIENCE, drives_a_browser
from fake_models import Fakes
from playwright.sync_api import expect

from quire.serve.http.server import background_server


@drives_a_browser
def test_the_page_shows_the_model_that_is_chosen(open_page: Any, default_model: object) -> None:
    with background_server(Fakes().start) as url:  # type: ignore[arg-type]
        choose(url, open_page)


def choose(url: str, open_page: Any) -> None:
    page = open_page(f"{url}/#/live")
    expect(page.locator("#models-note")).to_have_text("1 of 3 loaded", timeout=PATIENCE)
    expect(page.locator("#models button[aria-pressed=true]")).to_have_text("a")
    page.locator("#models button", has_text="b").click()
    expect(page.locator("#notice")).to_have_text("b is not loaded.", timeout=PATIENCE)
    body = {"model": "b", "messages": [{"role": "user", "content": "hello"}]}
    httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    expect(page.locator("#notice")).to_be_hidden(timeout=PATIENCE)
    expect(page.locator("#models tbody tr").nth(1)).to_contain_text("loaded")
    expect(page.locator("#p-model option", has_text="org/c")).to_have_count(1)  # the chat has a choice of its own
    page.close()
