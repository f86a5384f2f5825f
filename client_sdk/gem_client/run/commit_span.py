"""A commit's span in the worker's trace, if the worker records one."""

from __future__ import annotations

from typing import Any

from gem_api.process import tracing

from gem_client.answer import Answer


class CommitSpan:
    """The span around a commit, retries included. It has begun in the caller's own span. This one records nothing.

    Attributes:
        traceparent, tracestate: The W3C trace context, for the server; empty if there is none.
    """

    traceparent = tracestate = ""

    def answered(self, answer: Answer) -> None:
        """Ends it with the commit's result."""

    def failed(self, error: BaseException) -> None:
        """Ends it with an error."""


UNTRACED = CommitSpan()


class _Recorded(CommitSpan):
    def __init__(self, span: Any) -> None:
        self._span = span
        self.traceparent, self.tracestate = tracing.context_of(span)

    def answered(self, answer: Answer) -> None:
        self._span.set_attributes({"gem.staleness": answer.staleness, "gem.version": answer.version, "gem.lost": answer.lost})
        self._span.end()

    def failed(self, error: BaseException) -> None:
        self._span.record_exception(error)
        self._span.set_status(tracing.api().StatusCode.ERROR, f"{type(error).__name__}: {error}")
        self._span.end()


def begin_span(worker: str, transport: str) -> CommitSpan:
    """Begins the span of a worker's commit, which goes this way."""
    api = tracing.api()
    if api is None:
        return UNTRACED
    tracer = api.get_tracer("gem_client")
    span = tracer.start_span("commit", kind=api.SpanKind.CLIENT, attributes={"gem.worker": worker, "gem.transport": transport})
    return _Recorded(span) if span.is_recording() else UNTRACED
