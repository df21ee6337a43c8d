"""Two coding agents' loops of 20 turns with tools, as they send them, against the real model: nothing is refused.

The model is too small to call tools of its own accord: a choice is forced where the loop needs a call.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import anthropic
import httpx
import jsonschema
import pytest
from agent_shapes import (
    CLAUDE_BEGIN,
    CLAUDE_HEADERS,
    CLAUDE_SYSTEM,
    CLAUDE_TOOLS,
    CODEX_BEGIN,
    CODEX_HEADERS,
    CODEX_TOOLS,
    claude_body,
    claude_results,
    codex_body,
    codex_history,
)
from fake_frontend import FakeFrontend

TURNS = 20


@pytest.fixture(scope="module")
def model(live_server: str) -> str:
    return str(httpx.get(f"{live_server}/v1/models").json()["data"][0]["id"])


@pytest.fixture
def http(live_server: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=str(live_server), timeout=120) as client:
        yield client


def events(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def message_of(found: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """(content, stop_reason) of a stream, put together as Anthropic's clients do."""
    blocks: list[dict[str, Any]] = []
    partial: dict[int, str] = {}
    for event in found:
        assert event["type"] != "error", event
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            block, delta = blocks[event["index"]], event["delta"]
            for name in ("text", "thinking", "signature"):
                if delta["type"] == f"{name}_delta":
                    block[name] += delta[name]
            if delta["type"] == "input_json_delta":
                partial[event["index"]] = partial.get(event["index"], "") + delta["partial_json"]
    assert found[-1]["type"] == "message_stop"
    stop = found[-2]["delta"]["stop_reason"]
    for index, text in partial.items():
        with suppress(ValueError if stop == "max_tokens" else ()):  # a call may be cut short then
            blocks[index]["input"] = json.loads(text)
    return blocks, stop


CALLED = ("Bash", "Read", "TodoWrite")
SCHEMAS = {tool["name"]: tool["input_schema"] for tool in CLAUDE_TOOLS if "input_schema" in tool}


@pytest.mark.slow
def test_claude_code(http: httpx.Client, model: str) -> None:
    """Tools called one or several at a time, answers in words between them, counts, and the reads of the cache."""
    cached = []
    probe = {"model": model, "max_tokens": 1, "messages": [{"role": "user", "content": "quota"}]}
    assert http.post("/v1/messages?beta=true", headers=CLAUDE_HEADERS, json=probe).status_code == 200
    messages = list(CLAUDE_BEGIN)
    for turn in range(TURNS):
        body = claude_body(model, messages, max_tokens=100, temperature=0)
        if turn % 7 == 6:
            body |= {"max_tokens": 8}  # in words
        elif turn == 9:
            body["tool_choice"] = {"type": "tool", "name": "mcp__docs__search"}  # though it is deferred
        else:
            name = CALLED[turn % 3]
            body["tool_choice"] = {"type": "tool", "name": name, "disable_parallel_tool_use": turn % 2 == 0}
        found = events(http.post("/v1/messages?beta=true", headers=CLAUDE_HEADERS, json=body))
        answer, stop = message_of(found)
        usage = found[0]["message"]["usage"]
        cached.append(usage["cache_read_input_tokens"] / (usage["input_tokens"] + usage["cache_read_input_tokens"]))
        assert found[-2]["context_management"] == {"applied_edits": []}
        if "tool_choice" in body:
            assert stop == "tool_use" and answer[0]["type"] == "tool_use"
            for block in answer:
                jsonschema.validate(block["input"], SCHEMAS[block["name"]])
        else:
            assert stop in ("max_tokens", "end_turn", "tool_use")
        messages += [{"role": "assistant", "content": answer}, claude_results(turn, answer)]
        if turn % 8 == 0:
            count = {name: body[name] for name in ("model", "messages", "system", "tools", "thinking")}
            counted = http.post("/v1/messages/count_tokens?beta=true", headers=CLAUDE_HEADERS, json=count)
            assert counted.json()["input_tokens"] > 100
    assert len(messages) == 1 + 2 * TURNS
    assert sum(cached[-5:]) / 5 > 0.8  # the conversation is found again, turn by turn


def test_claude_code_through_its_own_client(fake_server: str, fake_frontend: FakeFrontend, says: Any) -> None:
    """The loop again with the SDK it is built on: thoughts before calls, and all blocks sent back as they are."""
    client = anthropic.Anthropic(base_url=fake_server, api_key="none", max_retries=0)
    call = json.dumps({"name": "Bash", "arguments": {"command": "ls"}})
    messages: list[Any] = [{"role": "user", "content": "Go."}]
    for turn in range(TURNS):
        says(f"<think>{turn}</think><tool_call>{call}</tool_call>", reasons=True)
        with client.beta.messages.stream(
            model=FakeFrontend.model_name, max_tokens=150, messages=messages[-5:], tools=CLAUDE_TOOLS,  # type: ignore[arg-type]
            system=CLAUDE_SYSTEM, thinking={"type": "enabled", "budget_tokens": 1024},  # type: ignore[arg-type]
            betas=CLAUDE_HEADERS["anthropic-beta"].split(","),  # type: ignore[arg-type]
        ) as stream:  # fmt: skip
            answer = stream.get_final_message()
        assert [block.type for block in answer.content] == ["thinking", "tool_use"]
        blocks = [block.model_dump(exclude_none=True) for block in answer.content]
        messages += [{"role": "assistant", "content": blocks}, claude_results(turn, blocks)]
    sent = fake_frontend.text.rendered[-1]["messages"]
    assert [m["reasoning_content"] for m in sent if "reasoning_content" in m] == ["17", "18"]


# ---- Codex --------------------------------------------------------------------------------------------------


def output_of(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items of a stream, as Codex takes them: each when it is done."""
    assert not [event for event in found if event["type"] in ("error", "response.failed")], found[-1]
    assert found[0]["type"] == "response.created"
    assert found[-1]["type"] in ("response.completed", "response.incomplete")
    return [event["item"] for event in found if event["type"] == "response.output_item.done"]


@pytest.mark.slow
def test_codex(http: httpx.Client, model: str) -> None:
    pytest.importorskip("quire.serve.openai.custom_tools", reason="custom tools are not there yet")
    items = list(CODEX_BEGIN)
    kinds = []
    for turn in range(TURNS):
        more: dict[str, Any] = {"temperature": 0, "max_output_tokens": 100}
        if turn % 6 == 5:
            more |= {"max_output_tokens": 16, "tools": []}  # in words, as when it sums up
        elif turn % 4 == 3:
            more["tool_choice"] = {"type": "custom", "name": "apply_patch"}
        else:
            more["tool_choice"] = {"type": "function", "name": ("shell", "update_plan")[turn % 2]}
        found = events(http.post("/v1/responses", headers=CODEX_HEADERS, json=codex_body(model, items, **more)))
        output = output_of(found)
        kinds += [item["type"] for item in output]
        for item in output:
            if item["status"] != "completed":
                assert "tool_choice" not in more  # a free answer may be cut short
            elif item["type"] == "function_call":
                schema = next(tool["parameters"] for tool in CODEX_TOOLS if tool.get("name") == item["name"])
                jsonschema.validate(json.loads(item["arguments"]), schema)
            elif item["type"] == "custom_tool_call":
                assert item["input"].startswith("*** Begin Patch\n") and item["input"].endswith("*** End Patch")
        items += codex_history(turn, output)
    assert {"function_call", "custom_tool_call", "message"} <= set(kinds) and len(kinds) >= TURNS
