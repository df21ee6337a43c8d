"""bench serve: load on a running server, and what its users would have felt."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quire.cli.options import HtmlOption, InOption, JsonOption, OutOption, PlotOption, PrefixOption
from quire.types.errors import ConfigError

if TYPE_CHECKING:
    from quire.bench.load.runner import Load, Phase
    from quire.bench.workloads import Job


class Ask(StrEnum):
    CHAT = "chat"
    FIXED = "fixed"
    SHARED_PREFIX = "shared_prefix"
    AZURE_CONV = "azure2023_conv"
    AZURE_CODE = "azure2023_code"
    MOONCAKE = "mooncake_conversation"


class Endpoint(StrEnum):
    COMPLETIONS = "completions"
    CHAT = "chat"


@dataclass(frozen=True)
class Plan:
    """How much of what is offered, and how fast."""

    workload: Ask
    num: int
    duration: float | None
    n_in: int
    n_out: int
    prefix: int
    vocab: int
    seed: int
    rate: float | None
    burstiness: float
    concurrency: int | None
    load: list[float]
    trace: Path | None
    trace_speed: float

    def jobs(self, count: int, seed: int) -> list[Job]:
        from quire.bench import workloads

        if self.workload is Ask.CHAT:
            return workloads.chat(count, seed=seed, vocab=self.vocab)
        if self.workload in (Ask.FIXED, Ask.SHARED_PREFIX):
            prefix = self.prefix if self.workload is Ask.SHARED_PREFIX else 0
            return workloads.shared_prefix(count, prefix, self.n_in, self.n_out, seed=seed, vocab=self.vocab)
        lengths = workloads.trace_like(self.workload.value, count, seed=seed)
        return [workloads.fixed(1, n_in, n_out, seed=seed + i, vocab=self.vocab)[0]
                for i, (n_in, n_out) in enumerate(lengths)]  # fmt: skip

    async def run(self, load: Load) -> list[Phase]:
        from quire.bench.load.arrivals import at_rate, read_trace

        await load.warm_up(self.jobs(2, self.seed - 1))
        if self.trace is not None:
            calls = read_trace(self.trace, limit=self.num, speed=self.trace_speed, seed=self.seed, vocab=self.vocab)
            return [await load.open_loop(self.trace.name, calls, len(calls) / (calls[-1].due or 1.0))]
        if self.rate is None and not self.load:
            at_once = self.concurrency or 16
            return [await load.closed_loop(f"{at_once} at a time", self.jobs(self.num, self.seed), at_once)]
        phases = []
        rates = {f"{self.rate:g} req/s": self.rate} if self.rate is not None else {}
        if self.load:
            jobs = self.jobs(self.num, self.seed)
            offline = await load.closed_loop("all at once", jobs, self.concurrency or len(jobs))
            done = sum(record.ok for record in offline.records)
            if not done:
                raise ConfigError("no request of the capacity run was answered; send fewer at once (--concurrency)")
            rates |= {f"{share:.0%} of capacity": share * done / offline.seconds for share in self.load}
            phases.append(offline)
        for i, (name, rate) in enumerate(rates.items(), 1):
            count = self.num if self.duration is None else max(1, round(rate * self.duration))
            calls = at_rate(self.jobs(count, self.seed + i), rate, self.burstiness, self.seed + i)
            phases.append(await load.open_loop(name, calls, rate))
        return phases


def serve(
    url: Annotated[str, typer.Argument(help="server, any that speaks the OpenAI API")] = "http://127.0.0.1:8000",
    *,
    model: Annotated[str | None, typer.Option(help="model to ask for (default: the first the server lists)")] = None,
    endpoint: Annotated[Endpoint, typer.Option(help="which API: token ids in, or chat")] = Endpoint.COMPLETIONS,
    workload: Annotated[Ask, typer.Option(help="what is asked: see docs/bench.md")] = Ask.CHAT,
    num: Annotated[int, typer.Option(min=1, help="requests (of each phase)")] = 200,
    duration: Annotated[float | None, typer.Option(help="seconds of each phase at a rate, instead of --num")] = None,
    in_: InOption = 128,
    out: OutOption = 64,
    prefix: PrefixOption = 512,
    rate: Annotated[float | None, typer.Option(help="open loop: requests per second")] = None,
    burstiness: Annotated[float, typer.Option(help="gamma shape of the gaps: 1 Poisson, less comes in bursts")] = 1.0,
    load: Annotated[
        list[float] | None,
        typer.Option(help="open loop at this share of capacity, measured first with all at once; may be repeated"),
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="closed loop: requests at a time (default: 16)")
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="replay a trace, JSON lines or CSV: see docs/bench.md")] = None,
    trace_speed: Annotated[float, typer.Option(help="replay the trace so many times as fast")] = 1.0,
    slo: Annotated[str, typer.Option(help="chat (TTFT 500 ms), completion (100 ms) or ttft=..,tpot=.. in ms")] = "chat",
    api_key: Annotated[
        str | None, typer.Option(envvar=["QUIRE_API_KEY", "OPENAI_API_KEY"], help="key to send as bearer token")
    ] = None,
    metrics_url: Annotated[str | None, typer.Option(help="the server's metrics (default: URL/metrics)")] = None,
    vocab: Annotated[int, typer.Option(min=1, help="token ids are drawn below this")] = 32_000,
    ignore_eos: Annotated[bool, typer.Option(help="generate exactly as long as the workload says")] = True,
    timeout: Annotated[float, typer.Option(help="seconds before a request counts as failed")] = 600.0,
    connections: Annotated[
        int, typer.Option(min=1, help="connections at most; calls beyond wait, and it shows")
    ] = 1000,
    seed: Annotated[int, typer.Option(help="seed of workload and arrivals")] = 1,
    json_: JsonOption = None,
    html: HtmlOption = None,
    plot: PlotOption = None,
) -> None:
    """Put load on a running server; report latencies, throughput and goodput."""
    from quire.bench.load.load_report import parse_slo, rows, summarise
    from quire.bench.load.runner import Load, Target

    bound = parse_slo(slo)
    target = Target(
        url,
        model,
        endpoint.value,
        api_key,
        metrics_url,
        ignore_eos=ignore_eos,
        timeout=timeout,
        connections=connections,
    )
    plan = Plan(
        workload, num, duration, in_, out, prefix, vocab, seed, rate, burstiness, concurrency, load or [], trace,
        trace_speed,
    )  # fmt: skip

    async def work() -> tuple[str, list[Phase]]:
        async with Load(target) as generator:
            return generator.model, await plan.run(generator)

    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        name, phases = runner.run(work())
    summaries = [summarise(phase, bound) for phase in phases]
    _show([line for summary in summaries for line in [*rows(summary), ("", "")]])
    if json_:
        facts = {"url": url, "model": name, "endpoint": endpoint.value, "workload": workload.value, "seed": seed}
        json_.write_text(json.dumps({**facts, "burstiness": burstiness, "phases": summaries}, indent=1))
    if plot or html:
        from quire.bench.html_report import html_page, html_table
        from quire.bench.load.plot import draw

        title = f"{name}: {workload.value}"
        charts = draw(phases, bound, title)
        if plot:
            plot.write_text(charts, encoding="utf-8")
        if html:
            tables = [html_table(rows(summary), head=False) for summary in summaries]
            html.write_text(html_page(title, [charts, *tables]), encoding="utf-8")


def _show(lines: list[tuple[str, str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    for line in lines:
        table.add_row(*line)
    Console().print(table)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
