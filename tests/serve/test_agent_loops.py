"""Agents as they talk to /v1/responses, in the shapes that their public sources have: many turns, no refusal."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fake_frontend import FakeFrontend

TURNS = 20
PATCH = 'start: begin end\nbegin: "*** Begin Patch" LF\nend: "*** End Patch" LF?\n\n%import common.LF\n'
SHELL = {
    "type": "object",
    "properties": {
        "command": {"type": "array", "items": {"type": "string"}},
        "workdir": {"type": "string"},
        "timeout_ms": {"type": "number"},
    },
    "required": ["command"],
    "additionalProperties": False,
}
CODEX_TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "shell", "description": "Runs a command.", "strict": False, "parameters": SHELL},
    {
        "type": "custom", "name": "apply_patch", "description": "Edits files.",
        "format": {"type": "grammar", "syntax": "lark", "definition": PATCH},
    },
    {"type": "web_search", "external_web_access": False},
]  # fmt: skip


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]


@pytest.fixture
def turns(says: Callable[..., None]) -> Callable[[int], None]:
    """What the model does in a turn: it thinks, then runs a command, edits a file, or is done."""

    def turn(number: int) -> None:
        call = {"name": "shell", "arguments": {"command": ["ls", str(number)]}}
        if number % 3 == 1:
            call = {"name": "apply_patch", "arguments": {"input": "*** Begin Patch\n*** End Patch\n"}}
        act = f"<tool_call>{json.dumps(call)}</tool_call>" if number < TURNS - 1 else "Done."
        says(f"<think>Step {number}.</think>{act}", reasons=True)

    return turn


def message(role: str, text: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


def output_for(item: dict[str, Any]) -> dict[str, Any]:
    kind = "function_call_output" if item["type"] == "function_call" else "custom_tool_call_output"
    return {"type": kind, "call_id": item["call_id"], "output": json.dumps({"output": "ok", "metadata": {}})[:12]}


def test_codex(fake_server: str, turns: Callable[[int], None], fake_frontend: FakeFrontend) -> None:
    """It keeps the conversation itself: store false, thoughts encoded, everything sent again in each turn."""
    history = [message("developer", "Be careful."), message("user", "Fix it.")]
    session = str(uuid.uuid4())
    for number in range(TURNS):
        turns(number)
        body = {
            "model": FakeFrontend.model_name, "instructions": "You are a coding agent.", "input": history[-8:],
            "tools": CODEX_TOOLS, "tool_choice": "auto", "parallel_tool_calls": False,
            "reasoning": {"effort": "medium", "summary": "auto"}, "store": False, "stream": True,
            "include": ["reasoning.encrypted_content"], "prompt_cache_key": session,
            "text": {"verbosity": "medium"}, "client_metadata": {"session": session}, "max_output_tokens": 200,
            "truncation": "auto",
        }  # fmt: skip
        headers = {"originator": "codex_cli_rs", "session_id": session, "openai-beta": "responses=experimental"}
        events = events_of(httpx.post(f"{fake_server}/v1/responses", json=body, headers=headers))
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert events[-1]["type"] == "response.completed" and done[0]["encrypted_content"]
        for item in done:
            kept = {key: value for key, value in item.items() if key not in ("id", "content")}
            history.append(kept if item["type"] == "reasoning" else {k: v for k, v in item.items() if k != "id"})
            if item["type"] in ("function_call", "custom_tool_call"):
                history.append(output_for(item))
    assert done[-1]["type"] == "message"
    calls = [item for item in history if item["type"] == "custom_tool_call"]
    assert calls and all(item["input"] == "*** Begin Patch\n*** End Patch\n" for item in calls)
    thoughts = [m.get("reasoning_content") for m in fake_frontend.text.rendered[-1]["messages"]]
    assert f"Step {TURNS - 2}." in thoughts


def test_an_agent_that_keeps_its_state_on_the_server(fake_server: str, turns: Callable[[int], None]) -> None:
    """As openai-agents does with previous_response_id, or with a conversation."""
    conversation = httpx.post(f"{fake_server}/v1/conversations", json={}).json()["id"]
    for where in ("previous_response_id", "conversation"):
        previous = conversation if where == "conversation" else None
        new: list[dict[str, Any]] = [{"role": "user", "content": "Fix it."}]
        for number in range(TURNS):
            turns(number)
            body = {"input": new, "tools": CODEX_TOOLS, "truncation": "auto", "max_output_tokens": 100, where: previous}
            answer = httpx.post(f"{fake_server}/v1/responses", json=body)
            assert answer.status_code == 200, answer.text
            response = answer.json()
            previous = response["id"] if where == "previous_response_id" else conversation
            new = [output_for(item) for item in response["output"] if item["type"].endswith("_call")]
        assert response["output"][-1]["type"] == "message"
