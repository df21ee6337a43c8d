"""How many replicas the load asks for: from queue delay and SLO attainment, up soon and down late, to zero and back.

    samples of all replicas ──► recommendation ──► the least of `upscale_delay`, if that is more than there are
                                              └──► the most of `downscale_delay`, if that is fewer

What a replica can admit is learned while requests wait: then it admits as many as it can. From that and the rate of
arrivals follows how many replicas are needed; while it is not known, one at a time is added or tried without. The same
object scales a cluster and a simulation. Refuses to know: Ray, clocks, which replica is ended.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import Any, NamedTuple

from quire.types.autoscaling import AutoscaleOptions, AutoscalingView
from quire.types.events import EngineStats
from quire.types.histogram import LATENCY

INTERVAL_S = 1.0  # between samples
WINDOW_S = 30.0  # over which rates, delays and attainment are measured
DELAY_SHARE = 0.9  # of requests that the target of the queue delay holds for
MIN_ANSWERS = 10  # in the window before attainment counts
UP_UTILIZATION = 0.8  # of what replicas can admit, beyond which there are too few of them
DOWN_UTILIZATION = 0.6  # ... and that they may reach at most where there are fewer: the gap keeps the number steady
BACKLOG_S = 60.0  # within which those that wait already are to be admitted
MAX_STEP = 4  # replicas that may be added to those ready at once, or as many again
CAPACITY_DECAY_S = 4 * 3600.0  # in which a replica's known capacity is taken to be e times as much: requests change


class FleetSample(NamedTuple):
    """All replicas together; counts are since the sample before."""

    ready: int  # replicas that take requests
    running: int  # requests
    waiting: int  # ... for admission, or for a replica
    delays: Sequence[int] = ()  # requests admitted, by how long they had waited, in the buckets of `LATENCY`
    met: int = 0  # answers that met their targets
    missed: int = 0

    @property
    def admitted(self) -> int:
        return sum(self.delays)


class FleetMeter:
    """From counters of engines since their start to samples of the fleet."""

    def __init__(self) -> None:
        self._before: Mapping[Any, EngineStats] = {}

    def sample(
        self, found: Mapping[Any, EngineStats], ready: int, pending: int, away: Collection[Any] = ()
    ) -> FleetSample:
        """`found`: of each engine, by its name; `pending`: requests that wait for one; `away`: engines that may answer
        again later, with what they counted meanwhile."""
        delays, met, missed = [0] * (len(LATENCY) + 1), 0, 0
        for name, stats in found.items():
            before = self._before.get(name) or EngineStats()
            if sum(stats.queue_time.counts) < sum(before.queue_time.counts):
                before = EngineStats()  # it was told to count anew
            for number, (new, old) in enumerate(zip(stats.queue_time.counts, before.queue_time.counts, strict=True)):
                delays[number] += new - old
            met += stats.met_slo - before.met_slo
            missed += _missed(stats) - _missed(before)
        self._before = {name: stats for name, stats in self._before.items() if name in away} | dict(found)
        running = sum(stats.running for stats in found.values())
        waiting = sum(stats.waiting for stats in found.values()) + pending
        return FleetSample(ready, running, waiting, delays, met, missed)


def _missed(stats: EngineStats) -> int:
    """Answers that missed a target, or as good as: one that missed both is not told apart from two."""
    return max(stats.missed_ttft, stats.missed_tpot) + stats.gave_up


class Recommendation(NamedTuple):
    """A recommendation."""

    at: float
    replicas: int
    why: str


@dataclass
class WindowMetrics:
    """Of the samples in the window."""

    delay: float  # seconds that one in ten waited at least, or that one that comes now will
    attainment: float | None
    arrivals: float  # requests a second
    admissions: float
    ready: float  # mean number of replicas
    saturated: bool  # some waited all the time


class Autoscaler:
    def __init__(self, options: AutoscaleOptions, replicas: int):
        """`replicas`: how many there are, or will be, at first."""
        self.options = options
        self.min_replicas = replicas if options.min_replicas is None else options.min_replicas
        self.max_replicas = replicas if options.max_replicas is None else options.max_replicas
        self.target = replicas
        self.reason = "as many as at start"
        self.scaled = {"up": 0, "down": 0}  # times
        self.capacity = inf  # requests a second that a replica can admit, as far as is known
        self._samples: deque[tuple[float, FleetSample]] = deque()
        self._recommendations: deque[Recommendation] = deque()  # since the last change
        self._last_progress = -inf  # when some request was admitted, or none waited
        self._served_since = -inf  # when there was a replica again, or for the first time
        self._metrics = WindowMetrics(0.0, None, 0.0, 0.0, 0.0, saturated=False)

    def decide(self, now: float, sample: FleetSample) -> int:
        """How many replicas there are to be; called every `INTERVAL_S` or so."""
        measured = self._metrics = self._measure(now, sample)
        replicas, why = self._recommend(sample, measured)
        latest = Recommendation(now, min(self.max_replicas, max(self.min_replicas, replicas)), why)
        self._recommendations.append(latest)
        up = self._stable_recommendation(now, self.options.upscale_delay, min)
        down = self._stable_recommendation(now, self.options.downscale_delay, max)
        if self.target == 0 and latest.replicas > 0:
            self._change(latest)
        elif up is not None and up.replicas > self.target:
            self._change(up)
        elif down is not None and down.replicas < self.target:
            self._change(down)
        oldest = now - max(self.options.upscale_delay, self.options.downscale_delay)
        while len(self._recommendations) > 1 and self._recommendations[1].at <= oldest:
            self._recommendations.popleft()
        return self.target

    def _stable_recommendation(
        self, now: float, delay: float, pick: Callable[..., Recommendation]
    ) -> Recommendation | None:
        """The least, or the most, that was recommended for that long; None: it is not known for so long."""
        if not self._recommendations or self._recommendations[0].at > now - delay:
            return None
        return pick((one for one in self._recommendations if one.at >= now - delay), key=lambda one: one.replicas)

    def _change(self, wanted: Recommendation) -> None:
        self.scaled["up" if wanted.replicas > self.target else "down"] += 1
        self.target, self.reason = wanted.replicas, wanted.why
        self._recommendations.clear()

    def _measure(self, now: float, sample: FleetSample) -> WindowMetrics:
        samples = self._samples
        if sample.admitted or not sample.waiting:
            self._last_progress = now
        if sample.ready and not (samples and samples[-1][1].ready):
            self._served_since = samples[-1][0] if samples else now
        sample = sample._replace(delays=_since(sample.delays, now - self._served_since))
        samples.append((now, sample))
        while len(samples) > 2 and samples[1][0] <= now - WINDOW_S:
            samples.popleft()
        (began, first), span = samples[0], max(now - samples[0][0], INTERVAL_S)
        inside = [one for _, one in samples][1:] or [sample]
        counts = [sum(each) for each in zip(*(one.delays for one in inside if one.delays), strict=True)]
        admissions = sum(counts) / span
        ended, met = sum(one.met + one.missed for one in inside), sum(one.met for one in inside)
        expected = 0.0
        if sample.waiting and sample.ready:
            expected = sample.waiting / admissions if admissions else now - max(self._last_progress, began)
        return WindowMetrics(
            delay=max(_quantile(counts, DELAY_SHARE), expected),
            attainment=met / ended if ended >= MIN_ANSWERS else None,
            arrivals=max(0.0, admissions + (sample.waiting - first.waiting) / span),
            admissions=admissions,
            ready=sum(one.ready for one in inside) / len(inside),
            saturated=now - began >= WINDOW_S / 2 and all(one.waiting and one.ready for one in inside),
        )

    def _recommend(self, sample: FleetSample, found: WindowMetrics) -> tuple[int, str]:
        if not sample.ready and sample.waiting:
            return max(1, self.target), "a request waits and there is no replica"
        if not (sample.running or sample.waiting or sample.admitted):
            return 0, "idle"
        late = found.delay > self.options.target_queue_delay
        poor = found.attainment is not None and found.attainment < self.options.target_attainment
        self._learn(found, fine=not (late or poor))
        if late or poor:
            most = max(2 * sample.ready, sample.ready + MAX_STEP)
            needed = self._needed(found.arrivals + sample.waiting / BACKLOG_S, UP_UTILIZATION)
            why = (
                f"queue delay {found.delay:.1f} s, target {self.options.target_queue_delay:g} s"
                if late
                else f"SLO attainment {found.attainment:.0%}, target {self.options.target_attainment:.0%}"
            )
            return min(most, max(sample.ready + 1, needed)), why
        if self.capacity == inf:
            return max(1, self.target - 1), "queue delay and SLO attainment are well within their targets"
        why = f"{found.arrivals:.2f} requests/s, {self.capacity:.2f} a replica"
        if (needed := self._needed(found.arrivals, UP_UTILIZATION)) > self.target:
            return needed, why
        return min(self.target, max(1, self._needed(found.arrivals, DOWN_UTILIZATION))), why

    def _needed(self, rate: float, utilization: float) -> int:
        return 0 if self.capacity == inf else ceil(rate / (utilization * self.capacity) - 1e-9)

    def _learn(self, found: WindowMetrics, *, fine: bool) -> None:
        """What a replica admits while requests wait is what it can; while none waits, it can do at least that."""
        if not found.ready:
            return
        each = found.admissions / found.ready
        if found.saturated and each:
            self.capacity = each if self.capacity == inf else (self.capacity + each) / 2
        elif fine and self.capacity < inf:
            self.capacity = max(each, self.capacity * (1 + INTERVAL_S / CAPACITY_DECAY_S))

    def view(self) -> AutoscalingView:
        found = self._metrics
        return AutoscalingView(
            min_replicas=self.min_replicas, max_replicas=self.max_replicas, target=self.target, reason=self.reason,
            queue_delay_s=found.delay, slo_attainment=found.attainment,
        )  # fmt: skip


def _since(delays: Sequence[int], seconds: float) -> Sequence[int]:
    """Delays, longer ones than that taken for none: what waited for the first replica says nothing of a second."""
    first = bisect_left(LATENCY, seconds) + 1
    return [delays[0] + sum(delays[first:]), *delays[1:first], *[0] * len(delays[first:])] if delays else delays


def _quantile(counts: Sequence[int], share: float) -> float:
    """Of delays by bucket, interpolated within the bucket it falls into."""
    left = share * sum(counts)
    for number, count in enumerate(counts):
        if count and left <= count:
            low, high = LATENCY[number - 1] if number else 0.0, LATENCY[min(number, len(LATENCY) - 1)]
            return low + (high - low) * left / count
        left -= count
    return 0.0
