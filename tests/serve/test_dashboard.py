"""The dashboard: what is served, and a real browser driving it against the real model.

`browser_pages.py` says which browser.
"""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
from browser_pages import drives_a_browser, keep
from fake_frontend import FakeFrontend
from playwright.sync_api import Route, expect

from quire.serve.core.api_keys import ADMIN, INFERENCE, Key, KeyRing, digest
from quire.serve.http.server import background_server
from quire.types.serving import ServeOptions

USER, OPERATOR = "user-secret-0123456789", "admin-secret-0123456789"
BACKGROUND = "getComputedStyle(document.documentElement).backgroundColor"


def without_an_end(route: Route) -> None:
    """The model must not be done before the button is pressed."""
    route.continue_(post_data={**route.request.post_data_json, "ignore_eos": True})


@drives_a_browser
def test_chat_streams_stops_and_shows_in_the_page_map(live_server: str, open_page: Any) -> None:
    live = open_page(f"{live_server}/#/live")
    pages = live.locator("#tier-device canvas")
    expect(pages).to_have_attribute("data-used", "0")
    idle = pages.evaluate("canvas => canvas.toDataURL()")

    chat = open_page(live_server)
    expect(chat.locator("#status")).to_have_text("smollm2-135m")
    chat.route("**/v1/chat/completions", without_an_end)
    chat.fill("#p-max_tokens", "8000")
    chat.fill("#p-system", "You count without ever stopping.")
    chat.fill("#prompt", "Count from one to ten thousand, in words.")
    chat.press("#prompt", "Enter")
    tokens = chat.locator(".turn.model .token")
    expect(tokens.nth(3)).to_be_attached()
    expect(chat.locator("#stop")).to_be_visible()
    seen = tokens.count()
    expect(tokens.nth(seen + 5)).to_be_attached()  # they go on coming

    expect(pages).not_to_have_attribute("data-used", "0")
    expect(live.locator("#lane-decode li")).to_have_count(1)
    busy = pages.evaluate("canvas => canvas.toDataURL()")
    assert busy != idle, "the page map did not change"

    chat.click("#stop")
    expect(chat.locator(".turn.model .facts")).to_contain_text("stopped")
    expect(chat.locator("#send")).to_be_visible()
    ended = tokens.count()
    expect(pages).to_have_attribute("data-used", "0")  # given back
    expect(live.locator("#lane-decode li")).to_have_count(0)
    assert tokens.count() == ended
    assert live.locator("#tree svg path").count() >= 1

    tokens.nth(2).hover()
    expect(chat.locator("#tip")).to_contain_text("%")
    assert chat.locator("#tip tr").count() >= 5
    chat.get_by_role("button", name="Where did the time go?").click()
    expect(chat.locator(".why dl")).to_contain_text("prefill")
    keep(chat, "dashboard-chat")


@drives_a_browser
def test_stopping_does_not_wait_for_what_is_not_drawn_yet(live_server: str, open_page: Any) -> None:
    """Tokens may come faster than a page draws them: here all 3,000 at once."""
    page = open_page(live_server)
    expect(page.locator("#status")).to_have_text("smollm2-135m")
    entry = {"token": "a", "bytes": [97], "logprob": -0.1, "top_logprobs": []}
    event = {"id": "x", "choices": [{"delta": {"content": "a"}, "logprobs": {"content": [entry]}}]}
    answer = {"content_type": "text/event-stream", "body": f"data: {json.dumps(event)}\n\n" * 3000}
    page.route("**/v1/chat/completions", lambda route: route.fulfill(**answer))
    page.evaluate("""() => new MutationObserver((_, observer) => {
        const drawn = document.querySelectorAll(".token").length;
        if (drawn < 5) return;
        observer.disconnect();
        document.body.dataset.drawn = drawn;
        document.getElementById("stop").click();
    }).observe(document.getElementById("log"), { childList: true, subtree: true })""")
    page.fill("#prompt", "go on")
    page.press("#prompt", "Enter")
    expect(page.locator(".turn.model .facts")).to_contain_text("stopped")
    drawn = int(page.locator("body").get_attribute("data-drawn") or 0)
    assert drawn >= 5 and page.locator(".token").count() <= drawn + 1


@drives_a_browser
def test_by_keyboard_alone(live_server: str, open_page: Any) -> None:
    page = open_page(live_server)
    expect(page.locator("#status")).to_have_text("smollm2-135m")
    page.fill("#p-max_tokens", "6")
    page.focus("#prompt")
    page.keyboard.type("Say hello")
    page.keyboard.press("Enter")
    expect(page.locator(".facts")).to_contain_text("tokens/s")
    page.locator(".turn.model .text").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(page.locator(".token.at")).to_have_count(1)
    expect(page.locator("#tip")).to_be_visible()
    page.focus("#tab-chat")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#live")).to_be_visible()
    expect(page.locator("#tab-live")).to_be_focused()
    before = page.evaluate(BACKGROUND)
    page.focus("#theme")
    page.keyboard.press("Enter")
    assert page.evaluate(BACKGROUND) != before


@drives_a_browser
def test_live_view_needs_the_admin_key(open_page: Any) -> None:
    keys = KeyRing(
        [Key("user", digest(USER), frozenset({INFERENCE})), Key("operator", digest(OPERATOR), frozenset({ADMIN}))]
    )
    frontend = FakeFrontend()
    with background_server(lambda: frontend, ServeOptions(port=0, grace=1), keys=keys) as url:  # type: ignore[arg-type, return-value]
        page = open_page(f"{url}/#/live")
        expect(page.locator("#notice")).to_contain_text("admin key")
        expect(page.locator("#status")).to_have_text("a key is needed")
        page.click("#keys-open")
        page.fill("#key-inference", USER)
        page.fill("#key-admin", OPERATOR)
        page.get_by_role("button", name="Save").click()
        expect(page.locator("#lane-decode li")).to_have_count(1)
        expect(page.locator("#notice")).to_be_hidden()
        expect(page.locator("#status")).to_have_text("org/fake")
        page.click("#tab-chat")
        page.fill("#prompt", "<img src=x onerror=alert(1)> hello")
        page.press("#prompt", "Enter")
        expect(page.locator(".turn.model .text")).to_contain_text("one two three")
        expect(page.locator(".turn.user")).to_have_text("<img src=x onerror=alert(1)> hello")  # text, not markup
        assert USER not in page.url and OPERATOR not in page.url
        page.close()


def test_files_hold_no_data_and_pull_in_nothing(fake_server: str) -> None:
    with httpx.Client(base_url=fake_server) as http:
        page = http.get("/")
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
        assert page.headers["x-content-type-options"] == "nosniff"
        assert FakeFrontend.model_name not in page.text
        names = set(re.findall(r'(?:href|src)="(/dashboard/[^"]+)"', page.text))
        assert not re.search(r"<script(?![^>]*\bsrc=)|\sstyle=|\son\w+=|https?://", page.text)
        files = {name: http.get(name) for name in names}
        while (
            new := {
                f"/dashboard/{found}"
                for file in files.values()
                for found in re.findall(r'from "\./([\w.]+)"', file.text)
            }
            - files.keys()
        ):
            files |= {name: http.get(name) for name in new}
        assert len(files) >= 8
        for name, file in files.items():
            assert file.status_code == 200, name
            outside = set(re.findall(r"https?://[^\s\"'`]+", file.text)) - {"http://www.w3.org/2000/svg"}
            assert not outside, f"{name} names {outside}"
            assert http.get(name, headers={"if-none-match": file.headers["etag"]}).status_code == 304
        assert http.head("/").status_code == 200
        for path in ("/dashboard/none.js", "/dashboard/..%2Fapp.py", "/dashboard/"):
            assert http.get(path).status_code == 404
