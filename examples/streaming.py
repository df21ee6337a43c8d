"""Tokens as they come, from a server, by OpenAI's API: an event a token, usage in the last one.

    quire serve smollm2-135m
    python examples/streaming.py [http://127.0.0.1:8000]

Needs httpx (pip install 'quire[lang]'); the openai package does the same with `stream=True`.
"""

import json
import sys

import httpx

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
body = {
    "messages": [{"role": "user", "content": "Tell me a story about a lighthouse."}],
    "max_tokens": 64,
    "temperature": 0,
    "stream": True,
    "stream_options": {"include_usage": True},
}

with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=120) as answer:
    answer.raise_for_status()
    for line in answer.iter_lines():
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        event = json.loads(line.removeprefix("data: "))
        for choice in event["choices"]:
            print(choice["delta"].get("content") or "", end="", flush=True)
        if event.get("usage"):
            print(f"\n{event['usage']['completion_tokens']} tokens")
