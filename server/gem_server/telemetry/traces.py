"""A commit's way through the server, as spans of OpenTelemetry in the worker's trace."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from gem_api.process import tracing
from gem_api.v1 import training_pb2 as pb

from gem_server.apply_loop import Timing
from gem_server.core.facts import Applied
from gem_server.core.state_machine import Core


class Trace:
    """What one commit spends its time on. This one records nothing: the commit belongs to no trace."""

    def part(self, name: str, began: float, ended: float) -> None:
        """Adds a part, from and to these seconds of the server's clock."""

    def held(self, began: float, ended: float) -> None:
        """The commit's reply waited for other workers' commits."""

    def ready(self, now: float) -> None:
        """The commit's result is ready: it is applied, and on the disk if there is a log."""

    def failed(self, why: str) -> None:
        """The commit has failed."""

    def end(self) -> None:
        """The commit is answered, or its call has ended."""


UNTRACED = Trace()


class Traces:
    """The commits of workers that record a trace which is sampled. The others cost nothing here.

    Args:
        core: The state machine.
        clock: Returns monotonic seconds.
        wall: Converts them to Unix seconds.
    """

    def __init__(self, core: Core, clock: Callable[[], float], wall: Callable[[float], float]) -> None:
        self.core, self.clock, self.wall = core, clock, wall
        self._open: dict[str, _Recorded] = {}
        self._thread = ThreadPoolExecutor(1, "traces")  # spans are made here: no other commit waits for that

    def begin(self, header: pb.CommitHeader, transport: str) -> Trace:
        """The trace of a commit whose header has arrived, until its `end`."""
        context = tracing.parent(header.traceparent, header.tracestate)
        if context is None:
            return UNTRACED
        lease = self.core.leases.live.get(header.lease_id)
        worker, rule = lease.worker if lease is not None else "", self.core.settings.rule
        facts = {"gem.worker": worker, "gem.sequence": header.sequence, "gem.transport": transport, "gem.rule": rule}
        recorded = self._open[worker] = _Recorded(self, context, worker, facts)
        return recorded

    def applied(self, applied: Applied, timing: Timing) -> None:
        """Adds a commit's time in the queue and in the rule, right after that. An observer of the apply loop."""
        recorded = self._open.get(applied.worker)
        if recorded is not None:
            recorded.applied(applied, timing)

    def close(self) -> None:
        """Waits until all spans are made. No commit may end later."""
        self._thread.shutdown()

    def ended(self, recorded: _Recorded, now: float) -> None:
        """Makes the spans of a commit that ends now."""
        if self._open.get(recorded.worker) is recorded:
            del self._open[recorded.worker]
        self._thread.submit(recorded.make_spans, now)


class _Recorded(Trace):
    """A commit's parts until it ends. Only then they become spans."""

    def __init__(self, traces: Traces, context: Any, worker: str, facts: dict[str, Any]) -> None:
        self._traces, self._context, self.worker, self._facts = traces, context, worker, facts
        self._began = traces.clock()
        self._parts: list[tuple[str, float, float]] = []
        self._applied_at: float | None = None
        self._failure = ""

    def part(self, name: str, began: float, ended: float) -> None:
        self._parts.append((name, began, ended))

    def applied(self, applied: Applied, timing: Timing) -> None:
        now = self._traces.clock()
        began = now - timing.applied
        self.part("queue", began - timing.waited, began)
        self.part("rule", began, now)
        self._applied_at = now
        self._facts |= {"gem.staleness": applied.staleness, "gem.version": applied.version}
        if applied.pi is not None:
            self._facts["gem.pi_median"] = applied.pi.median

    def held(self, began: float, ended: float) -> None:
        self.part("wait for others", began, ended)
        self._applied_at = ended

    def ready(self, now: float) -> None:
        if self._traces.core.logged and self._applied_at is not None:
            self.part("log", self._applied_at, now)

    def failed(self, why: str) -> None:
        self._failure = why

    def end(self) -> None:
        self._traces.ended(self, self._traces.clock())

    def make_spans(self, ended: float) -> None:
        shift = int(self._traces.wall(0.0) * 1e9)  # once: the two clocks are not read at the same moment

        def unix(at: float) -> int:
            return shift + int(at * 1e9)

        api = tracing.api()
        tracer = api.get_tracer("gem_server")
        span = tracer.start_span("commit", self._context, api.SpanKind.SERVER, self._facts, start_time=unix(self._began))
        inside = api.set_span_in_context(span)
        for name, began, until in self._parts:
            tracer.start_span(name, inside, start_time=unix(began)).end(unix(until))
        if self._failure:
            span.set_status(api.StatusCode.ERROR, self._failure)
        span.end(unix(ended))
