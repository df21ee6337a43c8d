"""How many replicas a load asks for: the policy alone, on a clock of the test's own."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.cluster.autoscaler import Autoscaler, FleetSample, _quantile
from quire.types.autoscaling import AutoscaleOptions
from quire.types.errors import ConfigError
from quire.types.histogram import LATENCY
from quire.types.serving import ServeOptions

START_S = 20  # that a replica takes to start


def delays(*seconds: float) -> list[int]:
    counts = [0] * (len(LATENCY) + 1)
    for delay in seconds:
        counts[bisect_left(LATENCY, delay)] += 1
    return counts


class Fluid:
    """Replicas that each admit `capacity` requests a second from one queue, a second at a time."""

    def __init__(self, autoscaler: Autoscaler, capacity: float):
        self.autoscaler, self.capacity, self.now = autoscaler, capacity, 0
        self.ready, self.starts = autoscaler.target, []  # when each that starts is ready
        self.queue: list[float] = []  # moments of arrival of those that wait
        self._owed = self._due = 0.0
        self.waited: list[float] = []

    def second(self, rate: float) -> int:
        self.now += 1
        self._due += rate
        while self._due >= 1:
            self._due -= 1
            self.queue.append(self.now)
        self.ready += sum(at <= self.now for at in self.starts)
        self.starts = [at for at in self.starts if at > self.now]
        self._owed = min(self._owed + self.ready * self.capacity, len(self.queue) + self.ready * self.capacity)
        admitted = min(len(self.queue), int(self._owed))
        self._owed -= admitted
        gone, self.queue = self.queue[:admitted], self.queue[admitted:]
        waits = [self.now - at for at in gone]
        self.waited += waits
        running = math.ceil(min(rate, self.ready * self.capacity))
        target = self.autoscaler.decide(self.now, FleetSample(self.ready, running, len(self.queue), delays(*waits)))
        missing = target - self.ready - len(self.starts)
        self.starts += [self.now + START_S] * max(0, missing)
        while missing < 0:
            if self.starts:
                self.starts.pop()
            else:
                self.ready -= 1
            missing += 1
        return target

    def run(self, seconds: int, rate: float | Callable[[int], float]) -> Iterator[int]:
        for _ in range(seconds):
            yield self.second(rate(self.now) if callable(rate) else rate)


def scaled(low: int, high: int, replicas: int, capacity: float, **options: float) -> Fluid:
    told = AutoscaleOptions(min_replicas=low, max_replicas=high, **options)
    return Fluid(Autoscaler(told, replicas), capacity)


def test_a_steady_load_gets_what_it_needs_and_keeps_it() -> None:
    fleet = scaled(1, 64, 1, 2.0)
    list(fleet.run(1200, 21.0))  # 10.5 replicas' worth
    later = list(fleet.run(1200, 21.0))
    assert min(later) >= 11 and max(later) <= 18  # between full and 0.6 of what they can
    assert len(set(later)) <= 2, "it does not swing"
    del fleet.waited[:]
    list(fleet.run(300, 21.0))
    assert max(fleet.waited) <= 1


def test_up_soon_and_down_late() -> None:
    fleet = scaled(1, 16, 1, 2.0, upscale_delay=5, downscale_delay=120)
    first = next(i for i, target in enumerate(fleet.run(600, 12.0)) if target > 1)
    assert 5 <= first <= 20  # seconds from the load's first
    list(fleet.run(900, 12.0))
    most = fleet.autoscaler.target
    drop = list(fleet.run(600, 2.0))
    assert set(drop[:120]) == {most}, "a lull shorter than downscale_delay changes nothing"
    assert drop[-1] <= 3


def test_a_burst_shorter_than_upscale_delay_changes_nothing() -> None:
    fleet = scaled(1, 16, 2, 4.0, upscale_delay=60)
    for _ in range(5):
        assert set(fleet.run(5, 20.0)) == {2}
        assert set(fleet.run(40, 1.0)) == {2}


def test_to_zero_and_back() -> None:
    fleet = scaled(0, 4, 1, 2.0, downscale_delay=30)
    list(fleet.run(20, 0.5))
    targets = list(fleet.run(120, 0.0))
    assert targets[-1] == 0 and fleet.autoscaler.reason == "idle"
    assert targets.index(0) >= 29, "after downscale_delay of idleness, not before"
    assert fleet.second(1.0) == 1, "a request starts one at once"
    assert fleet.autoscaler.reason == "a request waits and there is no replica"
    assert set(fleet.run(START_S - 1, 0.0)) == {1}, "it is not given up while the request waits for it"
    list(fleet.run(5, 0.0))
    assert not fleet.queue, "the request was served"


def test_what_waited_for_the_first_replica_asks_for_no_second() -> None:
    scaler = Autoscaler(AutoscaleOptions(min_replicas=0, max_replicas=4, upscale_delay=0), 1)
    for now in range(20):
        scaler.decide(now, FleetSample(0, 0, 4))
    assert scaler.decide(20, FleetSample(1, 4, 0, delays(*[19.0] * 4))) == 1
    assert scaler.decide(21, FleetSample(1, 4, 0, delays(*[0.1] * 4))) == 1
    assert scaler.view().queue_delay_s < 1
    assert scaler.decide(31, FleetSample(1, 8, 0, delays(*[8.0] * 8))) == 2, "these found it too slow"


def test_never_to_zero_while_requests_are_under_way() -> None:
    scaler = Autoscaler(AutoscaleOptions(min_replicas=0, max_replicas=4, downscale_delay=10), 3)
    targets = [scaler.decide(now, FleetSample(scaler.target, running=1, waiting=0)) for now in range(600)]
    assert targets[-1] == 1, "one long answer needs one"


def test_missed_targets_add_replicas_though_nothing_waits() -> None:
    scaler = Autoscaler(AutoscaleOptions(min_replicas=1, max_replicas=8, target_attainment=0.9), 2)
    for now in range(60):
        one = FleetSample(2, running=40, waiting=0, delays=delays(*[0.0] * 5), met=3, missed=2)
        target = scaler.decide(now, one)
    assert target > 2 and scaler.reason == "SLO attainment 60%, target 90%"
    assert scaler.view().slo_attainment == pytest.approx(0.6)


def test_a_few_answers_say_nothing_of_attainment() -> None:
    scaler = Autoscaler(AutoscaleOptions(min_replicas=1, max_replicas=8), 2)
    for now in range(20):
        target = scaler.decide(now, FleetSample(2, 1, 0, delays(0.0), missed=int(now == 5)))
    assert target == 2 and scaler.view().slo_attainment is None


def test_a_jump_is_met_in_a_few_steps_bounded_by_what_is_there() -> None:
    """By the rate of arrivals and what each admits, not one by one; and never much more than twice what is ready."""
    fleet = scaled(1, 256, 1, 2.0)
    list(fleet.run(60, 1.0))
    for _ in range(400):
        before = fleet.ready
        target = fleet.second(100.0)
        assert target <= max(2 * before, before + 4) or target <= fleet.ready + len(fleet.starts)
    assert 50 <= fleet.ready <= 200
    assert fleet.autoscaler.scaled["up"] <= 20


loads = st.lists(st.tuples(st.integers(1, 200), st.floats(0, 60)), min_size=1, max_size=6)


@settings(max_examples=25, deadline=None)
@given(loads, st.integers(0, 3), st.integers(3, 40), st.floats(0.2, 5.0))
def test_bounds_hold_and_nothing_waits_for_ever(load: list, low: int, high: int, capacity: float) -> None:
    fleet = scaled(low, high, max(1, low), capacity, downscale_delay=60)
    before = fleet.autoscaler.target
    for seconds, rate in load:
        for target in fleet.run(seconds, rate):
            assert low <= target <= high
            if target != before:
                assert fleet.autoscaler.reason
            before = target
    served = min(0.5, 0.2 * capacity)
    fleet.queue = fleet.queue[:50]
    list(fleet.run(600, served))
    assert len(fleet.queue) <= 2, "what one replica can serve is served"


@settings(max_examples=10, deadline=None)
@given(loads)
def test_a_replay_decides_the_same(load: list) -> None:
    runs = []
    for _ in range(2):
        fleet = scaled(0, 20, 1, 1.5, downscale_delay=30)
        runs.append([target for seconds, rate in load for target in fleet.run(seconds, rate)])
    assert runs[0] == runs[1]


def test_quantiles_interpolate_within_a_bucket() -> None:
    assert _quantile([], 0.9) == 0.0
    assert _quantile(delays(*[0.6] * 10), 0.9) == pytest.approx(0.725)
    assert _quantile(delays(*[0.0] * 99, 100.0), 0.9) < 0.001
    assert _quantile(delays(1e6), 0.9) == LATENCY[-1]


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"max_replicas": 4}, "max_replicas has no effect without replicas"),
        ({"replicas": 2, "upscale_delay": 1.0}, "upscale_delay has no effect without max_replicas or min_replicas"),
        ({"replicas": 2, "max_replicas": 1}, "from min_replicas to max_replicas"),
        ({"replicas": 2, "min_replicas": 3}, "from min_replicas to max_replicas"),
        ({"replicas": 1, "max_replicas": 2, "target_attainment": 1.5}, "target_attainment"),
    ],
)
def test_options_that_do_not_go_together(wrong: dict, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        ServeOptions(**wrong)


def test_bounds_default_to_the_number_at_start() -> None:
    scaler = Autoscaler(ServeOptions(replicas=2, min_replicas=0), 2)
    assert (scaler.min_replicas, scaler.max_replicas) == (0, 2)
    assert not ServeOptions(replicas=2).autoscales
