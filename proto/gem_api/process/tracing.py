"""Traces by OpenTelemetry, from the extra `traces`.

Only `export` imports it. A process that has not loaded it records no spans, and pays nothing.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib import import_module
from typing import Any, TypeVar

from gem_api.process.extras import install
from gem_api.process.logs import Logger
from gem_api.process.printable import without_password

T = TypeVar("T")
_MAKING = threading.Lock()
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


def export(service: str, logger: Logger) -> None:
    """Has this process send its spans over OTLP (HTTP, protobuf), if the environment names an endpoint.

    OpenTelemetry's own variables set everything else, such as OTEL_TRACES_SAMPLER and OTEL_SERVICE_NAME.

    Args:
        service: The name of the service, unless the environment gives another.
        logger: Told if the extra is missing.
    """
    endpoint = next(filter(None, map(os.environ.get, _ENDPOINTS)), None)
    if endpoint is None:
        return
    try:
        exporter = import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
        sdk, resources = import_module("opentelemetry.sdk.trace"), import_module("opentelemetry.sdk.resources")
        processors = import_module("opentelemetry.sdk.trace.export")
    except ModuleNotFoundError as error:
        logger.warning("no traces are sent: OpenTelemetry is not installed", missing=error.name, install=install("traces"))
        return
    named = resources.Resource.create({"service.name": service}).merge(resources.OTELResourceDetector().detect())
    provider = sdk.TracerProvider(resource=named)
    provider.add_span_processor(processors.BatchSpanProcessor(exporter.OTLPSpanExporter()))
    import_module("opentelemetry.trace").set_tracer_provider(provider)
    logger.info("traces are sent", endpoint=without_password(endpoint))


def api() -> Any:
    """OpenTelemetry's module `trace`; None if this process has not loaded it."""
    return sys.modules.get("opentelemetry.trace")


def tracer(name: str) -> Any:
    """The tracer with this name, made once for the process, which must have loaded OpenTelemetry.

    Each call of OpenTelemetry's own `get_tracer` changes the process's filters of warnings: while one thread makes a tracer,
    another's warning may be an error.
    """
    with _MAKING:
        return _made(name)


@cache
def _made(name: str) -> Any:
    return api().get_tracer(name)


def span(name: str) -> AbstractContextManager[Any]:
    """A span around a block, within the present one."""
    return tracer("gem").start_as_current_span(name) if api() is not None else nullcontext()


def each_in_a_span(name: str, items: Iterable[T]) -> Iterator[T]:
    """Yields the items. A span lasts from the wait for an item until the wait for the next."""
    iterator = iter(items)
    end: Any = object()
    while True:
        with span(name):
            item = next(iterator, end)
            if item is end:
                return
            yield item


def context_of(span: Any) -> tuple[str, str]:
    """The W3C trace context of a span: its headers `traceparent` and `tracestate`, which may be empty."""
    headers: dict[str, str] = {}
    _propagator().inject(headers, api().set_span_in_context(span))
    return headers["traceparent"], headers.get("tracestate", "")


def parent(traceparent: str, tracestate: str) -> Any:
    """The context that these W3C headers name, as OpenTelemetry has it. None if they are not valid, if the span that they name
    is not sampled, or if this process has not loaded OpenTelemetry."""
    if not traceparent or (loaded := api()) is None:
        return None
    context = _propagator().extract({"traceparent": traceparent, "tracestate": tracestate})
    named = loaded.get_current_span(context).get_span_context()
    return context if named.is_valid and named.trace_flags.sampled else None


def _propagator() -> Any:
    return import_module("opentelemetry.trace.propagation.tracecontext").TraceContextTextMapPropagator()
