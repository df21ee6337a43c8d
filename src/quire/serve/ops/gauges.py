"""What the API process measures of itself, for Prometheus: its queue, its limits, its event loop.

Refuses to know: engines, requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from quire.serve.core.generation import Serving


class _Gauges(Collector):
    def __init__(self, serving: Serving):
        self.serving = serving

    def collect(self) -> Iterator[Metric]:
        admission, lag = self.serving.admission, self.serving.lag
        for name, help, value in (
            ("requests_inflight", "Requests under way.", admission.inflight),
            ("queue_requests", "Requests without a first token.", admission.waiting),
            ("queue_tokens", "Tokens those requests may need.", admission.queued),
            ("queue_drain_tokens_per_second", "Measured rate at which the queue drains.", admission.drain.rate),
            ("queue_wait_seconds", "Expected wait of a new request.", admission.wait()),
            ("prepare_jobs", "Requests being rendered and tokenised off the loop.", self.serving.prepare_pool.pending),
        ):
            yield GaugeMetricFamily(f"quire_{name}", help, value)
        refused = CounterMetricFamily("quire_admission_refused", "Requests refused, by reason.", labels=("reason",))
        for reason, count in admission.refused.items():
            refused.add_metric((reason,), count)
        yield refused
        restarts = getattr(self.serving.frontend.client, "restarts", 0)
        yield CounterMetricFamily("quire_engine_restarts", "Times the engine was replaced.", restarts)
        delays = HistogramMetricFamily("quire_event_loop_lag_seconds", "Lateness of a sleeping task.")
        delays.add_metric((), lag.cumulative(), lag.total)
        yield delays


def render(serving: Serving) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Gauges(serving))
    return generate_latest(registry)
