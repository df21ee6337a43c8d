"""32 streams of many kinds, and what a client makes of them: to compare an undisturbed run with a disturbed one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 2, "maxItems": 4},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 30}, "days": {"type": "integer"}},
            "required": ["city", "days"],
        },
    },
}


def body(number: int, model: str, tokens: int) -> dict[str, Any]:
    """The request of stream `number`."""
    topic = ("rivers", "stars", "bread", "trains", "birds", "glass", "maps", "salt")[number % 8]
    asked: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": f"Tell me a long story about {topic}, part {number}."}],
        "max_tokens": tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    match number % 6:
        case 0:
            asked |= {"temperature": 0}
        case 1:
            asked |= {"temperature": 0, "response_format": _schema_format()}
        case 2:
            asked |= {"temperature": 0.9, "seed": number, "n": 2}
        case 3:
            asked |= {
                "temperature": 0.8,
                "top_p": 0.9,
                "seed": number,
                "frequency_penalty": 0.6,
                "stop": ["zzzz", "\n\n"],
            }
        case 4:
            asked |= {
                "temperature": 0,
                "tools": [TOOL],
                "tool_choice": {"type": "function", "function": {"name": "weather"}},
            }
        case 5:
            asked |= {"temperature": 0.7, "seed": number, "logprobs": True, "top_logprobs": 2, "min_tokens": 8}
    return asked


def _schema_format() -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": SCHEMA}}


async def stream(client: httpx.AsyncClient, asked: dict[str, Any], started: Callable[[], None]) -> dict[str, Any]:
    """All a client learns of one stream: text, calls, log-probabilities and end of each choice, and the usage."""
    choices: dict[int, dict[str, Any]] = {}
    usage, first = None, True
    async with client.stream("POST", "/v1/chat/completions", json=asked) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line[6:])
            assert "error" not in chunk, chunk
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                mine = choices.setdefault(choice["index"], {"text": "", "calls": "", "tokens": [], "finish": None})
                delta = choice["delta"]
                mine["text"] += delta.get("content") or ""
                for call in delta.get("tool_calls") or ():
                    mine["calls"] += (call["function"].get("name") or "") + (call["function"].get("arguments") or "")
                for one in (choice.get("logprobs") or {}).get("content") or ():
                    mine["tokens"].append((one["token"], round(one["logprob"], 4)))
                mine["finish"] = choice["finish_reason"] or mine["finish"]
                if first and (mine["text"] or mine["calls"]):
                    first = False
                    started()
    assert usage is not None, "the stream ended early"
    return {"choices": choices, "usage": (usage["prompt_tokens"], usage["completion_tokens"])}


async def streams(
    url: str, model: str, disturb: Callable[[], Awaitable[None]] | None = None, count: int = 32, tokens: int = 160
) -> list[dict[str, Any]]:
    """All of them at once; `disturb` runs when half have begun to answer."""
    begun, half = 0, asyncio.Event()

    def started() -> None:
        nonlocal begun
        begun += 1
        if begun >= count // 2:
            half.set()

    async def disturbance() -> None:
        await half.wait()
        if disturb is not None:
            await disturb()

    async with httpx.AsyncClient(
        base_url=url, timeout=httpx.Timeout(300), limits=httpx.Limits(max_connections=64)
    ) as c:
        work = [stream(c, body(number, model, tokens), started) for number in range(count)]
        *answers, _ = await asyncio.gather(*work, disturbance())
    return answers
