"""Running load: open loop (calls go out when they are due, whatever the server does) or closed (so many at a time).

Times count from when a call was due, so a generator or a server that falls behind cannot hide it. Refuses to know:
what the figures mean.
"""

from __future__ import annotations

import asyncio
import json
import resource
import time
from collections.abc import Iterable, Sized
from dataclasses import dataclass
from itertools import islice
from typing import Any

from quire.bench.load.arrivals import Call
from quire.bench.load.http import Answer, Pool
from quire.bench.load.scrape import Scrape, scrape
from quire.bench.workloads import Job
from quire.engine.request_progress import RequestProgress
from quire.types.errors import ConfigError

WORDS = ("time", "year", "people", "way", "day", "thing", "life", "child", "world", "school", "state", "family")


@dataclass(frozen=True)
class Target:
    """Which server, and how it is asked."""

    url: str
    model: str | None = None
    endpoint: str = "completions"  # or chat
    api_key: str | None = None
    metrics_url: str | None = None  # where its Prometheus metrics are; None: beside the API
    ignore_eos: bool = True
    timeout: float = 600.0
    connections: int = 1000


@dataclass
class Record:
    """One call and its answer; times in seconds after the run began."""

    due: float
    prompt: int
    wanted: int
    answer: Answer
    sent: float
    end: float
    times: list[float]

    @property
    def ok(self) -> bool:
        return self.answer.status == 200 and not self.answer.error

    @property
    def refused(self) -> bool:
        return self.answer.status in (429, 503)

    @property
    def ttft(self) -> float | None:
        return self.times[0] - self.due if self.times else None

    @property
    def tpot(self) -> float | None:
        tokens = self.answer.tokens
        return (self.times[-1] - self.times[0]) / (tokens - 1) if tokens > 1 and len(self.times) > 1 else None


@dataclass
class Phase:
    """One stretch of load."""

    name: str
    offered: float | None  # calls per second; None in a closed loop
    seconds: float
    records: list[Record]
    before: Scrape | None
    after: Scrape | None


class Load:
    """Load on one target; `async with` it."""

    def __init__(self, target: Target):
        self.target = target
        self.model = target.model or ""
        limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        if limit < target.connections + 64:
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, target.connections + 64), most))
        self._pool = Pool(target.url, api_key=target.api_key, limit=target.connections)

    async def __aenter__(self) -> Load:
        if not self.model:
            self.model = await self._first_model()
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._pool.close()

    async def open_loop(self, name: str, calls: list[Call], offered: float | None) -> Phase:
        began, before = await self._begin()
        tasks = []
        with RequestProgress(len(calls)) as progress:
            for call in calls:
                while (wait := began + call.due - time.perf_counter()) > 0:
                    await asyncio.sleep(wait)
                tasks.append(asyncio.create_task(self._one(call.job, call.due, began)))
                tasks[-1].add_done_callback(lambda _: progress.ended())
                if len(tasks) % 16 == 0:
                    await asyncio.sleep(0)  # let answers in while many are due at once
            records = await asyncio.gather(*tasks)
        return await self._end(name, offered, began, before, list(records))

    async def closed_loop(self, name: str, jobs: Iterable[Job], concurrency: int) -> Phase:
        began, before = await self._begin()
        source = iter(jobs)
        records: list[Record] = []

        async def user(progress: RequestProgress) -> None:
            for job in source:
                records.append(await self._one(job, time.perf_counter() - began, began))
                progress.ended()

        with RequestProgress(len(jobs) if isinstance(jobs, Sized) else None) as progress:
            await asyncio.gather(*(user(progress) for _ in range(concurrency)))
        return await self._end(name, None, began, before, records)

    async def warm_up(self, jobs: Iterable[Job]) -> None:
        """A few answers that are not counted: first-use costs. Fails if the server does not answer at all."""
        for job in islice(jobs, 2):
            record = await self._one(job, 0.0, time.perf_counter())
            if not record.ok and not record.refused:
                detail = record.answer.error or record.answer.body.decode("utf-8", "replace")[:500]
                raise ConfigError(f"{self.target.url} does not answer: HTTP {record.answer.status} {detail}")

    async def _begin(self) -> tuple[float, Scrape | None]:
        before = await self._scrape()
        return time.perf_counter(), before

    async def _end(
        self, name: str, offered: float | None, began: float, before: Scrape | None, records: list[Record]
    ) -> Phase:
        seconds = max((r.end for r in records), default=0.0)
        return Phase(name, offered, seconds, records, before, await self._scrape())

    async def _scrape(self) -> Scrape | None:
        return await scrape(self.target.metrics_url or f"{self.target.url.rstrip('/')}/metrics", self.target.api_key)

    async def _one(self, job: Job, due: float, began: float) -> Record:
        path, body = self._body(job)
        answer = await self._pool.send(self._pool.request(path, body), self.target.timeout)
        times = [t - began for t in answer.times]
        return Record(due, len(job.prompt), job.output_len, answer, answer.sent - began, answer.end - began, times)

    def _body(self, job: Job) -> tuple[str, bytes]:
        target = self.target
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": job.output_len,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if target.ignore_eos else {}),
        }
        if target.endpoint == "chat":
            text = " ".join(WORDS[token % len(WORDS)] for token in job.prompt)
            body["messages"] = [{"role": "user", "content": text}]
            return "/v1/chat/completions", json.dumps(body).encode()
        body["prompt"] = job.prompt
        return "/v1/completions", json.dumps(body).encode()

    async def _first_model(self) -> str:
        answer = await self._pool.send(self._pool.request("/v1/models"), 30)
        try:
            return str(json.loads(answer.body)["data"][0]["id"])
        except (ValueError, KeyError, IndexError, TypeError):
            url = self.target.url
            if answer.error:
                raise ConfigError(f"cannot reach {url} ({answer.error}); is a server running there?") from None
            if answer.status in (401, 403):
                raise ConfigError(f"{url} wants a key: set QUIRE_API_KEY") from None
            detail = f"HTTP {answer.status} {answer.body[:200].decode('utf-8', 'replace')}"
            raise ConfigError(f"{url}/v1/models names no model ({detail}); give --model") from None
