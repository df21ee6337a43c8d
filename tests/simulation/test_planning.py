"""Calibration, comparison of policies and of results, ladders of rates, profiles of traffic."""

import json
from types import SimpleNamespace

import pytest
from msgspec.structs import replace
from test_simulator import MODEL
from typer.testing import CliRunner

from quire.bench import calibration, rate_ladder, trace_replay, workloads
from quire.bench.load.load_report import SLO
from quire.bench.load.runner import Phase
from quire.bench.offline import run_workload
from quire.bench.result_comparison import compare as compare_results
from quire.bench.traffic_profile import Rates, profile
from quire.cli.main import app
from quire.engine.core import EngineCore
from quire.engine.link import LocalLink
from quire.simulation.comparison import Contender, compare, made_up, markdown, sized
from quire.simulation.figures import Targets
from quire.simulation.planning import capacity_rps, replicas_for, shared_tokens
from quire.simulation.synthetic import synthetic
from quire.simulation.traces import Arrival, read_trace
from quire.types.config import EngineOptions
from quire.types.cost_model import work_of, write_cost_model
from quire.types.fakes import FakeExecutor
from quire.types.kv import KVGroup, KVLayout
from quire.types.messages import EngineInfo
from quire.types.plan import Capacity

LAYOUT = KVLayout((KVGroup((0,), 16, 1, 1),), "float32")


class TimedExecutor(FakeExecutor):
    """A device whose steps take exactly what a cost model says, on a clock of its own."""

    def __init__(self, capacity, clock):
        super().__init__(LAYOUT, capacity)
        self._time = clock

    def submit(self, plan):
        ticket = super().submit(plan)
        ticket.result().launch_seconds = 0.01 * plan.tokens
        self._time.now += MODEL.seconds(work_of(plan.rows))
        return ticket


def test_calibration_finds_what_a_device_does(monkeypatch):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(calibration.time, "monotonic", lambda: clock.now)
    capacity = Capacity(pages=600, slots=16, max_model_len=700, max_batch_tokens=512, depth=1)
    core = EngineCore(EngineOptions(), TimedExecutor(capacity, clock), clock=lambda: clock.now)
    info = EngineInfo("m", 700, 97, 599, 16, 512, 1, "none", "float32", [], slots=16)
    model = calibration.calibrate(LocalLink(core, info), longest=256, most=8, rounds=1)
    assert model.error["p90"] < 0.02 and abs(model.error["total"]) < 0.01
    for name in ("base", "tokens", "rows"):
        assert getattr(model.rates, name) == pytest.approx(getattr(MODEL.rates, name), rel=0.2), name
    assert model.machine.slots == 16 and model.machine.page_size == 16 and "calibrate" in model.source


def test_calibration_finds_how_long_launches_take(monkeypatch):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(calibration.time, "monotonic", lambda: clock.now)
    capacity = Capacity(pages=600, slots=16, max_model_len=700, max_batch_tokens=512, depth=1, captured=((255, 16),))
    core = EngineCore(EngineOptions(), TimedExecutor(capacity, clock), clock=lambda: clock.now)
    info = EngineInfo("m", 700, 97, 599, 16, 512, 1, "none", "float32", [], slots=16)
    model = calibration.calibrate(LocalLink(core, info), longest=256, most=1, rounds=1)
    assert 2.56 <= model.machine.launch <= 5.12, "of steps that are too large to be captured, not of the many others"
    captured = replace(model, machine=replace(model.machine, launch=0.0))
    assert "launch" in dict(calibration.rows(model)) and "launch" not in dict(calibration.rows(captured))


def test_so_many_at_a_time():
    clock = SimpleNamespace(now=100.0)
    capacity = Capacity(pages=600, slots=16, max_model_len=700, max_batch_tokens=512, depth=1)
    core = EngineCore(EngineOptions(), TimedExecutor(capacity, clock), clock=lambda: clock.now)
    link = LocalLink(core, EngineInfo("m", 700, 97, 599, 16, 512, 1, "none", "float32", [], slots=16))
    running = []
    link.core.executor.submit = lambda plan, submit=core.executor.submit: running.append(len(plan.rows)) or submit(plan)
    run = run_workload(link, workloads.fixed(9, 20, 5, vocab=90), concurrency=3)
    assert max(running) == 3 and [len(trace.tokens) for trace in run.traces] == [5] * 9
    assert sorted(trace.arrival for trace in run.traces) == [trace.arrival for trace in run.traces]
    assert run.traces[2].arrival == 0 < run.traces[3].arrival


def test_a_replay_and_the_simulator_agree_on_a_device_that_is_as_the_cost_model_says(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    capacity = Capacity(pages=600, slots=16, max_model_len=700, max_batch_tokens=512, depth=1)
    core = EngineCore(EngineOptions(), TimedExecutor(capacity, clock), clock=lambda: clock.now)
    link = LocalLink(core, EngineInfo("m", 700, 97, 599, 16, 512, 1, "none", "float32", [], slots=16))
    idle = SimpleNamespace(clear=lambda: None, wait=lambda seconds: vars(clock).update(now=clock.now + seconds))
    monkeypatch.setattr(link, "_woken", idle)
    for name in ("perf_counter", "time"):
        monkeypatch.setattr(trace_replay.time, name, lambda: clock.now)
    asked = [one for one in synthetic("chat", 60, 2.0, 5) if one.prompt + one.outputs < 700]
    asked[3] = asked[3]._replace(prompt=64, blocks=(7, 8), block=32)
    measured = trace_replay.replay(link, asked)
    machine = sized(MODEL, pages=599, slots=16, max_model_len=700, max_batch_tokens=512, depth=1, page_size=16)
    told = trace_replay.simulated(EngineOptions(), machine, asked)
    found = trace_replay.beside(measured, told)
    assert len(found) == 17 and measured["finished"] == len(asked)
    assert {one.name: round(one.off, 3) for one in found if abs(one.off) > 0.02} == {}


def test_policies_beside_each_other():
    work = made_up("chat", Targets(0.5, 0.5), requests=24)
    policies = [Contender("fcfs"), Contender("sjf", oracle=True)]
    cells = compare(sized(MODEL, max_model_len=3000), [work], [0.5, 3.0], policies, [0, 1], workers=1)
    assert [(c.load, c.contender) for c in cells] == [
        (0.5, "fcfs"), (0.5, "sjf (oracle)"), (3.0, "fcfs"), (3.0, "sjf (oracle)")
    ]  # fmt: skip
    assert cells[0].figures["ttft_p99"] < cells[2].figures["ttft_p99"]
    assert cells[3].figures["ttft_p50"] < cells[2].figures["ttft_p50"]
    assert markdown(cells).count("\n| ") >= 4


def test_comparison_by_command(tmp_path):
    write_cost_model(tmp_path / "d.json", MODEL)
    out = tmp_path / "cells.json"
    command = ["simulate", "--workload", "chat", "--num", "16", "--device", str(tmp_path / "d.json"), "--compare",
               "fcfs,srpt:oracle", "--loads", "0.8", "--seeds", "1", "--slo-ttft", "1", "--json", str(out)]  # fmt: skip
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert [cell["contender"] for cell in json.loads(out.read_text())["cells"]] == ["fcfs", "srpt (oracle)"]
    assert "| srpt (oracle) |" in done.output


def test_a_comparison_runs_with_the_options_it_is_given_and_refuses_those_that_it_does_not_use(tmp_path):
    write_cost_model(tmp_path / "d.json", MODEL)
    command = ["simulate", "--workload", "chat", "--num", "32", "--device", str(tmp_path / "d.json"), "--compare",
               "auto", "--loads", "4", "--seeds", "1", "--slo-ttft", "0.5", "--workers", "1", "--json"]  # fmt: skip
    served = []
    for name, more in (("a", []), ("b", ["--slo-give-up"])):
        done = CliRunner().invoke(app, [*command, str(tmp_path / name), *more])
        assert done.exit_code == 0, done.output
        served.append(json.loads((tmp_path / name).read_text())["cells"][0]["figures"])
    assert served[1]["ttft_p99"] < served[0]["ttft_p99"], "those that are too late end without an answer"
    for more in (["--rate", "2"], ["--rate-scale", "2"], ["--clients", "2"], ["--replicas", "2"], ["--oracle"]):
        done = CliRunner().invoke(app, [*command, str(tmp_path / "c"), *more])
        assert done.exit_code != 0 and not (tmp_path / "c").exists()


def test_capacity_is_what_keeps_a_replica_busy():
    trace = synthetic("chat", 200, 1.0, seed=1)
    one = capacity_rps(MODEL, trace)
    assert 0 < one < 1 / MODEL.rates.base
    assert replicas_for(MODEL, trace, 10 * one, 0.5) == 20
    assert shared_tokens([Arrival(0, 100, 1, (1, 2), 32), Arrival(0, 100, 1, (1, 3), 32)]) == [0, 32]


def test_a_profile_of_a_servers_log(tmp_path):
    log = tmp_path / "server.log"
    lines = [{"time": "2026-01-01T00:00:00.000Z", "logger": "quire.serve", "message": "started"}]
    for i in range(120):
        seconds, key = 0.5, "ab"[i % 4 == 0]
        lines.append({
            "time": f"2026-01-01T00:{i // 60:02d}:{i % 60:02d}.500Z", "logger": "quire.observe.ledger", "key": key,
            "message": "request ended", "prompt_tokens": 100 + 20 * i, "cached_tokens": 50, "output_tokens": 10,
            "seconds": seconds,
        })  # fmt: skip
    log.write_text("\n".join(map(json.dumps, lines)))
    found = profile(read_trace(log), MODEL, Rates(usd_per_hour=3.6, watts=500, gco2e_per_kwh=400))
    assert found["requests"] == 120 and found["seconds"] == pytest.approx(119)
    assert found["burstiness"] == pytest.approx(0) and found["tenants"] == 2
    tokens = sum(100 + 20 * i + 10 for i in range(120))
    assert found["prefix_share"] == pytest.approx(120 * 50 / (tokens - 1200))
    hours = found["replicas"] * 119 / 3600
    assert found["costs"]["usd_per_million_tokens"] == pytest.approx(1e6 * 3.6 * hours / tokens)
    assert found["costs"]["gco2e_per_million_output_tokens"] == pytest.approx(1e6 * 0.5 * hours * 400 / 1200)
    done = CliRunner().invoke(app, ["profile", str(log)])
    assert done.exit_code == 0 and "busiest minute" in done.output.replace("\n", " ")


def test_results_beside_each_other_with_their_noise(tmp_path):
    def figures(*values):
        return {"ttft_s.p99": list(values), "seed": [1.0] * len(values)}

    steady = compare_results(figures(1.0, 1.02, 0.98), figures(1.03, 1.0, 1.01), 0.05)
    assert [(line.name, line.verdict) for line in steady] == [("ttft_s.p99", "same")]
    assert compare_results(figures(1.0, 1.02, 0.98), figures(1.5, 1.52, 1.47), 0.05)[0].verdict == "worse"
    assert compare_results(figures(1.0, 3.0), figures(1.5, 1.52), 0.05)[0].verdict == "same", "runs vary that much"
    for name, value in (("a", 10.0), ("b", 14.0)):
        phases = [{"phase": "x", "goodput_req_s": value, "ttft_s": {"p50": 0.1}}]
        (tmp_path / f"{name}.json").write_text(json.dumps({"phases": phases}))
    command = ["bench", "compare", str(tmp_path / "b.json"), str(tmp_path / "a.json")]
    done = CliRunner().invoke(app, [*command, "--check"])
    assert done.exit_code == 1 and "worse" in done.output and "1 of 2 figures" in done.output
    assert CliRunner().invoke(app, [*command, "--check", "--noise", "0.5"]).exit_code == 0


@pytest.mark.asyncio
@pytest.mark.parametrize(("start", "expected"), [(1.0, 10.0), (64.0, 10.0)])
async def test_a_ladder_of_rates_ends_at_the_highest_that_meets_the_service_level(start, expected):
    def served(rate):
        good = SimpleNamespace(ok=True, refused=False, ttft=0.1 if rate <= expected else 9.0, tpot=0.01, prompt=1)
        good.answer, good.times, good.end, good.due, good.sent = (
            SimpleNamespace(tokens=2, cached=0),
            [0.1, 0.2],
            1,
            0,
            0,
        )
        return good

    async def measure(rate, seed):
        return Phase("p", rate, 1.0, [served(rate)] * 4, None, None)

    rungs = await rate_ladder.climb(measure, SLO(ttft=0.5), start=start, factor=2.0, seeds=[1, 2], share=0.9, refine=6)
    best = rate_ladder.highest(rungs)
    assert 0.97 * expected < best <= expected
    assert all(len(rung.runs) == 2 for rung in rungs)


def test_a_load_is_a_share_of_what_the_same_device_can_serve():
    """Policies run on the device whose capacity was measured, however many more slots it has."""
    work = made_up("chat", Targets(0.5, 0.5), requests=48)
    found = [
        compare(sized(MODEL, max_model_len=3000, slots=slots), [work], [0.5, 4.0], [Contender("fcfs")], [0], workers=1)
        for slots in (6, 1024)
    ]
    assert found[0] == found[1]
    below, above = (cell.figures["max_wait_s"] for cell in found[0])
    assert above > 2 * below
