"""OpenTelemetry spans.

One span per request, with child spans for its phases::

    ostinato.request   endpoint, model, tenant if metrics may name it
    ├── queue          until its first step
    ├── prefill        prompt tokens: computed, cached, copied, waited for
    └── decode         generated tokens, finish reason

They are written when a request has ended, with the times that the engine recorded. They need the
extra ``otel`` and the setting ``otel_traces``. OpenTelemetry's own variables set the destination
(``OTEL_EXPORTER_OTLP_ENDPOINT`` and others). Spans carry counts and times, no text or token ids.
"""

import time
from dataclasses import asdict
from typing import Any

from ostinato.core.errors import ConfigError
from ostinato.engine.requests.outputs import RequestTimings
from ostinato.server.config import ServerConfig
from ostinato.server.telemetry.observer import Observer, ServedRequest

NANOSECONDS = 1_000_000_000


def make_tracer(config: ServerConfig) -> "RequestTracer | None":
    """Return the span writer; None unless it is enabled.

    Raises:
        ConfigError: It is enabled, and the extra is not installed.
    """
    if not config.otel_traces:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as missing:
        raise ConfigError(
            "otel_traces=True needs the extra: install ostinato[otel], or leave it off"
        ) from missing
    provider = TracerProvider(resource=Resource.create({"service.name": "ostinato"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return RequestTracer(provider, config)


class RequestTracer(Observer):
    """An observer that writes a request's spans when it has ended."""

    def __init__(self, provider: Any, config: ServerConfig) -> None:
        """Write to a provider of OpenTelemetry's SDK."""
        self._provider = provider
        self._tracer = provider.get_tracer("ostinato")
        self._config = config

    def finished(self, record: ServedRequest) -> None:
        """Write the spans of a request."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        end_s = time.monotonic()
        to_epoch_s = time.time() - end_s
        whole = self._tracer.start_span(
            "ostinato.request",
            kind=SpanKind.SERVER,
            start_time=int((record.accepted_s + to_epoch_s) * NANOSECONDS),
            attributes=self._attributes(record),
        )
        if record.output is not None:
            timings = record.output.timings
            # The engine's clock may differ; both show the end of the request at the same time.
            newest = timings.finished or timings.first_token or timings.arrival
            shift_s = end_s - newest + to_epoch_s
            inside = set_span_in_context(whole)
            for name, begin_s, stop_s in _phases(timings, newest):
                span = self._tracer.start_span(
                    name,
                    context=inside,
                    start_time=int((begin_s + shift_s) * NANOSECONDS),
                    attributes=_attributes_of(name, record),
                )
                span.end(int((stop_s + shift_s) * NANOSECONDS))
        if record.error is not None:
            whole.set_status(Status(StatusCode.ERROR, record.error.message))
        whole.end(int((end_s + to_epoch_s) * NANOSECONDS))

    def close(self) -> None:
        """Flush."""
        self._provider.shutdown()

    def _attributes(self, record: ServedRequest) -> dict[str, Any]:
        attributes: dict[str, Any] = {
            "http.route": record.call.endpoint,
            "gen_ai.request.model": self._config.model_names[0],
            "ostinato.request_id": record.request_id,
            "ostinato.gone": record.is_gone,
        }
        if self._config.metrics_tenant_names and record.caller.tenant:
            attributes["ostinato.tenant"] = record.caller.tenant
        return attributes


def _phases(timings: RequestTimings, newest_s: float) -> list[tuple[str, float, float]]:
    """List a request's phases: name, begin and end by the engine's clock."""
    planned, first = timings.first_scheduled, timings.first_token
    phases = [("queue", timings.arrival, newest_s if planned is None else planned)]
    if planned is not None:
        phases.append(("prefill", planned, newest_s if first is None else first))
    if first is not None:
        phases.append(("decode", first, newest_s))
    return phases


def _attributes_of(phase: str, record: ServedRequest) -> dict[str, Any]:
    output, prompt = record.output, record.prompt
    if output is None or prompt is None or phase == "queue":
        return {}
    if phase == "prefill":
        return {
            "gen_ai.usage.input_tokens": prompt.total,
            **{f"ostinato.{origin}_tokens": number for origin, number in asdict(prompt).items()},
        }
    count = record.num_generated
    reasons = [part.finish_reason or "gone" for part in output.outputs]
    return {"gen_ai.usage.output_tokens": count, "gen_ai.response.finish_reasons": reasons}
