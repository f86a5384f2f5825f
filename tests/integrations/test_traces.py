"""Traces: a commit's spans on the server are part of the worker's own trace, from its step to the rule."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest
from gem_api.errors import NonFiniteGradient
from gem_api.process import tracing
from gem_api.process.option_types import private_socket
from gem_api.process.tracing import each_in_a_span
from gem_client import connect
from kit.model import GRADIENT, model
from kit.process import python
from kit.raw_client import wired
from kit.server import config, serving
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

MEMORY = InMemorySpanExporter()
PARTS = ["wait to receive", "receive", "queue", "rule", "wait to send", "send"]


@pytest.fixture(scope="module")
def provider() -> TracerProvider:
    """The process's provider, which can be set once."""
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(MEMORY))
    trace.set_tracer_provider(provider)
    return provider


@pytest.fixture
def spans(provider: TracerProvider) -> Iterator[InMemorySpanExporter]:
    MEMORY.clear()
    yield MEMORY
    MEMORY.clear()


def named(spans: InMemorySpanExporter, name: str, scope: str) -> list[ReadableSpan]:
    return [
        span
        for span in spans.get_finished_spans()
        if span.name == name and span.instrumentation_scope is not None and span.instrumentation_scope.name == scope
    ]


def inside(spans: InMemorySpanExporter, parent: ReadableSpan) -> list[ReadableSpan]:
    children = [span for span in spans.get_finished_spans() if span.parent and span.parent.span_id == parent.context.span_id]
    return sorted(children, key=lambda span: span.start_time or 0)


def lasts(span: ReadableSpan) -> tuple[int, int]:
    return span.start_time or 0, span.end_time or 0


@pytest.mark.parametrize(("way", "durability"), [("memory", "snapshot"), ("tcp", "log"), ("grpc", "log")])
def test_one_trace_leads_from_the_workers_step_to_the_rule(
    way: str, durability: str, spans: InMemorySpanExporter, tmp_path: Path
) -> None:
    ways: dict[str, Any] = {"grpc": {"lane_listen": ""}, "memory": {"memory_socket": private_socket()}, "tcp": {}}
    with (
        serving(config(checkpoint_dir=tmp_path, durability=durability, **ways[way])) as live,
        connect(live.address, name="ann", shared_memory=way == "memory") as session,
    ):
        session.join(model())
        assert session.transport == way
        tracer = trace.get_tracer("the user's own")
        for _ in range(2):
            with tracer.start_as_current_span("step"):
                session.commit(GRADIENT, loss=1.0)
    steps = named(spans, "step", "the user's own")
    for number, step in enumerate(steps, 1):
        (sent,) = inside(spans, step)
        (received,) = inside(spans, sent)
        assert (sent.kind, received.kind) == (trace.SpanKind.CLIENT, trace.SpanKind.SERVER)
        assert received.context.trace_id == step.context.trace_id
        assert sent.attributes is not None
        assert received.attributes is not None
        assert sent.attributes["gem.version"] == received.attributes["gem.version"] == number
        assert received.attributes["gem.transport"] == way
        assert received.attributes["gem.worker"] == "ann"
        assert received.attributes["gem.rule"] == "gem"
        assert {"gem.staleness", "gem.pi_median"} <= received.attributes.keys()
        parts = inside(spans, received)
        expected = sorted([*PARTS, *(["log"] if durability == "log" else [])])
        assert sorted(part.name for part in parts) == expected
        for outer, inner in [(step, sent), *((received, part) for part in parts)]:
            (begin, end), (inner_begin, inner_end) = lasts(outer), lasts(inner)
            assert begin <= inner_begin <= inner_end <= end
    assert len(steps) == 2


def test_a_commit_under_way_belongs_to_the_step_that_began_it(spans: InMemorySpanExporter) -> None:
    with serving(config()) as live, connect(live.address) as session:
        session.join(model(), overlap=True)
        for number in each_in_a_span("step", range(2)):
            session.finish_commit()
            if not number:
                session.begin_commit(GRADIENT)
    first, *_ = sorted(named(spans, "step", "gem"), key=lambda span: span.start_time or 0)
    (sent,) = named(spans, "commit", "gem_client")
    assert sent.parent is not None
    assert sent.parent.span_id == first.context.span_id


def test_a_rejected_commit_is_an_error_on_both_sides(spans: InMemorySpanExporter) -> None:
    with serving(config()) as live, connect(live.address) as session:
        session.join(model())
        with pytest.raises(NonFiniteGradient):
            session.commit(GRADIENT * float("nan"))
    for scope in ("gem_client", "gem_server"):
        (span,) = named(spans, "commit", scope)
        assert span.status.status_code is trace.StatusCode.ERROR
        assert "NonFiniteGradient" in str(span.status.description)


def test_a_step_that_is_not_sampled_costs_the_server_nothing(spans: InMemorySpanExporter) -> None:
    unsampled = trace.NonRecordingSpan(trace.SpanContext(1, 1, is_remote=False, trace_flags=trace.TraceFlags(0)))
    with serving(config()) as live, connect(live.address) as session, trace.use_span(unsampled):
        session.join(model())
        session.commit(GRADIENT)
    assert spans.get_finished_spans() == ()


@pytest.mark.parametrize("traceparent", ["00-nonsense", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "x" * 1000])
def test_a_trace_context_that_is_not_valid_is_ignored(traceparent: str, spans: InMemorySpanExporter) -> None:
    with serving(config()) as live, wired(live) as wire:
        worker = wire.started("ann")
        opening = worker.header(traceparent=traceparent, tracestate=traceparent)
        assert worker.whole(opening, *worker.body()).answer(worker.size)[0].version == 1
    assert named(spans, "commit", "gem_server") == []


def test_a_tracer_is_made_once_for_all_spans(spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenTelemetry changes the process's filters of warnings with each tracer that it makes, which no two threads may do."""
    made = Mock(wraps=trace.get_tracer)
    monkeypatch.setattr(trace, "get_tracer", made)
    tracing._made.cache_clear()
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: list(each_in_a_span("data", range(20))), range(4)))
    assert len(named(spans, "data", "gem")) == 84  # a span for each item, and one for each end
    made.assert_called_once_with("gem")


class Collector(BaseHTTPRequestHandler):
    """Takes what is sent over OTLP, as OpenTelemetry's collector does."""

    received: ClassVar[list[ExportTraceServiceRequest]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.received.append(ExportTraceServiceRequest.FromString(body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Says nothing."""


SENDS_A_SPAN = """
import structlog
from gem_api.process.tracing import export, span
export("gem-worker", structlog.get_logger())
with span("step"):
    pass
"""


@pytest.mark.parametrize(("names", "service"), [({}, "gem-worker"), ({"OTEL_SERVICE_NAME": "mine"}, "mine")])
def test_spans_are_sent_to_the_endpoint_that_the_environment_names(names: dict[str, str], service: str) -> None:
    Collector.received.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.server_port}"
        ended = python("-c", SENDS_A_SPAN, OTEL_EXPORTER_OTLP_ENDPOINT=endpoint, **names)
        server.shutdown()
    assert ended.returncode == 0, ended.stderr
    ((sent,),) = (request.resource_spans for request in Collector.received)
    assert [span.name for scope in sent.scope_spans for span in scope.spans] == ["step"]
    assert {each.key: each.value.string_value for each in sent.resource.attributes}["service.name"] == service


def test_the_log_does_not_have_the_endpoints_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "https://ann:secret@collector:4318")
    monkeypatch.setattr(tracing, "import_module", Mock())
    logger = Mock()
    tracing.export("gem-server", logger)
    logger.info.assert_called_once_with("traces are sent", endpoint="https://***@collector:4318")


def test_an_endpoint_without_the_extra_is_a_warning_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    monkeypatch.setattr(tracing, "import_module", missing)
    logger = Mock()
    tracing.export("gem-server", logger)
    (warning,) = logger.warning.call_args_list
    assert warning.kwargs["install"] == 'pip install ".[traces]" in a clone of this project'
