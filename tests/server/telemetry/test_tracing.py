"""Spans say where a request's time went; without the setting there are none."""

import asyncio
import sys

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from ostinato import SamplingParams
from ostinato.core.errors import ConfigError
from ostinato.server.access.callers import Caller
from ostinato.server.call import GenerateCall, sender
from ostinato.server.config import ServerConfig
from ostinato.server.serving import serve
from ostinato.server.state import ServerState
from ostinato.server.telemetry.tracing import RequestTracer, make_tracer

ANN = Caller("ann", "salt of ann")


def spans_of(state: ServerState, config: ServerConfig, *texts: str, leave: bool = False) -> list:
    """Serve prompts one after another, and return what was written."""
    kept = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(kept))
    tracer = RequestTracer(provider, config)

    async def ask(text: str) -> None:
        most = 100 if leave else 3  # the engine must not have ended before the reader leaves
        params = SamplingParams(max_tokens=most, temperature=0, ignore_eos=True)
        call = GenerateCall(endpoint="/test", params=params, prompt=sender(ANN, text=text))
        stream = serve(state, ANN, call)
        async for _ in stream:
            if leave:
                break
        await stream.aclose()

    async def ask_all() -> None:
        for text in texts:
            await ask(text)

    state.observers.append(tracer)
    try:
        asyncio.run(ask_all())
    finally:
        state.observers.remove(tracer)
    tracer.close()
    return list(kept.get_finished_spans())


def test_a_request_is_queue_then_prefill_then_decode(state: ServerState):
    spans = spans_of(state, ServerConfig(), "Spans of a prompt, traced.")
    named = {span.name: span for span in spans}
    assert set(named) == {"ostinato.request", "queue", "prefill", "decode"}
    whole = named["ostinato.request"]
    for name in ("queue", "prefill", "decode"):
        assert named[name].parent.span_id == whole.context.span_id
        assert named[name].start_time <= named[name].end_time <= whole.end_time + 1000
    assert named["queue"].end_time == named["prefill"].start_time
    assert named["prefill"].end_time == named["decode"].start_time
    assert whole.attributes["http.route"] == "/test"
    assert named["decode"].attributes["gen_ai.usage.output_tokens"] == 3
    assert named["decode"].attributes["gen_ai.response.finish_reasons"] == ("length",)


def test_a_prefill_says_what_was_cached_and_no_span_says_what_was_asked(state):
    """Of 26 letters the second request finds 16 in a block and 9 more by copying; one is left."""
    text = "Tokens that a span counts."
    spans = spans_of(state, ServerConfig(), text, text)
    second = [span for span in spans if span.name == "prefill"][1].attributes
    counts = ("cached", "copied", "waited", "computed")
    assert [second[f"ostinato.{name}_tokens"] for name in counts] == [16, 9, 0, 1]
    assert second["gen_ai.usage.input_tokens"] == 26
    written = str([(span.name, dict(span.attributes)) for span in spans])
    assert text not in written and "salt of ann" not in written


def test_tenants_are_named_only_if_the_administrator_says_so(state):
    quiet = spans_of(state, ServerConfig(), "abc")
    named = spans_of(state, ServerConfig(metrics_tenant_names=True), "abc")
    assert not any("ostinato.tenant" in span.attributes for span in quiet)
    assert any(span.attributes.get("ostinato.tenant") == "ann" for span in named)


def test_a_reader_who_leaves_is_noted(state):
    spans = spans_of(state, ServerConfig(), "A reader who leaves.", leave=True)
    whole = next(span for span in spans if span.name == "ostinato.request")
    assert whole.attributes["ostinato.gone"] is True


def test_without_the_setting_there_is_no_tracer_and_nothing_is_imported(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("opentelemetry")]:
        monkeypatch.setitem(sys.modules, name, None)
    assert make_tracer(ServerConfig()) is None


def test_the_setting_without_the_extra_is_refused_by_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"ostinato\[otel\]"):
        make_tracer(ServerConfig(otel_traces=True))


def test_the_setting_sends_spans_where_opentelemetry_is_told_to(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    tracer = make_tracer(ServerConfig(otel_traces=True))
    assert tracer is not None
    tracer.close()
