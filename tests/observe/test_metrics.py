"""Metrics: arithmetic of histograms and meters, and what Prometheus' own parser reads of them."""

from __future__ import annotations

import msgspec
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from quire.observe.exposition import render
from quire.observe.metrics import Counted, Histogram, Metrics
from quire.observe.window import Window
from quire.types.events import EngineStats
from quire.types.outputs import Delta
from quire.types.request import FinishReason


def read(metrics: Metrics) -> dict[tuple[str, str], float]:
    return {
        (sample.name, sample.labels.get("finished_reason") or sample.labels.get("le") or ""): sample.value
        for family in text_string_to_metric_families(render(metrics).decode())
        for sample in family.samples
        if sample.labels["model_name"] == "m"
    }


def test_histogram_counts_as_numpy_does() -> None:
    values = np.random.default_rng(0).exponential(0.1, 500)
    histogram = Histogram((0.01, 0.1, 1.0))
    for value in [*values, 0.1]:
        histogram.observe(value)
    expected = [int((values <= bound).sum()) + (bound >= 0.1) for bound in (0.01, 0.1, 1.0, np.inf)]
    assert [count for _, count in histogram.cumulative()] == expected
    assert histogram.total == sum(values) + 0.1


def test_meter_times_each_branch() -> None:
    metrics = Metrics("m")
    meter = metrics.request(10, arrived=100.0)
    meter.deltas([Delta(branch=0, token_ids=[1]), Delta(branch=1, token_ids=[1])], now=100.5)
    meter.deltas([Delta(branch=0, token_ids=[2, 3])], now=100.7)
    meter.deltas([Delta(branch=0, token_ids=[4], finish_reason=FinishReason.STOP)], now=100.8)
    meter.deltas([Delta(branch=1, token_ids=[2], finish_reason=FinishReason.LENGTH)], now=101.5)
    meter.close(branches=2)
    assert abs(metrics.ttft.total - 1.0) < 1e-9  # twice half a second
    assert sum(metrics.gap.counts) == 3
    assert abs(metrics.gap.total - (0.2 + 0.1 + 1.0)) < 1e-9
    assert abs(metrics.tpot.total - (0.3 / 3 + 1.0)) < 1e-9
    assert abs(metrics.e2e.total - 1.5) < 1e-9
    values = read(metrics)
    assert values["vllm:prompt_tokens_total", ""] == 10
    assert values["vllm:generation_tokens_total", ""] == 6
    assert values["vllm:request_success_total", "stop"] == 1
    assert values["vllm:request_success_total", "length"] == 1
    assert values["vllm:request_success_total", "abort"] == 0
    assert values["vllm:time_to_first_token_seconds_bucket", "0.25"] == 0
    assert values["vllm:time_to_first_token_seconds_bucket", "0.5"] == 2
    assert values["vllm:time_to_first_token_seconds_bucket", "+Inf"] == 2


def test_what_never_ended_was_aborted() -> None:
    metrics = Metrics("m")
    meter = metrics.request(1)
    meter.deltas([Delta(branch=0, token_ids=[1], finish_reason=FinishReason.STOP)])
    meter.close(branches=3)
    assert metrics.finished == {"stop": 1, "length": 0, "abort": 2, "error": 0}
    assert sum(metrics.e2e.counts) == 0


def test_engine_numbers_appear_under_both_names_and_survive_silence() -> None:
    metrics = Metrics("m")
    assert ("vllm:num_requests_running", "") not in read(metrics)
    metrics.engine(EngineStats(running=2, pages_total=10, pages_used=4, prompt_tokens=8, cached_tokens=6, steps=5))
    values = read(metrics)
    for prefix in ("vllm:", "quire_"):
        assert values[prefix + "num_requests_running", ""] == 2
        assert values[prefix + "kv_cache_usage_perc", ""] == 0.4
        assert values[prefix + "prefix_cache_hits_total", ""] == 6
    assert values["quire_engine_up", ""] == 1
    assert values["quire_steps_total", ""] == 5
    metrics.engine(None)
    values = read(metrics)
    assert values["quire_engine_up", ""] == 0
    assert values["quire_steps_total", ""] == 5


def test_what_processes_count_adds_up_and_is_told_once() -> None:
    """As of one that saw it all, however often the others tell."""
    alone, main, worker = Metrics("m"), Metrics("m"), Metrics("m")
    for number in range(7):
        seen = [main, worker][number % 2]
        for metrics in (alone, seen):
            meter = metrics.request(10 + number, arrived=100.0)
            meter.deltas([Delta(branch=0, token_ids=[1], finish_reason=None)], now=100.5 + number)
            meter.deltas([Delta(branch=0, token_ids=[2], finish_reason=FinishReason.STOP)], now=101.0 + number)
            meter.close()
        if number % 3 == 2:
            main.add(msgspec.msgpack.decode(msgspec.msgpack.encode(worker.take()), type=Counted))
    main.add(worker.take())
    main.add(worker.take())  # nothing new
    assert {key: value for key, value in read(main).items() if "memory" not in key[0]} == {
        key: value for key, value in read(alone).items() if "memory" not in key[0]
    }
    mine, all_of_it = main.window.take(), alone.window.take()
    assert (mine.tokens, mine.finished) == (all_of_it.tokens, all_of_it.finished) == (14, 7)
    assert sorted(mine.firsts) == sorted(all_of_it.firsts)


def test_a_sample_from_elsewhere_counts_all_that_was_seen_there() -> None:
    here, there = Window(), Window()
    for number in range(1000):
        there.ended.add((float(number), None))
    here.add(there.take())
    assert here.take().finished == 1000
