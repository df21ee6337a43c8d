"""simulate: a trace, or made-up traffic, through the real scheduler over a fitted device, without one."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec.structs import replace

from quire.cli.options import HtmlOption, JsonOption, with_autoscale_options, with_scheduler_options
from quire.types.autoscaling import AutoscaleOptions
from quire.types.config import SchedulerOptions
from quire.types.errors import ConfigError
from quire.types.option_checks import Pair

if TYPE_CHECKING:
    from quire.simulation.comparison import Cell
    from quire.simulation.traces import Arrival
    from quire.types.config import EngineOptions
    from quire.types.cost_model import CostModel

_OWN_PACE = "clients ask when they have their last answer"
_ONE_REPLICA = "it runs one replica at the loads it is given"
PAIRS = (
    Pair("startup", "no replica is started later", needs=("max_replicas", "min_replicas")),
    Pair("switch_roles", "no replica has a role", needs=("prefill_replicas",)),
    Pair("think", "only clients of a closed loop think", needs=("clients",)),
    Pair("arrivals", "a trace has moments of its own", needs=("rate", "workload", "compare")),
    Pair("loads", "nothing is compared", needs=("compare",)),
    *(Pair(name, _OWN_PACE, excludes="clients") for name in ("rate", "arrivals", "rate_scale")),
    Pair("router", "clients have a replica each", excludes="clients"),
    Pair("oracle", "name policies as srpt:oracle", excludes="compare"),
    Pair("oracle", "lengths are told, not predicted", excludes="length_predictor"),
    *(Pair(name, _ONE_REPLICA, excludes="compare") for name in ("rate", "rate_scale", "clients", "router", "replicas")),
    *(Pair(f"{kind}_replicas", _ONE_REPLICA, excludes="compare") for kind in ("min", "max", "prefill")),
)
STARTUP_S = 30.0  # that a replica takes to start, unless said otherwise
UNBOUNDED = 1_000_000_000  # requests that may wait, unless said otherwise: overload shows as waiting, not as refusals


def simulate(
    *,
    scheduling: SchedulerOptions,
    autoscaling: AutoscaleOptions,
    trace: Annotated[Path | None, typer.Option(help="JSON lines or CSV: see docs/scheduling.md")] = None,
    workload: Annotated[str | None, typer.Option(help="made-up traffic instead: chat, mix or conversations")] = None,
    num: Annotated[int | None, typer.Option(min=1, help="requests (default: the trace's; 1000 made up)")] = None,
    rate: Annotated[float | None, typer.Option(help="requests per second, in place of the trace's own moments")] = None,
    arrivals: Annotated[str, typer.Option(help="with a rate: poisson, gamma:SHAPE or diurnal:SECONDS")] = "poisson",
    clients: Annotated[int, typer.Option(min=0, help="closed loop: so many, each one request at a time")] = 0,
    think: Annotated[float, typer.Option(min=0, help="closed loop: seconds between an answer and the next")] = 0.0,
    device: Annotated[str, typer.Option(help="h200, or a file that `quire bench calibrate` wrote")] = "h200",
    replicas: Annotated[
        int, typer.Option(min=1, help="engines behind the router; at first, where they are scaled")
    ] = 1,
    prefill_replicas: Annotated[
        int, typer.Option(min=0, help="of them, those that compute prompts for the others, at first")
    ] = 0,
    switch_roles: Annotated[bool, typer.Option(help="let roles follow the load, as a server does")] = True,
    startup: Annotated[
        float | None, typer.Option(min=0, help="autoscaling: seconds that a replica takes to start (default: 30)")
    ] = None,
    router: Annotated[str, typer.Option(help="cache-aware, prefix, ...: see docs/cluster.md")] = "round-robin",
    rate_scale: Annotated[float, typer.Option(help="replay the trace so many times as fast")] = 1.0,
    kv_scale: Annotated[float, typer.Option(help="KV memory of each replica, as a multiple of the device's")] = 1.0,
    page_size: Annotated[
        int | None, typer.Option(min=1, help="tokens per KV page (default: the device file's)")
    ] = None,
    prefix_cache: Annotated[bool, typer.Option(help="share KV pages between requests with equal prefixes")] = True,
    oracle: Annotated[
        bool, typer.Option(help="tell policies how long answers become, in place of predicting it")
    ] = False,
    workers: Annotated[int | None, typer.Option(min=1, help="processes (default: one a core)")] = None,
    seed: Annotated[int, typer.Option(help="seed of made-up traffic and of the router")] = 0,
    compare: Annotated[
        str | None, typer.Option(help="policies beside each other, separated by commas; sjf:oracle is told lengths")
    ] = None,
    loads: Annotated[str, typer.Option(help="with --compare: shares of what one replica can serve")] = "0.7,0.9,1.1",
    seeds: Annotated[
        int | None,
        typer.Option(min=1, help="runs, from --seed on; figures are means (default: 1; 3 of each to compare)"),
    ] = None,
    json_: JsonOption = None,
    html: HtmlOption = None,
) -> None:
    """Simulate engines under load; report latencies, throughput and goodput."""
    given = dict(locals())
    from rich.console import Console
    from rich.table import Table

    from quire.bench.simulation_pages import comparison_html, figures_html
    from quire.engine.request_progress import RequestProgress
    from quire.simulation.devices import load_device
    from quire.simulation.figures import Targets, mean_of, rows_of, summarise
    from quire.simulation.fleet import Fleet
    from quire.simulation.fleet import simulate as run
    from quire.types.config import CacheOptions, EngineOptions

    _check(given)
    model = _sized(load_device(device), scheduling, kv_scale, page_size)
    options = EngineOptions(scheduler=scheduling, cache=CacheOptions(prefix_cache=prefix_cache))
    if compare is not None:
        numbers = range(seed, seed + (seeds or 3))
        cells = _compared(model, options, trace, workload, num, arrivals, compare, loads, numbers, workers)
        if json_:
            found = [cell._asdict() for cell in cells]
            json_.write_text(json.dumps({"device": device, "source": model.source, "cells": found}, indent=1))
        if html:
            html.write_text(comparison_html(cells), encoding="utf-8")
        return
    runs = []
    for number in range(seed, seed + (seeds or 1)):
        asked = traffic(trace, workload, num, rate, arrivals, number, rate_scale)
        scaled = autoscaling if autoscaling.autoscales else None
        if scheduling.slo_give_up and scheduling.slo_ttft is None and not any(one.ttft for one in asked):
            raise ConfigError("slo_give_up has no effect without slo_ttft: no request has a target to miss")
        begins = STARTUP_S if startup is None else startup
        roles = (prefill_replicas, switch_roles)
        fleet = Fleet(options, model, replicas, router, number, clients, think, oracle, scaled, begins, *roles)
        with RequestProgress(len(asked)) as progress:
            result = run(fleet, asked, workers=workers, told=progress.ended)
        runs.append(summarise(result, len(asked), Targets(scheduling.slo_ttft, scheduling.slo_tpot)))
    summary = mean_of(runs)
    table = Table.grid(padding=(0, 2))
    for line in rows_of(summary):
        table.add_row(*line)
    Console().print(table)
    if json_:
        facts = {"device": device, "source": model.source, "replicas": replicas, "router": router, "seed": seed}
        each = {"seeds": len(runs), "runs": runs} if len(runs) > 1 else {}
        json_.write_text(json.dumps({**facts, "scheduler": scheduling.scheduler, **summary, **each}, indent=1))
    if html:
        what = workload or (trace.name if trace else "")
        html.write_text(
            figures_html(f"{what}: {scheduling.scheduler} on {replicas} x {device}", summary), encoding="utf-8"
        )


def _check(given: Mapping[str, Any]) -> None:
    """Refuse, of all that the command was given, numbers that are none and options that would have no effect."""
    for name in ("rate", "rate_scale", "kv_scale"):
        if (value := given[name]) is not None and not 0 < value < inf:
            raise ConfigError(f"{name} must be a finite number above 0, got {value:g}")
    for name in ("think", "startup"):
        if (value := given[name]) is not None and not 0 <= value < inf:
            raise ConfigError(f"{name} must be a finite number, not negative, got {value:g}")
    scheduling, autoscaling = given["scheduling"], given["autoscaling"]
    unsaid = {name: parameter.default for name, parameter in inspect.signature(simulate).parameters.items()}
    unsaid |= {field.name: field.default for kind in (scheduling, autoscaling) for field in dataclasses.fields(kind)}
    values = {**given, **dataclasses.asdict(scheduling), **dataclasses.asdict(autoscaling)}
    said = {name: value for name, value in values.items() if value != unsaid[name]}
    for pair in PAIRS:
        if problem := pair.problem(said):
            raise ConfigError(problem)
    _check_policy(scheduling, given["oracle"])


def _check_policy(scheduling: SchedulerOptions, oracle: bool) -> None:
    """That there is such a policy, and that it looks at lengths if it is told them."""
    from quire.scheduling.policies import make_policy

    if not make_policy(scheduling).uses_lengths and oracle:
        raise ConfigError(f"oracle has no effect beside scheduler {scheduling.scheduler}: it looks at no lengths")


def _compared(
    model: CostModel,
    options: EngineOptions,
    trace: Path | None,
    workload: str | None,
    num: int | None,
    arrivals: str,
    policies: str,
    loads: str,
    seeds: range,
    workers: int | None,
) -> list[Cell]:
    from quire.engine.request_progress import RequestProgress
    from quire.simulation.comparison import Contender, compare, made_up, markdown, recorded
    from quire.simulation.figures import Targets
    from quire.simulation.traces import read_trace

    targets = Targets(options.scheduler.slo_ttft, options.scheduler.slo_tpot)
    if (trace is None) == (workload is None):
        raise ConfigError("say either trace or workload")
    if workload is not None:
        work = made_up(workload, targets, arrivals, num or 1000)
    else:
        assert trace is not None
        work = recorded(trace.stem, read_trace(trace), targets, arrivals, num or 1000)
    contenders = [Contender(name.removesuffix(":oracle"), name.endswith(":oracle")) for name in policies.split(",")]
    for contender in contenders:
        _check_policy(options.but(scheduler=contender.policy).scheduler, contender.oracle)
    try:
        shares = [float(load) for load in loads.split(",")]
    except ValueError:
        shares = []
    if not shares or not all(0 < share < inf for share in shares):
        raise ConfigError(f"loads are numbers above 0, separated by commas, got {loads!r}")
    with RequestProgress(len(shares) * len(contenders) * len(seeds), what="runs") as progress:
        cells = compare(
            model, [work], shares, contenders, list(seeds), options=options, workers=workers, told=progress.ended
        )
    typer.echo(markdown(cells))
    return cells


def traffic(
    trace: Path | None,
    workload: str | None,
    num: int | None,
    rate: float | None,
    kind: str,
    seed: int,
    scale: float,
) -> list[Arrival]:
    from quire.simulation.synthetic import resampled, synthetic
    from quire.simulation.traces import read_trace

    if (trace is None) == (workload is None):
        raise ConfigError("say either trace or workload")
    if workload is not None:
        return synthetic(workload, num or 1000, (1.0 if rate is None else rate) * scale, seed, kind)
    assert trace is not None
    found = read_trace(trace, limit=num if rate is None else None)
    if rate is not None:
        return resampled(found, num or len(found), rate * scale, seed, kind)
    return [one._replace(at=one.at / scale) for one in found] if scale != 1 else found


def _sized(model: CostModel, scheduling: SchedulerOptions, kv_scale: float, page_size: int | None) -> CostModel:
    """The device, with as much KV memory and such limits as were asked for."""
    machine = model.machine
    size = page_size or machine.page_size
    return replace(
        model,
        machine=replace(
            machine,
            pages=max(1, int(machine.pages * machine.page_size * kv_scale) // size),
            page_size=size,
            slots=scheduling.max_seqs or machine.slots,
            max_batch_tokens=scheduling.max_batch_tokens or machine.max_batch_tokens,
            step_target=machine.step_target if scheduling.step_target is None else scheduling.step_target,
        ),
    )


def register(app: typer.Typer) -> None:
    app.command()(with_scheduler_options(max_waiting=UNBOUNDED)(with_autoscale_options()(simulate)))
