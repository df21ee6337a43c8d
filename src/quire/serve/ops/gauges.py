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
from quire.types.seams import EngineClient, ReplicaOperator

if TYPE_CHECKING:
    from quire.serve.core.generation import Serving


class _Gauges(Collector):
    def __init__(self, serving: Serving, replicas: Sequence[ReplicaView]):
        self.serving = serving
        self.replicas = replicas

    def collect(self) -> Iterator[Metric]:
        admission, lag, workers = self.serving.admission, self.serving.lag, self.serving.workers
        preparing = self.serving.prepare_pool.pending + (workers.preparing if workers is not None else 0)
        for name, help, value in (
            ("requests_inflight", "Requests under way.", admission.inflight),
            ("queue_requests", "Requests without a first token.", admission.waiting),
            ("queue_tokens", "Tokens those requests may need.", admission.queued),
            ("queue_wait_seconds", "How long requests waited for a first token lately.", admission.wait()),
            ("prepare_jobs", "Requests being rendered and tokenised off the loop.", preparing),
        ):
            yield GaugeMetricFamily(f"quire_{name}", help, value)
        refused = CounterMetricFamily("quire_admission_refused", "Requests refused, by reason.", labels=("reason",))
        for reason, count in admission.refused.items():
            refused.add_metric((reason,), count)
        yield refused
        restarts = self.serving.models.restarts()
        yield CounterMetricFamily("quire_engine_restarts", "Times the engine was replaced.", restarts)
        if workers is not None:
            yield GaugeMetricFamily("quire_api_workers", "API workers that answer.", workers.up)
            yield CounterMetricFamily("quire_api_worker_restarts", "Times one was replaced.", workers.restarts)
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
            (gauge, "asleep", "Whether its engine sleeps.", [state.state == "asleep" for state in states]),
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
        labels = ("replica", *self._labels)
        up = GaugeMetricFamily("quire_replica_ready", "Whether a replica takes requests.", labels=labels)
        running = GaugeMetricFamily("quire_replica_requests_running", "Requests a replica works on.", labels=labels)
        waiting = GaugeMetricFamily("quire_replica_requests_waiting", "... without a first token.", labels=labels)
        restarts = CounterMetricFamily("quire_replica_restarts", "Times a replica was replaced.", labels=labels)
        for one in self.replicas:
            who = (one.id, one.model) if self._labels else (one.id,)
            up.add_metric(who, one.state == "ready")
            running.add_metric(who, one.running)
            waiting.add_metric(who, one.waiting)
            restarts.add_metric(who, one.restarts)
        yield from (up, running, waiting, restarts)
        yield from self._of_clusters()
        yield from self._of_autoscaling()

    @property
    def _labels(self) -> tuple[str, ...]:
        """Of what each model has."""
        return () if self.serving.models.single_model else ("model_name",)

    def _loaded(self) -> list[tuple[tuple[str, ...], EngineClient]]:
        """Clients of models that are loaded, each with the values of its labels."""
        found = self.serving.models.loaded().items()
        return [((name,) if self._labels else (), frontend.client) for name, frontend in found]

    def _of_clusters(self) -> Iterator[Metric]:
        gauge, counter, labels = GaugeMetricFamily, CounterMetricFamily, self._labels
        failovers = counter("quire_failovers", "Requests that went on on another replica.", labels=labels)
        migrations = counter("quire_migrations", "Running requests moved with their KV pages.", labels=labels)
        help = "Times that a replica changed its role as the load's shape did."
        switches = counter("quire_role_switches", help, labels=labels)
        help = "Requests that wait for a replica while there is none."
        pending = gauge("quire_requests_pending", help, labels=labels)
        for who, client in self._loaded():
            failovers.add_metric(who, getattr(client, "failovers", 0))
            if isinstance(client, ReplicaOperator):
                migrations.add_metric(who, client.migrations)
                switches.add_metric(who, client.role_switches)
                pending.add_metric(who, client.pending)
        yield from (one for one in (failovers, migrations, switches, pending) if one.samples)

    def _of_autoscaling(self) -> Iterator[Metric]:
        gauge, counter, labels = GaugeMetricFamily, CounterMetricFamily, self._labels
        wanted = gauge("quire_autoscaler_replicas_wanted", "Replicas that the load asks for.", labels=labels)
        delay = gauge("quire_autoscaler_queue_delay_seconds", "Wait for admission, p90.", labels=labels)
        help = "Share of the latest answers that met their targets."
        attainment = gauge("quire_autoscaler_slo_attainment", help, labels=labels)
        scaled = counter("quire_autoscaler_scalings", "Changes of the number.", labels=(*labels, "direction"))
        for who, client in self._loaded():
            if (autoscaler := getattr(client, "autoscaler", None)) is None:
                continue
            view = autoscaler.view()
            wanted.add_metric(who, view.target)
            delay.add_metric(who, view.queue_delay_s)
            if view.slo_attainment is not None:
                attainment.add_metric(who, view.slo_attainment)
            for direction, times in autoscaler.scaled.items():
                scaled.add_metric((*who, direction), times)
        yield from (one for one in (wanted, delay, attainment, scaled) if one.samples)


def render(serving: Serving, replicas: Sequence[ReplicaView]) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Gauges(serving, replicas))
    return generate_latest(registry)
