"""An agent that calls a tool, over a server: its session keeps the conversation's KV pages while the tool runs.

    quire serve smollm2-135m
    python examples/agent.py [http://127.0.0.1:8000]

Needs httpx (pip install 'quire[lang]').
"""

import json
import sys
from typing import Any

import httpx

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather in a city now.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "enum": ["Paris", "Oslo", "Lima"]}},
                "required": ["city"],
            },
        },
    }
]


def weather(city: str) -> dict[str, Any]:
    """A real tool would ask somebody, and take its time: that is what the session is for."""
    return {"city": city, "celsius": {"Paris": 18, "Oslo": 4, "Lima": 21}[city]}


def ask(server: httpx.Client, messages: list[dict[str, Any]], **more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    session = {"session_id": "trip-1", "session_ttl": 120}
    body = {"messages": messages, "tools": TOOLS, "temperature": 0, "max_tokens": 64, **session, **more}
    answer = server.post("/v1/chat/completions", json=body).raise_for_status().json()
    return answer["choices"][0]["message"], answer["usage"]


url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
with httpx.Client(base_url=url, timeout=120) as server:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "How warm is it in Oslo?"}]
    for choice in ("required", "auto"):  # the first turn must call the tool, the second may
        message, usage = ask(server, messages, tool_choice=choice, parallel_tool_calls=False)
        messages.append(message)
        if message["content"]:
            print(message["content"])
        for call in message.get("tool_calls") or []:
            arguments = json.loads(call["function"]["arguments"])
            result = weather(**arguments)
            print(f"weather({arguments['city']}) = {result['celsius']} degrees")
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": json.dumps(result)})
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    print(f"{cached} of {usage['prompt_tokens']} prompt tokens of the last turn were in the cache")
