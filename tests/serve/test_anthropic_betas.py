"""Anthropic's betas through its own client: edited contexts, tools found by search, what only its servers can do."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx
import pytest
from fake_frontend import FakeFrontend

from quire.serve.anthropic.tool_search import SearchError, search
from quire.text import Tool

MODEL = FakeFrontend.model_name
HEADER = "x-quire-ignored-fields"
USER: dict[str, Any] = {"role": "user", "content": "Go."}


def tool(name: str, description: str = "", **more: Any) -> Any:
    schema = {"type": "object", "properties": {"city": {"type": "string", "description": "a place"}}}
    return {"name": name, "description": description, "input_schema": schema, **more}


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.fixture
def fake(fake_server: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=fake_server, api_key="none", max_retries=0, timeout=30)


def out_of(number: int) -> str:
    return f"out {number}".ljust(40, ".")


def used(count: int, thoughts: bool = False) -> list[Any]:
    """A conversation in which a tool was used so many times, a turn each."""
    out: list[Any] = []
    for i in range(count):
        thought = [{"type": "thinking", "thinking": f"hm {i}", "signature": "s"}] if thoughts else []
        use = {"type": "tool_use", "id": f"t{i}", "name": "look" if i % 2 else "read", "input": {"city": f"in {i}"}}
        result = {"type": "tool_result", "tool_use_id": f"t{i}", "content": out_of(i)}
        out += [USER, {"role": "assistant", "content": [*thought, use]}, {"role": "user", "content": [result]}]
        out += [{"role": "assistant", "content": f"done {i}"}]
    return [*out, USER]


def results(messages: list[dict[str, Any]]) -> list[str]:
    return [message["content"] for message in messages if message["role"] == "tool"]


def edit(fake: anthropic.Anthropic, edits: list[Any], messages: list[Any], **more: Any) -> Any:
    return fake.beta.messages.create(
        model=MODEL, max_tokens=8, messages=messages, context_management={"edits": edits},
        betas=["context-management-2025-06-27"], **more,
    )  # fmt: skip


def test_old_tool_results_are_cleared(fake: anthropic.Anthropic, fake_frontend: FakeFrontend) -> None:
    trigger, keep = {"type": "tool_uses", "value": 2}, {"type": "tool_uses", "value": 1}
    clear: Any = {"type": "clear_tool_uses_20250919", "trigger": trigger, "keep": keep}
    answer = edit(fake, [clear], used(4))
    [applied] = answer.context_management.applied_edits
    assert (applied.type, applied.cleared_tool_uses) == ("clear_tool_uses_20250919", 3)
    rendered = fake_frontend.text.rendered
    sent = rendered[-1]["messages"]
    assert results(sent)[3] == out_of(3) and not any("out" in text for text in results(sent)[:3])
    whole = next(entry["messages"] for entry in rendered[::-1] if results(entry["messages"])[:1] == [out_of(0)])
    assert applied.cleared_input_tokens == len(_prompt(whole)) - len(_prompt(sent)) != 0
    assert sent[1]["tool_calls"][0]["function"]["arguments"] == {"city": "in 0"}  # inputs stay unless asked for
    excluded = edit(fake, [clear | {"exclude_tools": ["read"], "clear_tool_inputs": ["look"]}], used(4))
    assert excluded.context_management.applied_edits[0].cleared_tool_uses == 1
    sent = fake_frontend.text.rendered[-1]["messages"]
    assert [text for text in results(sent) if "out" in text] == [out_of(0), out_of(2), out_of(3)]
    inputs = [m["tool_calls"][0]["function"]["arguments"] for m in sent if "tool_calls" in m]
    assert inputs == [{"city": "in 0"}, {}, {"city": "in 2"}, {"city": "in 3"}]


def _prompt(messages: list[dict[str, Any]]) -> str:
    return "".join(f"{m['role']}: {m['content']}\n" for m in messages)


@pytest.mark.parametrize(
    "quiet",
    [
        {},  # the default trigger is far away
        {"trigger": {"type": "tool_uses", "value": 4}},
        {"trigger": {"type": "input_tokens", "value": 100_000}},
        {"trigger": {"type": "tool_uses", "value": 1}, "clear_at_least": {"type": "input_tokens", "value": 5000}},
        {"trigger": {"type": "tool_uses", "value": 1}, "keep": {"type": "tool_uses", "value": 9}},
    ],
)
def test_nothing_is_cleared_before_its_time(
    fake: anthropic.Anthropic, fake_frontend: FakeFrontend, quiet: dict[str, Any]
) -> None:
    answer = edit(fake, [{"type": "clear_tool_uses_20250919", **quiet}], used(4))
    assert answer.context_management.applied_edits == []
    assert results(fake_frontend.text.rendered[-1]["messages"]) == [out_of(i) for i in range(4)]


def test_thoughts_of_older_turns_are_cleared(fake: anthropic.Anthropic, fake_frontend: FakeFrontend) -> None:
    def thoughts() -> list[str]:
        sent = fake_frontend.text.rendered[-1]["messages"]
        return [message["reasoning_content"] for message in sent if "reasoning_content" in message]

    kind = "clear_thinking_20251015"
    for keep, left in (({"type": "thinking_turns", "value": 2}, 2), (None, 1), ("all", 4), ({"type": "all"}, 4)):
        answer = edit(fake, [{"type": kind, **({"keep": keep} if keep else {})}], used(4, thoughts=True))
        assert thoughts() == [f"hm {i}" for i in range(4 - left, 4)]
        assert [applied.cleared_thinking_turns for applied in answer.context_management.applied_edits] == [4 - left][
            : 4 - left
        ]


def test_edits_are_told_in_streams_and_counts(fake: anthropic.Anthropic) -> None:
    clear: Any = {"type": "clear_tool_uses_20250919", "trigger": {"type": "input_tokens", "value": 1}}
    management: Any = {"edits": [clear]}
    betas: Any = ["context-management-2025-06-27"]
    with fake.beta.messages.stream(
        model=MODEL, max_tokens=8, messages=used(4), context_management=management, betas=betas
    ) as stream:
        final = stream.get_final_message()
    assert final.context_management is not None
    assert final.context_management.applied_edits[0].cleared_tool_uses == 1  # type: ignore[union-attr]
    count = fake.beta.messages.count_tokens(model=MODEL, messages=used(4), context_management=management, betas=betas)
    plain = fake.beta.messages.count_tokens(model=MODEL, messages=used(4))
    assert count.context_management is not None and plain.context_management is None
    assert count.context_management.original_input_tokens == plain.input_tokens > count.input_tokens


# ---- tools --------------------------------------------------------------------------------------------------

SEARCH: Any = {"type": "tool_search_tool_bm25_20251119", "name": "tool_search_tool_bm25"}
DEFERRED: list[Any] = [
    SEARCH,
    tool("get_weather", "The weather in a city.", defer_loading=True),
    tool("send_mail", "Sends a letter.", defer_loading=True),
]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_tool_is_found_and_called(
    fake: anthropic.Anthropic, says: Any, fake_frontend: FakeFrontend, streamed: bool
) -> None:
    says([f"Looking.{call('tool_search_tool_bm25', query='weather forecast')}", call("get_weather", city="Paris")])
    create: Any = {"model": MODEL, "max_tokens": 300, "messages": [USER], "tools": DEFERRED}
    if streamed:
        with fake.messages.stream(**create) as stream:
            answer: Any = stream.get_final_message()
    else:
        answer = fake.messages.create(**create)
    said, searched, found, called = answer.content
    assert (said.type, searched.type, found.type, called.type) == (
        "text", "server_tool_use", "tool_search_tool_result", "tool_use",
    )  # fmt: skip
    assert searched.input == {"query": "weather forecast"} and found.tool_use_id == searched.id
    assert [reference.tool_name for reference in found.content.tool_references] == ["get_weather"]
    assert (called.name, called.input, answer.stop_reason) == ("get_weather", {"city": "Paris"}, "tool_use")
    first, second = fake_frontend.text.rendered[-2:]
    assert [entry["function"]["name"] for entry in first["tools"]] == ["tool_search_tool_bm25"]
    assert second["tools"] == first["tools"]  # the prompt grows at its end only
    assert [m["role"] for m in second["messages"]] == ["user", "assistant", "tool"]
    assert "The weather in a city." in second["messages"][-1]["content"]
    assert answer.usage.output_tokens == sum(len(t) + 1 for t in (TURN_ONE, call("get_weather", city="Paris")))
    # The caller sends it all back: the tool stays known.
    says(call("get_weather", city="Rome"))
    result: Any = {"type": "tool_result", "tool_use_id": called.id, "content": "sun"}
    blocks: Any = [block.model_dump(exclude_none=True) for block in answer.content]
    more: list[Any] = [USER, {"role": "assistant", "content": blocks}, {"role": "user", "content": [result]}]
    again = fake.messages.create(model=MODEL, max_tokens=300, messages=more, tools=DEFERRED)
    assert [block.type for block in again.content] == ["tool_use"]
    sent = fake_frontend.text.rendered[-1]["messages"]
    assert [m["role"] for m in sent] == ["user", "assistant", "tool", "assistant", "tool"]
    assert "The weather in a city." in sent[2]["content"]


TURN_ONE = f"Looking.{call('tool_search_tool_bm25', query='weather forecast')}"


def test_searches_end(fake: anthropic.Anthropic, says: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.serve.anthropic.message_exchange.MAX_ROUNDS", 3)
    says(call("tool_search_tool_bm25", query="nothing of the kind"))
    answer = fake.messages.create(model=MODEL, max_tokens=5000, messages=[USER], tools=DEFERRED)
    assert answer.stop_reason == "pause_turn"
    assert sum(block.type == "tool_search_tool_result" for block in answer.content) == 3
    says(call("tool_search_tool_bm25", query="nothing of the kind"))
    cut = fake.messages.create(model=MODEL, max_tokens=120, messages=[USER], tools=DEFERRED)
    assert cut.stop_reason == "max_tokens" and cut.usage.output_tokens == 120


def test_deferred_tools_of_a_callers_own_search(
    fake: anthropic.Anthropic, says: Any, fake_frontend: FakeFrontend
) -> None:
    says(call("get_weather", city="Paris"))
    tools: list[Any] = [tool("ToolSearch", "Finds tools."), *DEFERRED[1:]]
    use: Any = {"type": "tool_use", "id": "t", "name": "ToolSearch", "input": {}}
    reference: Any = {"type": "tool_reference", "tool_name": "get_weather"}
    messages: list[Any] = [
        USER,
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [reference]}]},
    ]
    answer = fake.messages.create(model=MODEL, max_tokens=300, messages=messages, tools=tools)
    assert answer.content[0].type == "tool_use" and answer.content[0].name == "get_weather"
    rendered = fake_frontend.text.rendered[-1]
    assert [entry["function"]["name"] for entry in rendered["tools"]] == ["ToolSearch"]
    assert "The weather in a city." in rendered["messages"][-1]["content"]
    with pytest.raises(anthropic.BadRequestError, match="defer_loading"):
        fake.messages.create(model=MODEL, max_tokens=9, messages=[USER], tools=DEFERRED[1:])


WEATHER = Tool(name="get_weather", description="The weather in a city.", parameters={"properties": {"city": {}}})
MAIL = Tool(name="sendMail", description="Sends a letter.", parameters={"properties": {"to": {"description": "who"}}})
BOX = [WEATHER, MAIL, *(Tool(name=f"tool{i}", description="A tool of another kind.") for i in range(50))]


async def test_search() -> None:
    for name, query, first in (
        ("tool_search_tool_bm25", "send who", MAIL),
        ("tool_search_tool_bm25", "CITY weather", WEATHER),
        ("tool_search_tool_regex", "^get_.*", WEATHER),
        ("tool_search_tool_regex", "LETTER|none", MAIL),
    ):
        assert (await search(name, query, BOX))[0] is first
    assert len(await search("tool_search_tool_regex", "tool", BOX)) == 5
    for query, code in (("(", "invalid_pattern"), ("x" * 201, "pattern_too_long"), (7, "invalid_tool_input")):
        with pytest.raises(SearchError, match=code):
            await search("tool_search_tool_regex", query, BOX)


async def test_a_pattern_without_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.serve.anthropic.tool_search.REGEX_SECONDS", 0.3)
    slow = Tool(name="x", description="a" * 64)
    with pytest.raises(SearchError, match="unavailable"):
        await search("tool_search_tool_regex", "(a+)+b", [slow])


def test_examples_are_told(fake: anthropic.Anthropic, fake_frontend: FakeFrontend) -> None:
    shown = tool("get_weather", "The weather.", input_examples=[{"city": "Oslo"}, {"city": "Rome"}])
    fake.beta.messages.create(model=MODEL, max_tokens=9, messages=[USER], tools=[shown])
    described = fake_frontend.text.rendered[-1]["tools"][0]["function"]["description"]
    assert described.startswith("The weather.") and '{"city":"Oslo"}\n{"city":"Rome"}' in described


def test_tools_that_anthropic_defines(fake: anthropic.Anthropic, says: Any, fake_frontend: FakeFrontend) -> None:
    says(call("bash", command="ls"))
    tools: list[Any] = [
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 9000},
        {"type": "memory_20250818", "name": "memory"},
    ]
    answer = fake.beta.messages.create(model=MODEL, max_tokens=99, messages=[USER], tools=tools)
    assert answer.content[0].type == "tool_use" and answer.content[0].input == {"command": "ls"}
    told = [entry["function"] for entry in fake_frontend.text.rendered[-1]["tools"]]
    assert [entry["name"] for entry in told] == ["bash", "str_replace_based_edit_tool", "memory"]
    assert all(entry["parameters"]["properties"] for entry in told)


def test_what_only_anthropic_can_do_is_left_out_and_named(fake_server: str, fake_frontend: FakeFrontend) -> None:
    server = {"type": "url", "url": "https://example.invalid/mcp", "name": "docs"}
    body = {
        "model": MODEL, "max_tokens": 4, "messages": [USER], "mcp_servers": [server], "container": {"skills": []},
        "tools": [
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
            {"type": "mcp_toolset", "mcp_server_name": "docs"},
            {"type": "strange, \r\nx: y", "name": "z"},
            tool("mine"),
        ],
    }  # fmt: skip
    answer = httpx.post(f"{fake_server}/v1/messages", json=body, headers={"anthropic-beta": "mcp-client-2025-11-20"})
    assert answer.status_code == 200
    assert answer.headers[HEADER] == (
        "container, mcp_servers, tools[mcp_toolset], tools[strange????x:?y], tools[web_search_20250305]"
    )
    assert [entry["function"]["name"] for entry in fake_frontend.text.rendered[-1]["tools"]] == ["mine"]
    plain = httpx.post(f"{fake_server}/v1/messages", json={"model": MODEL, "max_tokens": 4, "messages": [USER]})
    assert HEADER not in plain.headers
    for missing, wrong in (("input_schema", {"name": "x"}), ("name", {"input_schema": {}})):
        answer = httpx.post(f"{fake_server}/v1/messages", json=body | {"tools": [wrong]})
        assert answer.status_code == 400 and f"tools[0].{missing}" in answer.text


def test_thoughts_are_signed_and_come_back(fake: anthropic.Anthropic, says: Any, fake_frontend: FakeFrontend) -> None:
    says("<think>Hm.</think>Sunny.", reasons=True)
    thinking: Any = {"type": "adaptive", "display": "summarized"}
    whole = fake.messages.create(model=MODEL, max_tokens=64, messages=[USER], thinking=thinking)
    with fake.messages.stream(model=MODEL, max_tokens=64, messages=[USER], thinking=thinking) as stream:
        streamed = stream.get_final_message()
    assert whole.content[0] == streamed.content[0]
    assert whole.content[0].type == "thinking" and whole.content[0].signature
    more: list[Any] = [USER, {"role": "assistant", "content": whole.content}, USER]
    fake.messages.create(model=MODEL, max_tokens=64, messages=more, thinking=thinking)
    assert fake_frontend.text.rendered[-1]["messages"][1]["reasoning_content"] == "Hm."


def test_documents_and_results_of_others_servers_are_words(
    fake: anthropic.Anthropic, fake_frontend: FakeFrontend
) -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "Grass is green."}
    document = {"type": "document", "source": source, "title": "Colours", "citations": {"enabled": True}}
    searched = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "grass"}}
    found = {"type": "web_search_tool_result", "tool_use_id": "s", "content": [{"title": "Grass", "url": "u"}]}
    messages: list[Any] = [
        {"role": "user", "content": [document, {"type": "text", "text": "Why?"}]},
        {"role": "assistant", "content": [searched, found, {"type": "text", "text": "So it is.", "citations": []}]},
        USER,
    ]
    fake.messages.create(model=MODEL, max_tokens=4, messages=messages)
    sent = fake_frontend.text.rendered[-1]["messages"]
    assert sent[0]["content"] == "Colours\nGrass is green.\nWhy?"
    assert [m["role"] for m in sent] == ["user", "assistant", "tool", "assistant", "user"]
    assert sent[1]["tool_calls"][0]["function"]["name"] == "web_search" and "Grass" in sent[2]["content"]
