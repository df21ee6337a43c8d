"""A simulated fleet that the cluster's own autoscaler scales."""

from __future__ import annotations

from itertools import takewhile

import pytest

from quire.cluster.autoscaler import INTERVAL_S
from quire.simulation.devices import load_device
from quire.simulation.figures import Targets, summarise
from quire.simulation.fleet import Fleet, simulate
from quire.simulation.synthetic import arrivals
from quire.simulation.traces import Arrival
from quire.types.autoscaling import AutoscaleOptions
from quire.types.config import EngineOptions, SchedulerOptions
from quire.types.errors import ConfigError

OPTIONS = EngineOptions(scheduler=SchedulerOptions(max_waiting=1 << 30))


def fleet(replicas: int, autoscale: AutoscaleOptions | None, **more: object) -> Fleet:
    return Fleet(OPTIONS, load_device("h200"), replicas, "cache-aware", autoscale=autoscale, **more)  # type: ignore[arg-type]


def wave(seconds: float) -> list[Arrival]:
    """A daily wave, made short, of prompts so long that one replica takes a small part of its crest."""
    moments = takewhile(lambda at: at < seconds, arrivals(f"diurnal:{seconds}", 3.8, seed=3))
    return [Arrival(at, 12_000, 2) for at in moments]


def test_it_follows_the_load() -> None:
    trace = wave(120.0)
    scaled = AutoscaleOptions(min_replicas=1, max_replicas=6, downscale_delay=30)
    runs = [simulate(fleet(1, one, startup=5.0), trace, workers=1) for one in (scaled, None)]
    found, alone = (summarise(run, len(trace), Targets(ttft=5.0)) for run in runs)
    assert found["finished"] == alone["finished"] == len(trace), "no request is lost"
    assert found["slo_share"] > 1.5 * alone["slo_share"]
    assert found["replica_s"] < 0.7 * 6 * 120.0, "fewer than a fleet of the largest size has"
    assert 1 < found["replicas_peak"] <= 6


def test_replica_seconds_are_counted_to_the_last_answer() -> None:
    """As those of a fixed fleet are, however long the answers take once all requests are routed."""
    trace = [Arrival(1.0, 100, 2000) for _ in range(8)]
    as_many = AutoscaleOptions(min_replicas=2, max_replicas=2)
    scaled, fixed = (simulate(fleet(2, one), trace, workers=1) for one in (as_many, None))
    assert fixed.end > 10.0 and scaled.end == pytest.approx(fixed.end)
    assert fixed.replica_seconds <= scaled.replica_seconds < fixed.replica_seconds + 2 * 2 * INTERVAL_S


def test_how_many_processes_share_it_changes_nothing() -> None:
    trace = wave(40.0)
    scaled = AutoscaleOptions(min_replicas=0, max_replicas=4, downscale_delay=20)
    runs = [simulate(fleet(1, scaled, startup=5.0), trace, workers=workers) for workers in (1, 2)]
    one, two = (summarise(run, len(trace), Targets()) for run in runs)
    assert one["replica_s"] == two["replica_s"] and one["hit_rate"] == two["hit_rate"]
    assert one["ttft_s"] == pytest.approx(two["ttft_s"])


def test_to_zero_and_back_costs_the_first_request_a_start() -> None:
    trace = [Arrival(1.0, 100, 10), Arrival(500.0, 100, 10), Arrival(501.0, 100, 10)]
    scaled = AutoscaleOptions(min_replicas=0, max_replicas=2, downscale_delay=30)
    result = simulate(fleet(1, scaled, startup=12.0), trace, workers=1)
    ttft = sorted(result.rows["ttft"])
    assert ttft[0] < 0.5, "there was a replica"
    assert 10.0 < ttft[1] < 13.0 and 11.0 < ttft[2] < 14.0, "both waited for the same one"
    assert result.replica_seconds < 60.0, "none while idle"


def test_a_replica_that_comes_back_has_no_cache() -> None:
    blocks = tuple(range(1, 9))
    trace = [Arrival(at, 4096, 4, blocks) for at in (1.0, 2.0, 500.0)]
    scaled = AutoscaleOptions(min_replicas=0, max_replicas=1, downscale_delay=30)
    kept, lost = (simulate(fleet(1, one, startup=1.0), trace, workers=1) for one in (None, scaled))
    assert kept.cached_tokens > 1.9 * lost.cached_tokens > 0


def test_bounds_are_checked() -> None:
    with pytest.raises(ConfigError, match="from min_replicas to max_replicas"):
        fleet(3, AutoscaleOptions(max_replicas=2))
    with pytest.raises(ConfigError, match="closed loop"):
        fleet(1, AutoscaleOptions(max_replicas=2), clients=4)
    with pytest.raises(ConfigError, match="upscale_delay has no effect"):
        AutoscaleOptions(upscale_delay=1.0)
