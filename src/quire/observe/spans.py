"""OpenTelemetry spans of requests, where that is installed and asked for: one per request, one within for each phase.

A W3C `traceparent` that came with a request is continued. Spans are made when the request has ended, from times already
noted, so tracing costs running requests nothing. Refuses to know: HTTP, engines.
"""

from __future__ import annotations

import time
from typing import Any

from quire.observe.explanations import attributes, phases
from quire.observe.ledger import Entry
from quire.types.errors import ConfigError
from quire.types.timeline import Timeline


class Tracer:
    def __init__(self, provider: Any):
        """`provider` is an OpenTelemetry TracerProvider."""
        self._provider = provider
        self._tracer = provider.get_tracer("quire")

    @classmethod
    def to(cls, endpoint: str) -> Tracer:
        """Spans go to an OTLP/HTTP collector."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ConfigError(f"spans need {error.name}, which is not installed; pip install 'quire[otel]'") from None
        provider = TracerProvider(resource=Resource.create({"service.name": "quire"}))
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        return cls(provider)

    def record(self, entry: Entry, timelines: list[Timeline]) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        def stamp(moment: float) -> int:
            return int(moment * 1e9)

        ended = entry.ended or time.time()
        parent = TraceContextTextMapPropagator().extract({"traceparent": entry.traceparent})
        span = self._tracer.start_span(
            f"generate {entry.model}",
            context=parent,
            kind=SpanKind.SERVER,
            start_time=stamp(entry.arrived),
            attributes=attributes(entry),
        )
        within = set_span_in_context(span, parent)
        for timeline in timelines:
            for name, (since, until) in phases(timeline, ended).items():
                details = {"quire.branch": timeline.branch, "quire.preemptions": len(timeline.preemptions)}
                child = self._tracer.start_span(name, context=within, start_time=stamp(since), attributes=details)
                child.end(stamp(max(since, until)))
        if entry.error:
            span.set_status(Status(StatusCode.ERROR, entry.error))
        span.end(stamp(ended))

    def close(self) -> None:
        """Send what has not been sent."""
        self._provider.shutdown()
