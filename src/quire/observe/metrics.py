"""Prometheus metrics: what requests felt and what the engine says of itself.

Recording is plain arithmetic on the event loop's thread (no locks, no label look-ups), one update per arrival of
tokens; names, labels and buckets are made only when somebody scrapes. So every number can be shown twice for free:
under our own name and under the name that vLLM's dashboards ask for.

Refuses to know: engines, HTTP, who scrapes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from time import perf_counter

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from quire.types.events import EngineStats
from quire.types.outputs import Delta
from quire.types.request import FinishReason

_Plain = type[GaugeMetricFamily] | type[CounterMetricFamily]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_LATENCY = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_TOKENS = tuple(float(1 << power) for power in range(18))  # 1 to 131072


class Histogram:
    """Counts by bucket, and the sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]):
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, observations up to it), as Prometheus wants buckets."""
        rows: list[tuple[str, float]] = []
        seen = 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            seen += count
            rows.append((bound, seen))
        return rows


class Metrics(Collector):
    """All metrics of one server. Feed it with `request` and `engine`; read it with `render`."""

    def __init__(self, model: str):
        self.model = model
        self.ttft = Histogram(_LATENCY)
        self.gap = Histogram(_LATENCY)
        self.tpot = Histogram(_LATENCY)
        self.e2e = Histogram(_LATENCY)
        self.prompt_size = Histogram(_TOKENS)
        self.output_size = Histogram(_TOKENS)
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.finished: dict[str, int] = {reason.value: 0 for reason in FinishReason}
        self.stats: EngineStats | None = None
        self.engine_up = False
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def request(self, prompt_tokens: int, arrived: float | None = None) -> RequestMeter:
        """Start measuring one request; `arrived` is its `perf_counter` time if that lies in the past."""
        self.prompt_tokens += prompt_tokens
        self.prompt_size.observe(prompt_tokens)
        return RequestMeter(self, perf_counter() if arrived is None else arrived)

    def engine(self, stats: EngineStats | None) -> None:
        """The engine's latest numbers; None when it did not answer (counters then keep their last value)."""
        self.engine_up = stats is not None
        if stats is not None:
            self.stats = stats

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        yield from self._histograms()
        yield from self._counter("prompt_tokens", "Prompt tokens of accepted requests.", self.prompt_tokens)
        yield from self._counter("generation_tokens", "Tokens generated.", self.output_tokens)
        yield from self._finishes()
        yield from self._gauge("engine_up", "Whether the engine answered last time.", self.engine_up, shared=False)
        if self.stats is not None:
            yield from self._engine_metrics(self.stats)

    def _histograms(self) -> Iterator[Metric]:
        for ours, theirs, help, histogram in (
            ("time_to_first_token_seconds", None, "Arrival to first token.", self.ttft),
            ("inter_token_latency_seconds", None, "Gap between arrivals of tokens of one sequence.", self.gap),
            (
                "time_per_output_token_seconds",
                "request_time_per_output_token_seconds",
                "Per sequence: time after the first token, by further token.",
                self.tpot,
            ),
            ("e2e_request_latency_seconds", None, "Arrival to last token.", self.e2e),
            ("request_prompt_tokens", None, "Prompt length.", self.prompt_size),
            ("request_generation_tokens", None, "Tokens generated per sequence.", self.output_size),
        ):
            buckets = histogram.cumulative()
            for name in (f"quire_{ours}", f"vllm:{theirs or ours}"):
                family = HistogramMetricFamily(name, help, labels=("model_name",))
                family.add_metric((self.model,), buckets, histogram.total)
                yield family

    def _finishes(self) -> Iterator[Metric]:
        help = "Sequences ended, by reason."
        for name, label in (("quire_request_finished", "reason"), ("vllm:request_success", "finished_reason")):
            family = CounterMetricFamily(name, help, labels=("model_name", label))
            for reason, count in self.finished.items():
                family.add_metric((self.model, reason), count)
            yield family

    def _engine_metrics(self, stats: EngineStats) -> Iterator[Metric]:
        used = stats.pages_used / stats.pages_total if stats.pages_total else 0.0
        yield from self._gauge("num_requests_running", "Sequences in the running batch.", stats.running)
        yield from self._gauge("num_requests_waiting", "Sequences waiting to run.", stats.waiting)
        yield from self._gauge("kv_cache_usage_perc", "Share of KV pages in use, 0 to 1.", used)
        yield from self._gauge("kv_waste_ratio", "Share of KV slots given back unfilled.", stats.kv_waste, shared=False)
        yield from self._gauge("kv_pages_cached", "Free pages holding a prefix.", stats.pages_cached, shared=False)
        yield from self._gauge("kv_bytes", "Bytes of the KV page pool.", stats.kv_bytes, shared=False)
        yield from self._counter("prefix_cache_queries", "Prompt tokens looked up.", stats.prompt_tokens)
        yield from self._counter("prefix_cache_hits", "Prompt tokens found in the cache.", stats.cached_tokens)
        yield from self._counter("num_preemptions", "Sequences that lost their pages.", stats.preemptions)
        yield from self._counter("steps", "Engine steps.", stats.steps, shared=False)
        yield from self._counter("step_seconds", "Time the device was busy.", stats.step_seconds, shared=False)
        yield from self._counter("token_rows", "Token rows computed.", stats.rows, shared=False)
        yield from self._counter("token_rows_wasted", "Token rows computed in vain.", stats.rows_wasted, shared=False)

    def _gauge(self, name: str, help: str, value: float, shared: bool = True) -> Iterator[Metric]:
        return self._plain(GaugeMetricFamily, name, help, value, shared)

    def _counter(self, name: str, help: str, value: float, shared: bool = True) -> Iterator[Metric]:
        return self._plain(CounterMetricFamily, name, help, value, shared)

    def _plain(self, kind: _Plain, name: str, help: str, value: float, shared: bool) -> Iterator[Metric]:
        """One number, under our name and, where vLLM has the like (`shared`), under its name too."""
        for prefix in ("quire_", "vllm:") if shared else ("quire_",):
            family = kind(prefix + name, help, labels=("model_name",))
            family.add_metric((self.model,), value)
            yield family


class RequestMeter:
    """Times of one request, branch by branch. Call `deltas` on each arrival and `close` at the end, come what may."""

    __slots__ = ("_branches", "_metrics", "_started")

    def __init__(self, metrics: Metrics, started: float):
        self._metrics = metrics
        self._started = started
        self._branches: dict[int, _Branch] = {}

    def deltas(self, deltas: Iterable[Delta], now: float | None = None) -> None:
        now = perf_counter() if now is None else now
        metrics = self._metrics
        for delta in deltas:
            branch = self._branches.get(delta.branch)
            if branch is None:
                branch = self._branches[delta.branch] = _Branch()
            if delta.token_ids:
                if branch.tokens:
                    metrics.gap.observe(now - branch.last)
                else:
                    branch.first = now
                    metrics.ttft.observe(now - self._started)
                branch.last = now
                branch.tokens += len(delta.token_ids)
                metrics.output_tokens += len(delta.token_ids)
            if delta.finish_reason is not None and not branch.done:
                branch.done = True
                self._finish(branch, delta.finish_reason)

    def close(self, branches: int = 1) -> None:
        """The request is over; of its `branches`, those that never ended count as aborted."""
        done = sum(branch.done for branch in self._branches.values())
        if done >= branches:
            last = max(branch.last for branch in self._branches.values())
            self._metrics.e2e.observe(max(last - self._started, 0.0))
        self._metrics.finished[FinishReason.ABORT.value] += max(branches - done, 0)

    def _finish(self, branch: _Branch, reason: FinishReason) -> None:
        metrics = self._metrics
        metrics.finished[reason.value] += 1
        metrics.output_size.observe(branch.tokens)
        if branch.tokens > 1:
            metrics.tpot.observe((branch.last - branch.first) / (branch.tokens - 1))


class _Branch:
    __slots__ = ("done", "first", "last", "tokens")

    def __init__(self) -> None:
        self.first = self.last = 0.0
        self.tokens = 0
        self.done = False
