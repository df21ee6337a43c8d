"""The chat page and the live view, feature by feature, in a real browser; answers are made up, so that they are
known."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from browser_pages import PATIENCE, drives_a_browser, keep
from fake_frontend import FakeFrontend
from playwright.sync_api import Page, Route, expect

from quire.serve.core.api_keys import ADMIN, INFERENCE, Key, KeyRing, digest
from quire.serve.http.server import background_server
from quire.types.membership import ReplicaView
from quire.types.serving import ServeOptions

ANSWER = """## A title

Some **bold** and *slanted* words, `inline code`, ~~gone~~, a [link](https://example.org/a), 2 * 3 * 4, snake_case_name.

- first
- second
  1. inner
- third

> quoted

| a | b |
| --- | --- |
| 1 | **2** |

```python
def f(x):
    return x ** 2  # <b>not markup</b>
```

<img src=x onerror=alert(1)> [bad](javascript:alert(1)) <script>alert(2)</script>"""


def streamed(content: str, thoughts: str = "", finish: str = "stop") -> str:
    """An answer as the server streams it, a token every three characters."""
    events: list[dict[str, Any]] = [{"choices": [{"delta": {"reasoning_content": thoughts}}]}] if thoughts else []
    for at in range(0, len(content), 3):
        piece = content[at : at + 3]
        entry = {"token": piece, "bytes": list(piece.encode()), "logprob": -0.1, "top_logprobs": []}
        events.append({"choices": [{"delta": {"content": piece}, "logprobs": {"content": [entry]}}]})
    events.append({"choices": [{"delta": {}, "finish_reason": finish}]})
    return "".join(f"data: {json.dumps({'id': 'x', **event})}\n\n" for event in events) + "data: [DONE]\n\n"


Answering = Callable[[Page, Callable[[dict[str, Any]], str]], list[dict[str, Any]]]


@pytest.fixture
def answering() -> Answering:
    """Answers requests of a page with what a function makes of their bodies; returns the bodies."""

    def answer(page: Page, make: Callable[[dict[str, Any]], str]) -> list[dict[str, Any]]:
        bodies: list[dict[str, Any]] = []

        def fulfil(route: Route) -> None:
            bodies.append(route.request.post_data_json)
            route.fulfill(content_type="text/event-stream", body=make(bodies[-1]))

        page.route("**/v1/chat/completions", fulfil)
        return bodies

    return answer


def ask(page: Page, text: str) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")
    expect(page.locator("#send")).to_be_visible()


@drives_a_browser
def test_markdown_is_drawn_and_nothing_of_it_runs(fake_server: str, open_page: Any, answering: Answering) -> None:
    page = open_page(fake_server)
    page.on("dialog", lambda dialog: pytest.fail(f"a script ran: {dialog.message}"))
    answering(page, lambda body: streamed(ANSWER, "First I think.\nThen I answer."))
    ask(page, "Show me everything")
    text = page.locator(".turn.model .text")
    for selector, words in (
        ("h4", "A title"), ("strong >> nth=0", "bold"), ("em", "slanted"), ("p code", "inline code"), ("del", "gone"),
        ("blockquote", "quoted"), ("ul > li >> nth=0", "first"), ("ul ol li", "inner"), ("th >> nth=1", "b"),
        ("td strong", "2"), ("figure figcaption span", "python"),
    ):  # fmt: skip
        expect(text.locator(selector)).to_have_text(words)
    expect(text.locator("figure pre")).to_have_text("def f(x):\n    return x ** 2  # <b>not markup</b>")
    expect(text).to_contain_text("2 * 3 * 4, snake_case_name")
    expect(text).to_contain_text("<img src=x onerror=alert(1)> [bad](javascript:alert(1)) <script>")
    assert text.locator("img, script, b").count() == 0 and text.locator("a").count() == 1
    link = text.locator("a")
    assert link.get_attribute("href") == "https://example.org/a" and "noopener" in (link.get_attribute("rel") or "")
    assert text.locator(".token").count() > 50  # still there to be asked about
    thoughts = page.locator("details.thoughts")
    expect(thoughts).to_be_visible()
    expect(thoughts.locator(".thinking")).to_be_hidden()  # folded
    thoughts.locator("summary").click()
    expect(thoughts.locator(".thinking")).to_have_text("First I think.\nThen I answer.")


@drives_a_browser
def test_copying(fake_server: str, open_page: Any, answering: Answering) -> None:
    page = open_page(fake_server)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    answering(page, lambda body: streamed(ANSWER))
    ask(page, "go")
    page.locator("figure .copy").click()
    expect(page.locator("figure .copy")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == "def f(x):\n    return x ** 2  # <b>not markup</b>"
    page.locator(".facts").get_by_role("button", name="Copy").click()
    expect(page.locator(".facts").get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == ANSWER


@drives_a_browser
def test_regenerate_edit_and_continue(fake_server: str, open_page: Any, answering: Answering) -> None:
    page = open_page(fake_server)
    said = iter(["one", "two", "three", " four"])
    bodies = answering(page, lambda body: streamed(next(said), finish="length"))
    ask(page, "first question")
    expect(page.locator(".turn.model .text")).to_have_text("one")
    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator(".turn.model .text")).to_have_text("two")
    page.get_by_role("button", name="Edit").click()
    page.get_by_label("Edit message").fill("second question")
    page.locator(".asked").get_by_role("button", name="Send").click()
    expect(page.locator(".turn.model .text")).to_have_text("three")
    expect(page.locator(".turn.user")).to_have_text("second question")
    page.get_by_role("button", name="Continue").click()
    expect(page.locator(".turn.model .text")).to_have_text("three four")
    asked = [[message["content"] for message in body["messages"]] for body in bodies]
    assert asked == [["first question"], ["first question"], ["second question"], ["second question", "three"]]
    assert bodies[3]["continue_final_message"] is True and bodies[3]["add_generation_prompt"] is False
    assert "continue_final_message" not in bodies[2]


@drives_a_browser
def test_conversations_and_settings_outlive_a_reload(
    fake_server: str, open_page: Any, answering: Answering, tmp_path: Path
) -> None:
    page = open_page(fake_server)
    answering(page, lambda body: streamed(f"**{body['messages'][-1]['content']}**", "hm"))
    ask(page, "about cats")
    page.fill("#p-system", "Be kind.")
    page.fill("#p-max_tokens", "77")
    page.click("#clear")
    ask(page, "about dogs")
    page.fill("#p-system", "Be brief.")
    page.keyboard.press("Tab")
    page.reload()
    expect(page.locator("#chats li")).to_have_count(2)
    expect(page.locator("#p-system")).to_have_value("Be brief.")
    expect(page.locator("#p-max_tokens")).to_have_value("77")
    expect(page.locator(".turn.model .text strong")).to_have_text("about dogs")
    expect(page.locator("details.thoughts")).to_be_visible()
    page.get_by_role("button", name="about cats", exact=True).click()
    expect(page.locator(".turn.model .text strong")).to_have_text("about cats")
    ask(page, "and birds")  # it goes on
    expect(page.locator(".turn.model")).to_have_count(2)
    with page.expect_download() as kept:
        page.click("#export-md")
    kept.value.save_as(tmp_path / "chat.md")
    assert (tmp_path / "chat.md").read_text().startswith("## You\n\nabout cats\n\n## Model\n\n**about cats**")
    with page.expect_download() as kept:
        page.click("#export-json")
    kept.value.save_as(tmp_path / "chat.json")
    messages = json.loads((tmp_path / "chat.json").read_text())["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2
    page.get_by_role("button", name="Delete about dogs").click()
    page.reload()
    expect(page.locator("#chats li")).to_have_count(1)


@drives_a_browser
def test_attachments_the_box_and_the_model(fake_server: str, open_page: Any, answering: Answering) -> None:
    page = open_page(fake_server)
    bodies = answering(page, lambda body: streamed("ok"))
    expect(page.locator("#status")).to_have_text(FakeFrontend.model_name)
    before = page.locator("#prompt").bounding_box()
    page.fill("#prompt", "line\n" * 12)
    after = page.locator("#prompt").bounding_box()
    assert before and after and after["height"] > before["height"] + 100
    page.locator("#file").set_input_files(
        [
            {"name": "notes.txt", "mimeType": "text/plain", "buffer": b"a ``` fence\nand text"},
            {"name": "image.bin", "mimeType": "application/octet-stream", "buffer": b"\x00\x01"},
            {"name": "long.txt", "mimeType": "text/plain", "buffer": b"x" * 600_000},
        ]
    )
    expect(page.locator(".file.error")).to_have_count(2)
    page.get_by_role("button", name="Leave out image.bin").click()
    ask(page, "Sum up")
    content = bodies[0]["messages"][-1]["content"]
    assert content == "notes.txt:\n````\na ``` fence\nand text\n````\n\nSum up"
    assert bodies[0]["model"] == FakeFrontend.model_name and page.locator(".file").count() == 0
    assert page.locator("#p-model option").count() >= 1


@drives_a_browser
def test_an_error_is_shown_and_can_be_tried_again(fake_server: str, open_page: Any, answering: Answering) -> None:
    page = open_page(fake_server)
    said = iter(['data: {"error": {"message": "the engine is tired"}}\n\n', streamed("awake")])
    bodies = answering(page, lambda body: next(said))
    ask(page, "hello")
    expect(page.get_by_role("alert").filter(has_text="tired")).to_be_visible()
    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator(".turn.model .text")).to_have_text("awake")
    assert bodies[0]["messages"] == bodies[1]["messages"]


@drives_a_browser
def test_the_page_asks_for_a_key(open_page: Any) -> None:
    secret = "user-secret-0123456789"
    keys = KeyRing([Key("user", digest(secret), frozenset({INFERENCE, ADMIN}))])
    frontend = FakeFrontend()
    with background_server(lambda: frontend, ServeOptions(port=0, grace=1), keys=keys) as url:  # type: ignore[arg-type, return-value]
        page = open_page(url)
        expect(page.locator("#keys")).to_be_visible()
        page.fill("#key-inference", secret)
        page.get_by_role("button", name="Save").click()
        expect(page.locator("#status")).to_have_text(FakeFrontend.model_name)
        docs = open_page(f"{url}/docs")
        docs.fill("#key", secret)
        docs.get_by_role("button", name="Show").click()
        expect(docs.locator(".operation").first).to_be_visible()
        docs.close()
        page.close()


@drives_a_browser
def test_the_pages_of_the_api_come_from_here(fake_server: str, open_page: Any) -> None:
    page = open_page("about:blank")
    foreign: list[str] = []
    page.on("request", lambda r: foreign.append(r.url) if not r.url.startswith(fake_server) else None)
    page.goto(f"{fake_server}/docs")
    page.fill("#filter", "/v1/chat/completions")
    operation = page.locator(".operation:visible").filter(has_text="POST").first
    operation.locator("summary").click()
    expect(operation).to_contain_text("temperature")
    expect(operation.locator("pre")).to_contain_text(f"{fake_server}/v1/chat/completions")
    assert foreign == []


@drives_a_browser
def test_a_request_is_looked_into_and_cancelled(live_server: str, open_page: Any) -> None:
    failed: list[int] = []

    def long_answer() -> None:
        body = {"messages": [{"role": "user", "content": "Count."}], "max_tokens": 7000, "ignore_eos": True}
        body |= {"model": "smollm2-135m"}
        failed.append(httpx.post(f"{live_server}/v1/chat/completions", json=body, timeout=120).status_code)

    thread = threading.Thread(target=long_answer)
    thread.start()
    page = open_page(f"{live_server}/#/live")
    page.locator("#lane-decode li button").first.click(timeout=PATIENCE)
    expect(page.locator("#request-why")).to_contain_text("prefill")
    page.click("#request-cancel")
    expect(page.locator("#request-why")).to_contain_text("cancelled")
    thread.join()
    assert failed and failed[0] >= 400
    expect(page.locator("#lane-decode li")).to_have_count(0)
    row = page.locator("#ended tbody tr").first
    expect(row).to_be_visible()
    row.get_by_role("button").click()
    expect(page.locator("#request-cancel")).to_be_disabled()
    again = open_page(f"{live_server}/#/live")  # what was before anybody looked is there at once
    expect(again.locator("#ended tbody tr").first).to_be_visible()
    expect(again.locator("#c-ttft")).to_have_attribute("data-points", re.compile("[1-9]"))


@drives_a_browser
def test_what_ended_last_stands_first(fake_server: str, open_page: Any) -> None:
    page = open_page("about:blank")
    listed = [{"id": f"chatcmpl-{name}", "ended": ended, "arrived": 1.0, "key": "open", "prompt_tokens": 3,
               "cached_tokens": 0, "output_tokens": 1, "ttft_s": 0.1, "tpot_s": None, "error": "", "finish": "stop"}
              for name, ended in (("running", None), ("first", 10.0), ("last", 30.0), ("middle", 20.0))]  # fmt: skip
    page.route("**/v1/requests?*", lambda route: route.fulfill(json={"object": "list", "data": listed}))
    page.goto(f"{fake_server}/#/live")
    expect(page.locator("#ended tbody button")).to_have_text(["last", "middle", "first"])


@drives_a_browser
def test_replicas_are_shown_where_there_are_several(fake_server: str, open_page: Any, monkeypatch: Any) -> None:
    page = open_page(f"{fake_server}/#/live")
    expect(page.locator("#tiles .tile").first).to_be_visible()
    expect(page.locator("#cluster")).to_be_hidden()
    many = [
        ReplicaView(id=f"replica-{i}", pid=i, host="h", role="both", state=s, running=i, waiting=0, restarts=0)
        for i, s in enumerate(("ready", "draining"))
    ]

    async def replicas(self: Any) -> list[ReplicaView]:
        return many

    monkeypatch.setattr("fake_frontend.FakeClient.replicas", replicas)
    expect(page.locator("#cluster-note")).to_have_text("1 of 2 ready")
    expect(page.locator("#replicas tbody tr.error")).to_contain_text("draining")
    page.close()


@drives_a_browser
@pytest.mark.parametrize(
    ("width", "scheme"),
    [
        (1400, "dark"),
        (390, "light"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1400, "light"), (390, "dark"))),
    ],
)
def test_it_fits_narrow_and_wide(
    fake_server: str, open_page: Any, answering: Answering, width: int, scheme: Any
) -> None:
    page = open_page("about:blank")
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=scheme)
    page.goto(fake_server)
    answering(page, lambda body: streamed(ANSWER, "I think."))
    ask(page, "Show me everything")
    keep(page, f"chat-{width}-{scheme}", full_page=True)
    for place, sign in (("#/live", "#tiles .tile"), ("docs", ".operation")):
        assert page.evaluate("document.documentElement.scrollWidth") <= width, "it scrolls sideways"
        page.goto(f"{fake_server}/{place}")
        expect(page.locator(sign).first).to_be_visible()
        keep(page, f"{place.strip('#/')}-{width}-{scheme}", full_page=True)
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "it scrolls sideways"


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The source of axe-core, from npm."""
    if shutil.which("npm") is None:
        pytest.skip("there is no npm here")
    folder = tmp_path_factory.mktemp("axe")
    command = ["npm", "install", "--no-audit", "--no-fund", "--loglevel=error", "axe-core@4"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
    if done.returncode:
        pytest.skip(f"npm could not fetch axe-core: {done.stderr.strip()[-300:]}")
    return (folder / "node_modules" / "axe-core" / "axe.min.js").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_serious_fault(
    fake_server: str, open_page: Any, answering: Answering, axe: str, scheme: Any
) -> None:
    page = open_page("about:blank")
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    answering(page, lambda body: streamed(ANSWER, "I think.", finish="length"))
    for place, sign in (("", "#p-model option"), ("#/live", "#tiles .tile"), ("docs", ".operation")):
        page.goto(f"{fake_server}/{place}")
        expect(page.locator(sign).first).to_be_attached()
        if not place:
            ask(page, "Show me everything")
        page.evaluate(axe)
        found = page.evaluate("axe.run()")["violations"]
        serious = [fault for fault in found if fault["impact"] in ("serious", "critical")]
        assert [(fault["id"], fault["nodes"][0]["target"]) for fault in serious] == []
