"""A thousand grammars, a third of them nasty, in two orders against a live server, with eight plain streams beside.

    python scripts/grammar_storm.py [--grammars 1000] [--model smollm2-135m] [--tools 100]

Starts `quire serve`, and prints how much longer the streams waited for a token than without grammars (p50, p99,
longest), how many outcomes differ between the orders, and the memory of the server's processes. With `--tools` it also
asks for tool calls whose schema leaves objects open, and counts those with a key that was not declared.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import subprocess
import sys
import time

import httpx

from quire.bench.grammar_storm import Storm, grammars, resident_mib, storm

QUIET_S = 20.0


def serve(model: str) -> tuple[subprocess.Popen[bytes], str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "quire", "serve", model, "--port", str(port), "--admin-port", "0"]
    process = subprocess.Popen(command, env=os.environ, stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    while process.poll() is None:
        try:
            if httpx.get(f"{url}/ready").status_code == 200:
                return process, url
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    raise SystemExit("the server did not start")


def tell(name: str, seen: Storm, before: Storm | None, memory: float) -> None:
    line = f"{name:14} p50 {1e3 * seen.percentile(0.5):6.1f}  p99 {1e3 * seen.percentile(0.99):6.1f}  longest "
    line += f"{1e3 * seen.percentile(1.0):7.1f} ms  {memory:6.0f} MiB  {dict(sorted(seen.statuses.items()))}"
    if before is not None:
        line += f"  p99 grew by {1e3 * (seen.percentile(0.99) - before.percentile(0.99)):.1f} ms"
    print(line, flush=True)


def tool_calls(url: str, count: int) -> int:
    """How many calls have a key that their schema did not declare."""
    model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    wrong = 0
    for number in range(count):
        names = random.Random(number).sample(["city", "unit", "day", "note", "level", "code"], 3)
        properties = {name: {"type": "string", "maxLength": 12} for name in names}
        parameters = {"type": "object", "properties": properties, "required": names[:1]}
        tool = {"type": "function", "function": {"name": "look_up", "parameters": parameters}}
        body = {
            "model": model, "messages": [{"role": "user", "content": f"What is the weather, number {number}?"}],
            "tools": [tool], "tool_choice": "required", "temperature": 1.0, "seed": number, "max_tokens": 120,
            "parallel_tool_calls": False,
        }  # fmt: skip
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120).json()
        for call in answer["choices"][0]["message"]["tool_calls"]:
            wrong += not json.loads(call["function"]["arguments"]).keys() <= properties.keys()
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grammars", type=int, default=1000)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tools", type=int, default=0)
    given = parser.parse_args()
    process, url = serve(given.model)
    try:
        many = grammars(given.grammars)
        quiet = asyncio.run(storm(url, [], quiet_s=QUIET_S))
        tell("without", quiet, None, resident_mib(process.pid))
        asyncio.run(storm(url, grammars(30, seed=2)))  # what is made once is made
        tell("warmed up", quiet, None, resident_mib(process.pid))
        found = []
        for number in range(2):
            order = random.Random(number).sample(many, len(many))
            found.append(asyncio.run(storm(url, order)))
            tell(f"order {number + 1}", found[-1], quiet, resident_mib(process.pid))
        differ = [name for name, outcome in found[0].outcomes.items() if found[1].outcomes[name] != outcome]
        print(f"{len(differ)} of {len(found[0].outcomes)} outcomes differ")
        for name in differ:
            print(" ", name[:200], "|", found[0].outcomes[name][:120], "|", found[1].outcomes[name][:120])
        if given.tools:
            print(f"{tool_calls(url, given.tools)} of {given.tools} tool calls have keys that were not declared")
        return 1 if differ else 0
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    sys.exit(main())
