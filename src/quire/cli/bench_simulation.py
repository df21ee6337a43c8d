"""bench calibrate, bench replay, bench sweep, bench compare: the cost model of a device, how far the simulator is off,
the highest rate that meets a service level, and two results beside each other."""

from __future__ import annotations

import asyncio
import json
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quire.cli.bench_serve import Ask, Plan
from quire.cli.options import (
    HtmlOption,
    InOption,
    JsonOption,
    OutOption,
    PrefixOption,
    with_engine_options,
    writable_path,
)
from quire.types.config import EngineOptions
from quire.types.errors import ConfigError

if TYPE_CHECKING:
    from quire.bench.result_comparison import Line

CPU_LONGEST, GPU_LONGEST = 1024, 8192  # tokens of the longest prompt
CPU_MOST, GPU_MOST = 32, 256  # sequences at once


def show(lines: list[tuple[str, ...]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    for line in lines:
        table.add_row(*line)
    Console().print(table)


def calibrate(
    *,
    engine: EngineOptions,
    longest: Annotated[
        int | None, typer.Option(min=1, help="longest prompt (default: 1024 on a CPU, 8192 on a GPU)")
    ] = None,
    most: Annotated[
        int | None, typer.Option(help="most sequences at once (default: 32 on a CPU, 256 on a GPU)")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="times that every kind of step is measured")] = 2,
    seed: Annotated[int, typer.Option(help="seed of the prompts")] = 1,
    json_: Annotated[
        Path,
        typer.Option("--json", help="write the cost model here, for `quire simulate --device`", callback=writable_path),
    ],
) -> None:
    """Measure steps of all kinds on this device and fit the cost model that `quire simulate` runs on."""
    from quire.bench.calibration import calibrate as measure
    from quire.bench.calibration import rows
    from quire.engine.link import LocalLink, open_link
    from quire.types.cost_model import write_cost_model

    with closing(open_link(engine, process=False, progress=True)) as link:
        if not isinstance(link, LocalLink):
            raise ConfigError("calibration needs the engine in this process")
        gpu = link.info.device != "cpu"
        longest = longest or (GPU_LONGEST if gpu else CPU_LONGEST)
        most = most or (GPU_MOST if gpu else CPU_MOST)
        model = measure(link, longest=longest, most=most, rounds=rounds, seed=seed)
    show([*rows(model)])
    write_cost_model(json_, model)


def replay(
    *,
    engine: EngineOptions,
    trace: Annotated[Path | None, typer.Option(help="JSON lines or CSV: see docs/scheduling.md")] = None,
    workload: Annotated[str | None, typer.Option(help="made-up traffic instead: chat, mix or conversations")] = None,
    num: Annotated[int | None, typer.Option(min=1, help="requests (default: the trace's; 1000 made up)")] = None,
    rate: Annotated[float | None, typer.Option(help="requests per second, in place of the trace's own moments")] = None,
    arrivals: Annotated[str, typer.Option(help="with a rate: poisson, gamma:SHAPE or diurnal:SECONDS")] = "poisson",
    longest: Annotated[
        int | None,
        typer.Option(min=2, help="leave out requests of more tokens: num and rate become less"),
    ] = None,
    cost_model: Annotated[
        str | None, typer.Option(help="simulate the same, too: h200, or a file that `quire bench calibrate` wrote")
    ] = None,
    seed: Annotated[int, typer.Option(help="seed of made-up traffic, and of a trace's requests at a rate")] = 0,
    json_: JsonOption = None,
) -> None:
    """Replay a trace on an engine in this process, at its moments; with a cost model, set the simulator beside it."""
    from quire.bench.trace_replay import beside, simulated
    from quire.bench.trace_replay import replay as run
    from quire.cli.simulate import traffic
    from quire.engine.link import LocalLink, open_link
    from quire.simulation.devices import load_device

    if arrivals != "poisson" and rate is None:
        raise ConfigError("arrivals has no effect without rate")
    model = load_device(cost_model) if cost_model else None
    asked = traffic(trace, workload, num, rate, arrivals, seed, 1.0)
    asked = [one for one in asked if longest is None or one.prompt + one.outputs <= longest]
    if not asked:
        raise ConfigError("longest leaves no request")
    with closing(open_link(engine, process=False, progress=True)) as link:
        if not isinstance(link, LocalLink):
            raise ConfigError("a replay needs the engine in this process")
        found = run(link, asked)
    typer.echo(f"{found['finished']} of {found['requests']} requests in {found['seconds']:.1f} s")
    told = simulated(engine, model, asked) if model is not None else None
    if told is None:
        lines = [(f"{one.name}", f"{one.measured:.4g}") for one in beside(found, found)]
        show([("figure", "measured"), *lines])
    else:
        head = ("figure", "measured", "simulated", "off")
        cells = [
            (one.name, f"{one.measured:.4g}", f"{one.simulated:.4g}", f"{one.off:+.1%}") for one in beside(found, told)
        ]
        show([head, *cells])
    if json_:
        json_.write_text(json.dumps({"measured": found, "simulated": told}, indent=1))


def compare(
    before: Annotated[str, typer.Argument(help="JSON of a run; several of the same, separated by commas")],
    after: Annotated[str, typer.Argument(help="... of another")],
    *,
    noise: Annotated[float, typer.Option(min=0, help="share by which single runs vary: no difference below it")] = 0.05,
    all_: Annotated[bool, typer.Option("--all", help="figures that are the same, too")] = False,
    check: Annotated[bool, typer.Option(help="exit with 1 where something got worse")] = False,
    html: HtmlOption = None,
) -> None:
    """Put two results beside each other: what got better or worse by more than runs vary."""
    from quire.bench.result_comparison import compare as beside
    from quire.bench.result_comparison import read_side

    sides = [read_side([Path(name) for name in side.split(",")]) for side in (before, after)]
    lines = beside(sides[0], sides[1], noise)
    if not lines:
        raise ConfigError("the two have no figures in common")
    shown = [line for line in lines if all_ or line.verdict != "same"]
    head = ("figure", "before", "after", "change", "band", "")
    show([head, *(_cells(line) for line in shown)])
    typer.echo(f"{len(lines) - sum(line.verdict != 'same' for line in lines)} of {len(lines)} figures are the same")
    if html:
        from quire.bench.html_report import bar_chart, html_page, html_table

        ratios = [(line.name, 1 + line.change) for line in shown]
        chart = bar_chart("after, as a multiple of before", "1: the same", ratios)
        html.write_text(html_page(f"{before} and {after}", [html_table([head, *map(_cells, shown)]), chart]))
    if check and any(line.verdict == "worse" for line in lines):
        raise typer.Exit(1)


def _cells(line: Line) -> tuple[str, ...]:
    values = f"{line.before:.4g}", f"{line.after:.4g}", f"{line.change:+.1%}", f"{line.band:.2g}"
    return (line.name, *values, line.verdict)


def sweep(
    url: Annotated[str, typer.Argument(help="server, any that speaks the OpenAI API")] = "http://127.0.0.1:8000",
    *,
    workload: Annotated[Ask, typer.Option(help="what is asked: see docs/bench.md")] = Ask.CHAT,
    slo: Annotated[str, typer.Option(help="chat (TTFT 500 ms), completion (100 ms) or ttft=..,tpot=.. in ms")] = "chat",
    share: Annotated[float, typer.Option(min=0, max=1, help="of requests that must meet it")] = 0.99,
    start: Annotated[float, typer.Option(help="first rate, requests per second")] = 1.0,
    factor: Annotated[float, typer.Option(help="from one rate to the next")] = 1.5,
    refine: Annotated[int, typer.Option(min=0, help="rates tried between the last that met it and the next")] = 2,
    num: Annotated[int, typer.Option(min=1, help="requests at each rate")] = 100,
    seeds: Annotated[int, typer.Option(min=1, help="runs at each rate, of other requests")] = 3,
    in_: InOption = 128,
    out: OutOption = 64,
    prefix: PrefixOption = 512,
    burstiness: Annotated[float, typer.Option(help="gamma shape of the gaps: 1 Poisson, less comes in bursts")] = 1.0,
    model: Annotated[str | None, typer.Option(help="model to ask for (default: the first the server lists)")] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar=["QUIRE_API_KEY", "OPENAI_API_KEY"], help="key to send as bearer token")
    ] = None,
    vocab: Annotated[int, typer.Option(min=1, help="token ids are drawn below this")] = 32_000,
    json_: JsonOption = None,
    html: HtmlOption = None,
) -> None:
    """Climb a ladder of rates on a running server to the highest that meets a service level."""
    from quire.bench.load.arrivals import at_rate
    from quire.bench.load.load_report import parse_slo
    from quire.bench.load.runner import Load, Phase, Target
    from quire.bench.rate_ladder import Rung, climb, highest

    if not (start > 0 and factor > 1):
        raise ConfigError("start must be more than 0, and factor more than 1")
    bound = parse_slo(slo)
    plan = Plan(workload, num, None, in_, out, prefix, vocab, 0, None, burstiness, None, [], None, 1.0)

    async def work() -> list[Rung]:
        async with Load(Target(url, model, "completions", api_key, None)) as load:
            await load.warm_up(plan.jobs(2, 999_983))

            async def measure(rate: float, seed: int) -> Phase:
                return await load.open_loop(
                    f"{rate:g} req/s", at_rate(plan.jobs(num, seed), rate, burstiness, seed), rate
                )

            return await climb(
                measure, bound, start=start, factor=factor, seeds=range(1, seeds + 1), share=share, refine=refine
            )

    rungs = asyncio.run(work())
    best = highest(rungs)
    lines: list[tuple[str, ...]] = [("req/s", "meets the SLO", "least", "goodput req/s", "")]
    for rung in sorted((rung.plain() for rung in rungs), key=lambda one: one["rate"]):
        shares = f"{rung['slo_share']:.1%}", f"{rung['slo_share_least']:.1%}"
        lines.append(
            (f"{rung['rate']:.3f}", *shares, f"{rung['goodput_req_s']:.3f}", "met" if rung["met"] else "missed")
        )
    show(lines)
    if html:
        from quire.bench.html_report import bar_chart, html_page, html_table

        plain = sorted((rung.plain() for rung in rungs), key=lambda one: one["rate"])
        bars = [(f"{one['rate']:.3f} req/s", one["goodput_req_s"]) for one in plain]
        chart = bar_chart("goodput by rate offered", "req/s", bars)
        html.write_text(html_page(f"{url}: {workload.value}, {bound}", [html_table(lines), chart]), encoding="utf-8")
    typer.echo(f"highest rate that meets {bound}: " + ("none" if best is None else f"{best:.3f} req/s"))
    if json_:
        facts = {"url": url, "workload": workload.value, "slo": str(bound), "share": share, "seeds": seeds, "num": num}
        json_.write_text(
            json.dumps({**facts, "highest_rps": best, "rungs": [rung.plain() for rung in rungs]}, indent=1)
        )


def register(app: typer.Typer) -> None:
    app.command()(compare)
    app.command()(sweep)
    app.command()(with_engine_options(positional_model=False)(calibrate))
    app.command()(with_engine_options(positional_model=False)(replay))
