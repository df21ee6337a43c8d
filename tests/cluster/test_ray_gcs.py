"""Ray's control process is killed under streams: they are answered, and the server ends by itself and says why."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import psutil
import pytest
from live_server import MODEL, live_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STREAMS, TOKENS = 4, 120


async def streamed(url: str, number: int, begun: asyncio.Semaphore) -> int:
    """Tokens of an answer that was read to its end."""
    asked = {"model": MODEL, "prompt": f"Tale {number}:", "max_tokens": TOKENS, "ignore_eos": True}
    asked |= {"stream": True, "stream_options": {"include_usage": True}}
    async with (
        httpx.AsyncClient(timeout=300) as client,
        client.stream(
            "POST", f"{url}/v1/completions", json=asked | {"stream_options": {"include_usage": True}}
        ) as answer,
    ):
        assert answer.status_code == 200
        usage: dict[str, Any] = {}
        async for line in answer.aiter_lines():
            begun.release()
            if line == "data: [DONE]":
                return int(usage["completion_tokens"])
            if line.startswith("data: "):
                usage = json.loads(line[6:]).get("usage") or usage
    raise AssertionError("the stream was cut off")


def test_requests_are_finished_and_the_server_ends_and_says_why(
    default_model: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    flags = ("--port", "0", "--kv-memory", "64M", "--replicas", "2", "--grace", "120")
    with live_server(*flags, exit_code=1, leaves_s=150) as (url, _, process):
        gcs = next(one for one in psutil.Process(process.pid).children() if "gcs_server" in one.cmdline()[0])

        async def disturbed() -> list[int]:
            begun = asyncio.Semaphore(0)
            streams = [asyncio.create_task(streamed(url, number, begun)) for number in range(STREAMS)]
            for _ in range(4 * STREAMS):
                await begun.acquire()
            gcs.kill()
            return await asyncio.gather(*streams)

        assert asyncio.run(disturbed()) == [TOKENS] * STREAMS
        assert process.wait(120) == 1
    said = capfd.readouterr().err
    assert "Ray's control process (gcs_server) cannot be reached" in said
    assert said.count("Ray's control process (gcs_server) was lost: ") == 1
    assert "Traceback" not in said
