"""A commit's way through the server, as spans of OpenTelemetry in the worker's trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from gem_api.process import tracing
from gem_api.v1 import training_pb2 as pb

from gem_server.commit_times import CommitTimes
from gem_server.core.state_machine import Core

Part = tuple[str, float, float]  # its name, when it began, and when it ended


class Traces:
    """The commits of workers that record a trace which is sampled. The others cost nothing here.

    Args:
        core: The state machine.
        wall: Converts seconds of the server's clock to Unix seconds.
    """

    def __init__(self, core: Core, wall: Callable[[float], float]) -> None:
        self._core, self._wall = core, wall
        self._thread = ThreadPoolExecutor(1, "traces")  # spans are made here: no other commit waits for that

    def add(self, header: pb.CommitHeader, transport: str, times: CommitTimes, failure: str) -> None:
        """Makes the spans of a commit that has ended, with the reason if it failed."""
        context = tracing.parent(header.traceparent, header.tracestate)
        if context is None:
            return
        lease, rule = self._core.leases.live.get(header.lease_id), self._core.settings.rule
        attributes = {"gem.sequence": header.sequence, "gem.transport": transport, "gem.rule": rule}
        attributes["gem.worker"] = lease.worker if lease is not None else ""
        applied = lease.last_applied if lease is not None and times.applied else None
        if applied is not None:
            attributes |= {"gem.staleness": applied.staleness, "gem.version": applied.version}
            if applied.pi is not None:
                attributes["gem.pi_median"] = applied.pi.median
        self._thread.submit(self._make_spans, context, attributes, times, _parts(times, self._core.logged), failure)

    def close(self) -> None:
        """Waits until all spans are made. No commit may end later."""
        self._thread.shutdown()

    def _make_spans(
        self, context: Any, attributes: dict[str, Any], times: CommitTimes, parts: Sequence[Part], failure: str
    ) -> None:
        shift = int(self._wall(0.0) * 1e9)  # once: the two clocks are not read at the same moment

        def unix(at: float) -> int:
            return shift + int(at * 1e9)

        api, tracer = tracing.api(), tracing.tracer("gem_server")
        span = tracer.start_span("commit", context, api.SpanKind.SERVER, attributes, start_time=unix(times.began))
        inside = api.set_span_in_context(span)
        for name, began, ended in parts:
            tracer.start_span(name, inside, start_time=unix(began)).end(unix(ended))
        if failure:
            span.set_status(api.StatusCode.ERROR, failure)
        span.end(unix(times.ended))


def _parts(times: CommitTimes, logged: bool) -> list[Part]:
    """The steps that a commit spent its time on, as far as it got."""
    all_parts = (
        ("wait to receive", times.upload_asked, times.upload_began),
        ("receive", times.upload_began, times.received),
        ("queue", times.queued, times.rule_began),
        ("rule", times.rule_began, times.applied),
        ("wait for others", times.held, times.released),
        ("log", times.released or times.applied if logged else 0.0, times.ready),
        ("wait to send", times.ready, times.send_began),
        ("send", times.send_began, times.sent),
    )
    return [part for part in all_parts if part[1] and part[2]]
