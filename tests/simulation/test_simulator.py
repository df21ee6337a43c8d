"""The simulator: the real engine on a virtual clock, traces, traffic, fleets, and what `quire simulate` writes."""

import json
import math
import re
import sys
from itertools import islice, pairwise
from random import Random
from statistics import mean, median, pstdev

import msgspec
import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from quire.cli.main import app
from quire.simulation import fleet as fleet_module
from quire.simulation.cost_fit import Measured, errors, fit
from quire.simulation.devices import load_device
from quire.simulation.figures import Targets, summarise
from quire.simulation.fleet import Fleet, simulate
from quire.simulation.replica import START, Replica
from quire.simulation.simulated_executor import SimulatedExecutor
from quire.simulation.synthetic import arrivals, resampled, synthetic
from quire.simulation.traces import Arrival, read_trace
from quire.types.clock import Clock
from quire.types.config import EngineOptions
from quire.types.cost_model import CostModel, Machine, Rates, StepWork, read_cost_model, work_of, write_cost_model
from quire.types.errors import ConfigError
from quire.types.plan import Row, StepPlan

RATES = Rates(base=0.01, tokens=1e-4, beyond=2e-4, rows=1e-3, context=1e-6, pairs=1e-8)
MACHINE = Machine(pages=200, slots=8, max_model_len=4096, max_batch_tokens=256, depth=1, page_size=16)
MODEL = CostModel("test", "none", "made up", 64, RATES, MACHINE)


def with_machine(**machine):
    return replace(MODEL, machine=replace(MACHINE, **machine))


def replica(model=MODEL, **options):
    return Replica(EngineOptions.of(**options), model)


def served(trace, model=MODEL, **options):
    one = replica(model, **options)
    for number, arrival in enumerate(trace):
        one.arrives(arrival, number)
    one.run()
    return one


def test_a_request_alone_takes_what_the_cost_model_says():
    one = served([Arrival(0.5, 100, 3)])
    first = MODEL.seconds(StepWork(tokens=100, rows=1, pairs=100 * 101 / 2))
    second, third = (MODEL.seconds(StepWork(tokens=1, rows=1, context=c)) for c in (101, 102))
    rows = one.result().rows
    assert rows["ttft"][0] == pytest.approx(first)
    assert rows["ttlt"][0] == pytest.approx(first + second + third)
    assert one.result().gaps.spread()["mean"] == pytest.approx((second + third) / 2)
    one.core.scheduler.check()


def test_gaps_are_those_of_each_answer_whoever_draws_beside_it():
    """Answers come and go, one is preempted; nothing is kept of them."""
    one = served([Arrival(0.02 * i, 16, 40 + 7 * i) for i in range(8)], with_machine(pages=20))
    result = one.result()
    between = sum(last - first for first, last in zip(result.rows["ttft"], result.rows["ttlt"], strict=True))
    assert result.preemptions
    assert sum(result.gaps.counts.values()) == sum(result.rows["outputs"]) - 8
    assert result.gaps.total == pytest.approx(between)
    assert not one.recorder._drawing and not one.recorder._drew


def test_a_request_that_arrives_during_a_step_waits_for_its_end():
    one = served([Arrival(0.0, 256, 1), Arrival(0.001, 16, 1)])
    whole = MODEL.seconds(StepWork(tokens=256, rows=1, pairs=256 * 257 / 2))
    assert one.result().rows["wait"][1] == pytest.approx(whole - 0.001)


def test_steps_in_flight_overlap_with_planning():
    deep = with_machine(depth=2)
    one = served([Arrival(0.0, 16, 20), Arrival(0.0, 16, 20)], deep)
    result = one.result()
    overrun = MODEL.seconds(StepWork(tokens=2, rows=2, context=80))  # a step was in flight when both had ended
    assert result.busy - overrun <= result.end - START < result.busy  # the device never waited for a plan


def test_equal_blocks_are_prefix_hits_and_others_are_not():
    blocks = [(1, 2, 3), (1, 2, 4), (1, 5, 3), (9, 2, 3)]
    trace = [Arrival(float(i), 96, 2, ids, 32) for i, ids in enumerate(blocks)]
    result = served(trace).result()
    assert result.cached_tokens == 64 + 32 + 0


def test_ids_of_blocks_may_be_large():
    """Those of made-up conversations, and of a trace that comes again, are beyond 32 bits."""
    one = served(synthetic("conversations", 40, 2.0, 0), with_machine(pages=4000, max_model_len=65536))
    assert one.result().cached_tokens > 0 and not one.result().lost


def test_what_overflows_memory_is_preempted_and_ends():
    small = with_machine(pages=24)
    one = served([Arrival(0.0, 60, 60) for _ in range(6)], small)
    result = one.result()
    assert len(result.rows["ttft"]) == 6 and result.preemptions > 0
    assert list(result.rows["outputs"]) == [60.0] * 6


def test_requests_that_never_fit_are_refused_by_name():
    result = served([Arrival(0.0, 5000, 2), Arrival(0.0, 50, 2)]).result()
    assert sum(result.refused.values()) == 1 and len(result.rows["ttft"]) == 1


def test_a_replay_is_the_same_and_workers_change_nothing():
    trace = synthetic("mix", 40, 60.0, seed=3, kind="gamma:0.3")
    trace = [one._replace(prompt=min(one.prompt, 900)) for one in trace]
    for router in ("round-robin", "prefix"):
        fleet = Fleet(EngineOptions(), MODEL, replicas=3, router=router, seed=1)
        found = [summarise(simulate(fleet, trace, workers=n), 40, Targets(1.0)) for n in (1, 1, 2)]
        assert found[0] == found[1]
        assert _close(found[0], found[2])


def _close(one, two):
    """Equal but for the order of sums."""
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(_close(one[key], two[key]) for key in one)
    return one == (pytest.approx(two, rel=1e-9) if isinstance(two, float) else two)


def test_a_closed_loop_never_has_more_under_way_than_clients():
    one = replica()
    one.close_loop(iter([(Arrival(0.0, 20, 4), i) for i in range(30)]), 3, 0.25)
    most, step = 0, one.core.step

    def watched():
        nonlocal most
        most = max(most, len(one.core.scheduler.sequences.requests))
        return step()

    one.core.step = watched
    one.run()
    rows = one.result().rows
    assert len(rows["ttft"]) == 30 and most == 3
    assert one.result().end - START > 9 * 0.25


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "arrival_s,input_tokens,output_tokens,tenant,ttft_s\n7.5,100,5,x,0.5\n7.0,200,6,y,\n"),
        (
            "a.jsonl",
            '{"arrival_s":7.5,"input_tokens":100,"output_tokens":5,"tenant":"x","ttft_s":0.5}\n\n'
            '{"arrival_s":7.0,"input_tokens":200,"output_tokens":6,"tenant":"y"}\n',
        ),
    ],
)
def test_traces(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    assert read_trace(tmp_path / name) == [
        Arrival(0.0, 200, 6, tenant="y"),
        Arrival(0.5, 100, 5, tenant="x", ttft=0.5),
    ]


def test_public_traces_by_their_own_names(tmp_path):
    (tmp_path / "azure.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.4799600,8,8\n"
    )
    (tmp_path / "mooncake.jsonl").write_text(
        '{"timestamp": 1000, "input_length": 1100, "output_length": 4, "hash_ids": [0, 7, 9]}\n'
    )
    assert read_trace(tmp_path / "azure.csv") == [Arrival(0.0, 4808, 10), Arrival(pytest.approx(0.5), 8, 8)]
    assert read_trace(tmp_path / "mooncake.jsonl") == [Arrival(0.0, 1100, 4, (0, 7, 9), 512)]


@pytest.mark.parametrize("cell", ['"[3, 0]"', '"3,0"', "3 0", "[3 0]"])
def test_blocks_in_a_table(tmp_path, cell):
    (tmp_path / "a.csv").write_text(f"arrival_s,input_tokens,output_tokens,blocks_64\n0,128,5,{cell}\n1,10,5,\n")
    assert read_trace(tmp_path / "a.csv") == [Arrival(0.0, 128, 5, (3, 0), 64), Arrival(1.0, 10, 5, (), 64)]


GOOD = {"arrival_s": 0, "input_tokens": 10, "output_tokens": 4}


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ([1, 2, 3], r"must be a JSON object, got \[1, 2, 3\]"),
        ({"arrival_s": 0, "input_tokens": 10}, "has no output_tokens, output_length or GeneratedTokens"),
        (GOOD | {"arrival_s": math.nan}, "arrival_s must be a finite number, got nan"),
        (GOOD | {"arrival_s": math.inf}, "arrival_s must be a finite number, got inf"),
        (GOOD | {"arrival_s": "noon"}, "arrival_s must be a finite number, got 'noon'"),
        (GOOD | {"input_tokens": -1}, "input_tokens must not be negative, got -1"),
        (GOOD | {"output_tokens": [4]}, r"output_tokens must be a finite number, got \[4\]"),
        (GOOD | {"input_tokens": 10**400}, "input_tokens must be a finite number, got 1000"),
        (GOOD | {"ttft_s": -1}, "ttft_s must not be negative"),
        (GOOD | {"tpot_s": math.nan}, "tpot_s must be a finite number"),
        (GOOD | {"hash_ids": ["a"]}, r"hash_ids must be whole numbers from 0 on, got \['a'\]"),
        (GOOD | {"hash_ids": [-1]}, "hash_ids must be whole numbers from 0 on"),
        (GOOD | {"hash_ids": 5}, "hash_ids must be whole numbers from 0 on"),
        (GOOD | {"blocks_512": "1 x"}, "blocks_512 must be whole numbers from 0 on"),
        (GOOD | {"blocks_0": [1]}, "column 'blocks_0' must say how many tokens a block has"),
        ({"TIMESTAMP": "noon", "ContextTokens": 1, "GeneratedTokens": 1}, "TIMESTAMP must be a date and a time"),
        ({"logger": "quire", "prompt_tokens": 1, "output_tokens": 1}, "time must be a date and a time, got None"),
    ],
    ids=str,
)
def test_a_line_that_cannot_be_read_is_named(tmp_path, line, problem):
    (tmp_path / "a.jsonl").write_text(f"{json.dumps(GOOD)}\n\n{json.dumps(line)}\n")
    with pytest.raises(ConfigError, match=f"trace .*a.jsonl: line 3: {problem}"):
        read_trace(tmp_path / "a.jsonl")


def test_lines_that_are_no_rows_are_named(tmp_path):
    (tmp_path / "a.csv").write_text("arrival_s,input_tokens,output_tokens,blocks_512\n0,9,5,\n0,9,5,[1,2]\n")
    with pytest.raises(ConfigError, match="line 3: has more cells than there are columns"):
        read_trace(tmp_path / "a.csv")
    (tmp_path / "a.jsonl").write_text('{"arrival_s": 0,\n')
    with pytest.raises(ConfigError, match=r"line 1: is not JSON: .* at column"):
        read_trace(tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl").write_bytes(b"\xff\n")
    with pytest.raises(ConfigError, match=r"cannot read the trace .*utf-8"):
        read_trace(tmp_path / "a.jsonl")


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "arrival_s,input_tokens,output_tokens\nx,1,2\n"])
def test_traces_that_cannot_be_read(tmp_path, text):
    (tmp_path / "bad.csv").write_text(text)
    with pytest.raises(ConfigError, match="trace"):
        read_trace(tmp_path / "bad.csv")


def test_arrivals_have_their_rate_and_burstiness():
    def gaps(kind):
        times = list(islice(arrivals(kind, 20.0, 1), 20000))
        return [b - a for a, b in pairwise([0.0, *times])]

    for kind, variation in (("poisson", 1.0), ("gamma:0.25", 2.0), ("gamma:4", 0.5)):
        found = gaps(kind)
        assert mean(found) == pytest.approx(1 / 20, rel=0.06)
        assert pstdev(found) / mean(found) == pytest.approx(variation, rel=0.06)
    wave = list(islice(arrivals("diurnal:100", 20.0, 1), 20000))
    early, late = (sum(low <= t % 100 < low + 50 for t in wave) for low in (0, 50))
    assert early > 2 * late and len(wave) / wave[-1] == pytest.approx(20, rel=0.05)


@pytest.mark.parametrize("kind", ["sometimes", "gamma", "gamma:0", "diurnal:x", "poisson:2"])
def test_arrivals_that_make_no_sense(kind):
    with pytest.raises(ConfigError, match="arrivals"):
        next(arrivals(kind, 1.0, 0))


def test_a_stretch_of_a_trace_keeps_its_requests_in_order():
    trace = [Arrival(float(i), i + 1, 1) for i in range(100)]
    found = resampled(trace, 10, 50.0, seed=4)
    sizes = [one.prompt for one in found]
    assert sizes == list(range(sizes[0], sizes[0] + 10)) and found != resampled(trace, 10, 50.0, seed=5)


def test_a_trace_comes_again_with_other_content_where_more_is_asked_for_than_it_has():
    trace = [Arrival(float(i), 64, 2, (2 * i, 2 * i + 1), 32) for i in range(7)]
    found = resampled(trace, 20, 5.0, seed=3)
    assert len(found) == 20 and [one.at for one in found] == sorted(one.at for one in found)
    assert len({block for one in found for block in one.blocks}) == 2 * 20, "a repetition finds nothing in the cache"


def test_the_fit_finds_the_rates_that_steps_were_made_with(tmp_path):
    rng = Random(1)
    works = [
        StepWork(rng.randrange(1, 600), rng.randrange(1, 60), rng.randrange(90000), *(rng.random() * 1e6 for _ in "ab"))
        for _ in range(400)
    ]
    asked = msgspec.structs.replace(RATES, context_pairs=3e-8)
    steps = [Measured([work], asked.seconds(work, 64) * rng.uniform(0.98, 1.02)) for work in works]
    knee, rates = fit(steps)
    assert knee == 64
    for name in ("base", "tokens", "beyond", "context", "pairs", "context_pairs"):
        assert getattr(rates, name) == pytest.approx(getattr(asked, name), rel=0.15), name
    assert errors(steps, knee, rates)["p90"] < 0.03
    write_cost_model(tmp_path / "m.json", MODEL)
    assert read_cost_model(tmp_path / "m.json") == MODEL
    with pytest.raises(ConfigError, match="too few"):
        fit(steps[:3])


def test_pairs_with_context_cost_as_others_where_none_were_measured():
    rng = Random(2)
    works = [StepWork(rng.randrange(1, 600), 1, 0, rng.random() * 1e6) for _ in range(100)]
    steps = [Measured([work], MODEL.seconds(work)) for work in works]
    knee, rates = fit(steps)
    assert rates.context_pairs is None and errors(steps, knee, rates)["p90"] < 0.01
    within, behind = StepWork(100, 1, 0, 5e5), StepWork(100, 1, 0, 0.0, 5e5)
    assert rates.seconds(within, knee) == rates.seconds(behind, knee) > rates.seconds(StepWork(100, 1), knee)


def test_a_step_attends_within_its_rows_and_to_what_was_there_before():
    rows = [Row(slot=0, start=96, count=10), Row(slot=1, start=0, count=4), Row(slot=2, start=7, count=1)]
    assert work_of(rows) == StepWork(tokens=15, rows=3, context=8, pairs=55 + 10, context_pairs=960)


def test_noise_does_not_pull_rates_down():
    rng = Random(3)
    works = [[StepWork(rng.randrange(1, 600), 1, rng.randrange(90000)) for _ in range(4)] for _ in range(400)]
    measured = [Measured(row, sum(map(MODEL.seconds, row)) * rng.choice([0.6, 1.4])) for row in works]
    knee, rates = fit(measured)
    assert abs(errors(measured, knee, rates)["total"]) < 0.02


def test_while_a_step_is_launched_that_is_not_captured_nothing_else_is_noticed():
    machine = msgspec.structs.replace(MODEL.machine, captured=[(64, 8)], launch=0.5, depth=2)
    clock = Clock(1.0)
    executor = SimulatedExecutor(msgspec.structs.replace(MODEL, machine=machine), clock, {})
    answer, prompt = [Row(slot=0, start=5, count=1)], Row(slot=1, start=0, count=60)
    for step, rows in enumerate((answer, [prompt])):  # each one launch
        executor.submit(StepPlan(step, rows=rows)).result()
    began = clock.now
    early = executor.submit(StepPlan(2, rows=answer))
    assert clock.now == began
    late = executor.submit(StepPlan(3, rows=[*answer, msgspec.structs.replace(prompt, count=100)]))
    assert clock.now == began + 0.5
    early.result()
    assert clock.now == began + 0.5, "it ended long before"
    late.result()
    assert clock.now == began + 0.5, "the device had done what was launched meanwhile"


def test_captured_steps_cost_their_padding():
    sizes = [(128, 8), (256, 8), (256, 64), (512, 64)]
    padding = msgspec.structs.replace(MODEL, machine=msgspec.structs.replace(MODEL.machine, captured=sizes))

    def plain(tokens, rows):
        return MODEL.seconds(StepWork(tokens, rows, 100, 10.0))

    for work, tokens in [((70, 2), 128), ((128, 7), 128), ((128, 8), 128), ((130, 20), 256), ((90, 9), 256),
                         ((300, 3), 512), ((500, 64), 500), ((600, 1), 600), ((70, 70), 70)]:  # fmt: skip
        assert padding.seconds(StepWork(*work, 100, 10.0)) == plain(tokens, work[1]), work


def test_rates_are_never_negative():
    rng = Random(2)
    works = [StepWork(rng.randrange(1, 600), 1, 0, 0.0) for _ in range(100)]
    _, rates = fit([Measured([work], max(1e-4, 0.05 - 5e-5 * work.tokens)) for work in works])  # more is quicker: noise
    assert min(rates.base, rates.tokens, rates.beyond, rates.rows) >= 0


@pytest.mark.parametrize(
    ("part", "field", "value"),
    [
        *(("machine", name, 0) for name in ("page_size", "pages", "max_model_len")),
        *(("machine", name, 0) for name in ("slots", "max_batch_tokens", "depth")),
        ("machine", "pages", -5),
        ("machine", "step_target", -0.5),
        ("machine", "captured", [[0, 8]]),
        ("rates", "base", -0.5),
        ("rates", "pairs", math.nan),
        ("rates", "context_pairs", -1e-9),
        ("rates", "rows", -math.inf),
    ],
    ids=str,
)
def test_devices_that_there_are_not(tmp_path, part, field, value):
    device = msgspec.to_builtins(MODEL)
    device[part][field] = value
    (tmp_path / "d.json").write_text(json.dumps(device))
    got = re.escape(str(value[0] if field == "captured" else json.dumps(value)))
    with pytest.raises(ConfigError, match=rf"cost model .*d.json: ({part}\.)?{field} must be .*, got {got}$"):
        read_cost_model(tmp_path / "d.json")


def test_a_device_that_takes_no_time_is_none(tmp_path):
    write_cost_model(tmp_path / "d.json", msgspec.structs.replace(MODEL, rates=Rates()))
    with pytest.raises(ConfigError, match="rates are all 0"):
        read_cost_model(tmp_path / "d.json")


def test_the_shipped_device_says_where_it_is_from():
    model = load_device("h200")
    assert "H200" in model.source and model.machine.pages > 0
    assert 0.003 < model.seconds(StepWork(tokens=1, rows=1, context=128)) < 0.006
    with pytest.raises(ConfigError, match="h200"):
        load_device("h2000")


def test_what_simulate_writes(tmp_path):
    out, trace = tmp_path / "out.json", tmp_path / "t.csv"
    lines = [f"{i / 10},{50 + i},{2 + i % 5}" for i in range(40)]
    trace.write_text("\n".join(["arrival_s,input_tokens,output_tokens", *lines]))
    write_cost_model(tmp_path / "d.json", MODEL)
    command = [
        "simulate", "--trace", str(trace), "--device", str(tmp_path / "d.json"), "--replicas", "2", "--scheduler",
        "fcfs", "--router", "least-load", "--slo-ttft", "0.5", "--slo-tpot", "0.1", "--rate-scale", "2", "--seed", "3",
        "--json", str(out),
    ]  # fmt: skip
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text())
    assert found["requests"] == found["finished"] == 40 and found["preemptions"] == 0
    for name in ("ttft_s", "tpot_s", "itl_s", "ttlt_s"):
        assert set(found[name]) == {"mean", "p50", "p90", "p99"}
    assert {"goodput_rps", "throughput_tok_s", "hit_rate", "max_wait_s"} <= found.keys()
    assert "goodput" in done.output


def test_figures_over_seeds_are_means_and_a_page_shows_them(tmp_path):
    out, page = tmp_path / "out.json", tmp_path / "out.html"
    write_cost_model(tmp_path / "d.json", MODEL)
    command = [
        "simulate", "--workload", "chat", "--num", "30", "--rate", "2", "--device", str(tmp_path / "d.json"), "--seeds",
        "3", "--workers", "1", "--json", str(out), "--html", str(page),
    ]  # fmt: skip
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text())
    each = [run["ttft_s"]["mean"] for run in found["runs"]]
    assert found["seeds"] == len(set(each)) == 3 and found["ttft_s"]["mean"] == pytest.approx(mean(each))
    assert page.read_text().count("<svg") == 5 and "chat: auto on 1 x" in page.read_text()


def test_a_simulation_tells_how_far_it_is(tmp_path, monkeypatch, capfd):
    write_cost_model(tmp_path / "d.json", MODEL)
    monkeypatch.setattr("quire.engine.request_progress.INTERVAL_S", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(fleet_module, "BATCH", 10)
    words = ["simulate", "--workload", "chat", "--num", "30", "--device", str(tmp_path / "d.json"), "--seeds", "1"]
    app(words, standalone_mode=False)
    assert "\r20/30 requests, about " in capfd.readouterr().err
    app([*words, "--compare", "fcfs,sjf", "--loads", "0.7"], standalone_mode=False)
    assert "\r2/2 runs" in capfd.readouterr().err


def test_reports_of_loads_are_what_routers_wait_for(monkeypatch):
    """Fresher reports let the router see that a replica is done: both get half of the requests."""
    monkeypatch.setattr(fleet_module, "REPORT_S", 0.01)
    trace = [Arrival(i * 0.2, 200, 2) for i in range(20)]
    result = simulate(Fleet(EngineOptions(), MODEL, replicas=2, router="least-load"), trace, workers=1)
    assert max(result.rows["wait"]) == pytest.approx(0, abs=1e-9)


CPU = CostModel(
    "cpu",
    "a small model",
    "made up, of a CPU's order",
    0,
    Rates(base=0.004, tokens=0.8e-3, rows=0.5e-3, context=1e-6, pairs=1e-7),
    Machine(pages=2000, slots=64, max_model_len=8192, max_batch_tokens=512, depth=1, page_size=64),
)


def test_a_batch_takes_as_long_under_the_default_policy_as_under_fcfs():
    """Longest first, as `LLM.generate` submits it: those with most to draw would else draw it alone at the end."""
    rng = Random(3)
    lengths = sorted(((rng.randrange(4, 400), rng.randrange(4, 200)) for _ in range(60)), key=lambda one: -one[1])
    trace = [Arrival(0.0, prompt, outputs, background=True) for prompt, outputs in lengths]
    ends = [served(trace, **options).result().end for options in ({}, {"scheduler": "fcfs"}, {"scheduler": "sjf"})]
    assert ends[0] == ends[1] < ends[2]


def test_short_prompts_do_not_wait_behind_long_ones():
    """Twelve clients with prompts of 5 to 6,000 tokens, one request at a time each."""
    rng = Random(7)
    trace = [Arrival(0.0, int(5 * 1200 ** rng.random()), rng.randrange(8, 40)) for _ in range(120)]

    def run(policy):
        options = EngineOptions.of(scheduler=policy)
        result = simulate(Fleet(options, CPU, clients=12), trace, workers=1)
        rows = result.rows
        short = [ttft for ttft, prompt in zip(rows["ttft"], rows["prompt"], strict=True) if prompt < 300]
        return median(short), len(rows["ttft"]) / (result.end - START)

    before, served_before = run("fcfs")
    after, served_after = run("auto")
    assert after < 0.5 < before
    assert served_after > 0.97 * served_before


def test_a_long_prompt_gets_less_of_each_step_while_better_ones_wait_for_a_slot():
    """Slots come free sooner the shorter steps are; the prompt keeps its own part of them."""
    slow = with_machine(pages=1000, slots=2, max_model_len=8192, max_batch_tokens=2048, step_target=0.3)
    slow = replace(slow, rates=Rates(base=0.006, tokens=0.0006))
    warm = [Arrival(float(number), 512, 8) for number in range(4)]
    stream, prompt, short = Arrival(10.0, 17, 30), Arrival(10.1, 6000, 2), Arrival(10.5, 16, 2)

    def times(*trace):
        rows = served([*warm, *trace], slow, scheduler="auto").result().rows
        return {size: (rows["ttft"][i], rows["ttlt"][i]) for i, size in enumerate(rows["prompt"])}

    alone, waited_for = times(stream, prompt), times(stream, prompt, short)
    ended = waited_for[17][1]
    assert ended < 0.75 * alone[17][1], "the stream, for whose slot the short one waits, ends sooner"
    assert waited_for[16][0] < ended - 0.5 + 0.35, "and that starts in a step of no more than the target"
    assert waited_for[6000][0] < 1.1 * alone[6000][0]
