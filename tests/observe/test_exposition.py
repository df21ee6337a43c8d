"""What is exposed: vLLM's names and labels, waste by cause, energy; logs as JSON; spans by OpenTelemetry's reader."""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path

import pytest
from msgspec.structs import replace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families

from quire.observe.energy import Energy
from quire.observe.explanations import explain
from quire.observe.exposition import render
from quire.observe.ledger import Ledger
from quire.observe.metrics import Metrics
from quire.observe.spans import Tracer
from quire.observe.window import KEPT, Window
from quire.types.counts import Counts
from quire.types.errors import DeadlineError
from quire.types.events import EngineStats, TierStats
from quire.types.logs import JsonLines, TextLines
from quire.types.messages import EngineInfo
from quire.types.outputs import Delta
from quire.types.request import FinishReason, Request
from quire.types.sampling_params import SamplingParams
from quire.types.timeline import Timeline

# What vLLM's own Grafana dashboard asks for, and a few more that others do.
VLLM = """
vllm:e2e_request_latency_seconds_bucket vllm:e2e_request_latency_seconds_count vllm:e2e_request_latency_seconds_sum
vllm:generation_tokens_total vllm:inter_token_latency_seconds_bucket vllm:iteration_tokens_total_bucket
vllm:kv_cache_usage_perc vllm:num_preemptions_total vllm:num_requests_running vllm:num_requests_waiting
vllm:prefix_cache_hits_total vllm:prefix_cache_queries_total vllm:prompt_tokens_total vllm:request_success_total
vllm:request_decode_time_seconds_sum vllm:request_generation_tokens_bucket vllm:request_max_num_generation_tokens_sum
vllm:request_params_n_bucket vllm:request_prefill_time_seconds_sum vllm:request_prompt_tokens_bucket
vllm:request_queue_time_seconds_sum vllm:request_time_per_output_token_seconds_bucket
vllm:cache_config_info vllm:engine_sleep_state vllm:num_requests_waiting_by_reason vllm:prompt_tokens_by_source_total
vllm:prompt_tokens_cached_total vllm:request_inference_time_seconds_sum vllm:request_num_preemptions_bucket
vllm:request_params_max_tokens_bucket vllm:request_prefill_kv_computed_tokens_bucket
vllm:spec_decode_num_accepted_tokens_per_pos_total vllm:external_prefix_cache_queries_total
vllm:external_prefix_cache_hits_total
vllm:time_to_first_token_seconds_bucket vllm:time_to_first_token_seconds_count vllm:time_to_first_token_seconds_sum
""".split()  # noqa: SIM905


SPEC = "vllm:spec_decode_num_accepted_tokens"
INFO = EngineInfo(
    model="m", max_model_len=512, vocab_size=9, pages=64, page_size=16, max_batch_tokens=512, depth=1, device="cpu",
    dtype="float32", reasons=[], kv_dtype="float16",
)  # fmt: skip


def exposed(metrics: Metrics) -> dict[str, list[tuple[dict[str, str], float]]]:
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(render(metrics).decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def test_names_and_labels_that_existing_dashboards_ask_for() -> None:
    metrics = Metrics("m", info=INFO)
    guesses = {"drafted_tokens": 9, "accepted_tokens": 6, "accepted_at": [4, 2]}
    tiers = [TierStats("host", hit_tokens=32), TierStats("disk", hit_tokens=16)]
    metrics.engine(
        EngineStats(
            pages_total=4, memory=7, waiting=5, deferred=2, sleep_level=1, tiers=tiers, tier_queries=90, **guesses
        )
    )
    found = exposed(metrics)
    assert set(VLLM) - found.keys() == set()
    for name in VLLM:
        for labels, _ in found[name]:
            assert {"model_name", "engine"} <= labels.keys(), name
    assert {labels["finished_reason"] for labels, _ in found["vllm:request_success_total"]} >= {"stop", "length"}
    waste = {labels["cause"] for labels, _ in found["quire_token_rows_wasted_total"]}
    assert waste == {"recompute", "draft", "cancelled", "late", "overrun", "failed", "padding"}
    guessed = [found[f"vllm:spec_decode_num_{kind}_tokens_total"][0][1] for kind in ("draft", "accepted")]
    assert guessed == [9, 6]
    assert {labels["position"]: value for labels, value in found[f"{SPEC}_per_pos_total"]} == {"0": 4, "1": 2}
    waits = {labels["reason"]: value for labels, value in found["vllm:num_requests_waiting_by_reason"]}
    assert waits == {"capacity": 3, "deferred": 2} and found["vllm:num_requests_waiting"][0][1] == 5
    sleep = {labels["sleep_state"]: value for labels, value in found["vllm:engine_sleep_state"]}
    assert sleep == {"awake": 0, "weights_offloaded": 1, "discard_all": 0}
    (cache, one), *_ = found["vllm:cache_config_info"]
    assert one == 1 and (cache["block_size"], cache["num_gpu_blocks"], cache["cache_dtype"]) == ("16", "64", "float16")
    assert cache["enable_prefix_caching"] == "True"
    external = [found[f"vllm:external_prefix_cache_{kind}_total"][0][1] for kind in ("queries", "hits")]
    assert external == [90, 48]
    memory = {labels["process"]: value for labels, value in found["quire_process_memory_bytes"]}
    assert memory["engine"] == 7 and memory["api"] > 1 << 20


def test_energy_from_counters_that_wrap(tmp_path: Path) -> None:
    zone = tmp_path / "intel-rapl:0"
    zone.mkdir()
    (zone / "name").write_text("package-0\n")
    (zone / "max_energy_range_uj").write_text("10000000\n")
    counter = zone / "energy_uj"
    counter.write_text("9000000\n")
    part = tmp_path / "intel-rapl:0:0"
    part.mkdir()  # within the package's sum
    energy = Energy(tmp_path, "no-such-library.so")
    assert energy.available and any("NVML" in reason for reason in energy.reasons)
    counter.write_text("9500000\n")
    assert energy.read() == {"rapl:package-0": pytest.approx(0.5)}
    counter.write_text("1500000\n")  # it went round
    assert energy.read() == {"rapl:package-0": pytest.approx(2.5)}
    metrics = Metrics("m", energy)
    metrics.output_tokens = 5
    found = exposed(metrics)
    assert found["quire_energy_joules_total"][0][1] == pytest.approx(2.5)
    assert found["quire_energy_joules_per_token"][0][1] == pytest.approx(0.5)


def test_no_meter_no_number(tmp_path: Path) -> None:
    energy = Energy(tmp_path, "no-such-library.so")
    assert not energy.available and len(energy.reasons) == 2
    assert not [name for name in exposed(Metrics("m", energy)) if "energy" in name]


def test_window_is_a_fair_sample() -> None:
    window = Window()
    for i in range(10_000):
        window.gaps.add(float(i))
        window.ended.add((float(i), None))
    glance = window.take()
    assert glance.finished == 10_000 and len(glance.ended) == len(glance.gaps) == KEPT
    assert 3500 < sum(glance.gaps) / KEPT < 6500
    assert window.take().gaps == []


def request(n: int = 1) -> Request:
    return Request(id="r", prompt=[1, 2, 3], params=SamplingParams(n=n))


def test_log_lines_as_json(caplog: pytest.LogCaptureFixture) -> None:
    ledger, metrics = Ledger(), Metrics("m")
    with caplog.at_level(logging.INFO, "quire.requests"):
        with ledger.watch(request(), time.perf_counter() - 1.0, metrics, call="call-7", owner="alice") as meter:
            meter.deltas([Delta(token_ids=[5], finish_reason=FinishReason.STOP)])
        with pytest.raises(DeadlineError), ledger.watch(request(), time.perf_counter(), metrics):
            raise DeadlineError("too late")
    good, bad = (json.loads(JsonLines("api", lambda: "call-8").format(record)) for record in caplog.records)
    assert (good["request_id"], good["key"], good["output_tokens"], good["finish"]) == ("call-7", "alice", 1, "stop")
    assert good["level"] == "info" and good["seconds"] >= 1.0 and good["ttft"] >= 1.0 and good["time"].endswith("Z")
    assert bad["error"] == DeadlineError.code and bad["request_id"] == "call-8"
    assert "output_tokens=1" in TextLines("api").format(caplog.records[0])


def test_exceptions_stay_on_one_line() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        record = logging.LogRecord("x", logging.ERROR, "f", 1, "it %s", ("broke",), sys.exc_info())
    line = JsonLines("engine").format(record)
    assert "\n" not in line
    assert json.loads(line)["message"] == "it broke" and "ValueError" in json.loads(line)["exception"]


def test_time_is_counted_once() -> None:
    """What passes between a request being ready and the engine having it is not preparing and queueing both."""
    ledger, metrics, now = Ledger(), Metrics("m"), time.time()
    with ledger.watch(replace(request(), arrival=now - 1), time.perf_counter() - 2, metrics):
        pass
    times = {"arrival": now - 1, "admitted": now - 0.5, "first_token": now - 0.25, "ended": now}
    (entry,) = ledger.find("r")
    found = explain(entry, [Timeline(request="r", branch=0, prompt=3, **times)], now, others=False)
    (branch,) = found.branches
    assert found.prepare_s == pytest.approx(1, abs=0.1) and branch.queue_s == pytest.approx(0.5)
    assert found.prepare_s + branch.queue_s + branch.prefill_s + branch.decode_s <= found.total_s


def test_spans_continue_the_callers_trace() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = Tracer(provider)
    ledger, metrics = Ledger(), Metrics("m")
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    with ledger.watch(
        request(), time.perf_counter(), metrics, call="c", traceparent=f"00-{trace}-{parent}-01"
    ) as meter:
        meter.deltas([Delta(token_ids=[5, 6], finish_reason=FinishReason.LENGTH)])
    entry = ledger.find("r")[0]
    now = time.time()
    times = {"arrival": now - 4, "admitted": now - 3, "first_token": now - 2, "ended": now}
    timeline = Timeline(request="r", branch=0, prompt=3, **times)
    tracer.record(entry, [timeline])
    spans = {span.name: span for span in exporter.get_finished_spans()}
    root = spans["generate m"]
    assert root.context is not None and root.parent is not None
    assert f"{root.context.trace_id:032x}" == trace and f"{root.parent.span_id:016x}" == parent
    assert root.attributes is not None and root.attributes["gen_ai.usage.output_tokens"] == 2
    assert {"queue", "prefill", "decode"} <= spans.keys()
    for name, seconds in (("queue", 1), ("prefill", 1), ("decode", 2)):
        span = spans[name]
        assert span.parent is not None and span.parent.span_id == root.context.span_id
        assert span.end_time is not None and span.start_time is not None
        assert (span.end_time - span.start_time) / 1e9 == pytest.approx(seconds, abs=1e-3)


def test_what_requests_ask_for_and_what_prefill_computes() -> None:
    metrics = Metrics("m", info=INFO)
    ledger = Ledger()
    for limit, cached in ((40, 2), (None, 0)):
        asked = Request(id="r", prompt=[1, 2, 3], params=SamplingParams(n=2, max_tokens=limit))
        with ledger.watch(asked, time.perf_counter(), metrics) as meter:
            firsts = [Delta(branch=branch, token_ids=[5], counts=Counts(cached)) for branch in (0, 1)]
            meter.deltas(firsts)
            meter.deltas([Delta(branch=branch, token_ids=[6], finish_reason=FinishReason.STOP) for branch in (0, 1)])
    found = exposed(metrics)
    assert found["vllm:request_params_max_tokens_sum"][0][1] == 40 + (512 - 3)
    assert found["vllm:request_prefill_kv_computed_tokens_sum"][0][1] == 1 + 3
    sources = {labels["source"]: value for labels, value in found["vllm:prompt_tokens_by_source_total"]}
    assert sources == {"local_compute": 4, "local_cache_hit": 2}
    assert found["vllm:prompt_tokens_cached_total"][0][1] == 2
