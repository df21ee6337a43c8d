"""What the API process measures of itself, for Prometheus: its queue, its limits, its event loop.

Refuses to know: engines, requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from quire.types.membership import ReplicaView
from quire.types.seams import ReplicaOperator

if TYPE_CHECKING:
    from quire.serve.core.generation import Serving


class _Gauges(Collector):
    def __init__(self, serving: Serving, replicas: Sequence[ReplicaView]):
        self.serving = serving
        self.replicas = replicas

    def collect(self) -> Iterator[Metric]:
        admission, lag = self.serving.admission, self.serving.lag
        for name, help, value in (
            ("requests_inflight", "Requests under way.", admission.inflight),
            ("queue_requests", "Requests without a first token.", admission.waiting),
            ("queue_tokens", "Tokens those requests may need.", admission.queued),
            ("queue_wait_seconds", "How long requests waited for a first token lately.", admission.wait()),
            ("prepare_jobs", "Requests being rendered and tokenised off the loop.", self.serving.prepare_pool.pending),
        ):
            yield GaugeMetricFamily(f"quire_{name}", help, value)
        refused = CounterMetricFamily("quire_admission_refused", "Requests refused, by reason.", labels=("reason",))
        for reason, count in admission.refused.items():
            refused.add_metric((reason,), count)
        yield refused
        restarts = self.serving.models.restarts()
        yield CounterMetricFamily("quire_engine_restarts", "Times the engine was replaced.", restarts)
        if not self.serving.models.single_model:
            yield from self._of_models()
        yield from self._of_replicas()
        delays = HistogramMetricFamily("quire_event_loop_lag_seconds", "Lateness of a sleeping task.")
        delays.add_metric((), lag.cumulative(), lag.total)
        yield delays

    def _of_models(self) -> Iterator[Metric]:
        states = self.serving.models.states()
        gauge, counter = GaugeMetricFamily, CounterMetricFamily
        for family, name, help, values in (
            (gauge, "loaded", "Whether a model is loaded.", [state.state == "loaded" for state in states]),
            (gauge, "bytes", "Bytes that a model takes, weights and KV.", [state.bytes for state in states]),
            (gauge, "requests", "Requests that hold a model.", [state.requests for state in states]),
            (counter, "loads", "Times a model was loaded.", [state.loads for state in states]),
            (counter, "load_failures", "Times a model could not be loaded.", [state.load_failures for state in states]),
            (counter, "unloads", "Times a model was unloaded.", [state.unloads for state in states]),
            (counter, "load_seconds", "Seconds that loads of a model took.", [state.load_s_total for state in states]),
        ):
            metric = family(f"quire_model_{name}", help, labels=("model_name",))
            for state, value in zip(states, values, strict=True):
                metric.add_metric((state.name,), value)
            yield metric

    def _of_replicas(self) -> Iterator[Metric]:
        labels = ("replica",)
        up = GaugeMetricFamily("quire_replica_ready", "Whether a replica takes requests.", labels=labels)
        running = GaugeMetricFamily("quire_replica_requests_running", "Requests a replica works on.", labels=labels)
        waiting = GaugeMetricFamily("quire_replica_requests_waiting", "... without a first token.", labels=labels)
        restarts = CounterMetricFamily("quire_replica_restarts", "Times a replica was replaced.", labels=labels)
        for one in self.replicas:
            up.add_metric((one.id,), one.state == "ready")
            running.add_metric((one.id,), one.running)
            waiting.add_metric((one.id,), one.waiting)
            restarts.add_metric((one.id,), one.restarts)
        yield from (up, running, waiting, restarts)
        failovers = getattr(self.serving.frontend.client, "failovers", 0)
        yield CounterMetricFamily("quire_failovers", "Requests that went on on another replica.", failovers)
        client = self.serving.frontend.client
        if isinstance(client, ReplicaOperator):
            help = "Running requests moved with their KV pages."
            yield CounterMetricFamily("quire_migrations", help, client.migrations)
            help = "Times that a replica changed its role as the load's shape did."
            yield CounterMetricFamily("quire_role_switches", help, client.role_switches)
            help = "Requests that wait for a replica while there is none."
            yield GaugeMetricFamily("quire_requests_pending", help, client.pending)
        yield from self._of_autoscaling()

    def _of_autoscaling(self) -> Iterator[Metric]:
        autoscaler = getattr(self.serving.frontend.client, "autoscaler", None)
        if autoscaler is None:
            return
        view = autoscaler.view()
        yield GaugeMetricFamily("quire_autoscaler_replicas_wanted", "Replicas that the load asks for.", view.target)
        yield GaugeMetricFamily("quire_autoscaler_queue_delay_seconds", "Wait for admission, p90.", view.queue_delay_s)
        if view.slo_attainment is not None:
            help = "Share of the latest answers that met their targets."
            yield GaugeMetricFamily("quire_autoscaler_slo_attainment", help, view.slo_attainment)
        scaled = CounterMetricFamily("quire_autoscaler_scalings", "Changes of the number.", labels=("direction",))
        for direction, times in autoscaler.scaled.items():
            scaled.add_metric((direction,), times)
        yield scaled


def render(serving: Serving, replicas: Sequence[ReplicaView]) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Gauges(serving, replicas))
    return generate_latest(registry)
