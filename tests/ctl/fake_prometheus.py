"""A Prometheus over HTTP whose responses a test decides, and one run that it saw."""

from __future__ import annotations

import json
import re
import threading
import urllib.parse
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from gem_ctl.prometheus import Prometheus
from gem_ctl.report import Run, find_run

NOW = 1_700_000_000.0
BEGIN = NOW - 3600
SETTINGS = {"rule": "gem", "learning_rate": "0.05", "momentum": "0.9"}
RUN = Run("one", "server:9464", SETTINGS, BEGIN, BEGIN + 600)
Answer = tuple[int, bytes]
Labels = dict[str, str]


class FakePrometheus:
    """A Prometheus over HTTP that holds what it is given, whatever the query does with it.

    Attributes:
        url: Where it is.
        asked: Every question: what of the API, and its arguments.
        numbers: Answers to `query`: the first whose key is part of the query.
        vectors: Likewise, for answers of several series: labels and value of each.
        targets: Answer to `targets`.
        respond: Answers in place of everything else, where it is set; None hangs up.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.numbers: dict[str, str] = {}
        self.vectors: dict[str, list[tuple[Labels, str]]] = {}
        self.targets: Any = [{"labels": {"job": "gem-server", "instance": "server:9464"}, "scrapeInterval": "5s"}]
        self.respond: Callable[[], Answer | None] | None = None
        self._series: list[tuple[str, Labels, list[tuple[float, str]]]] = []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                url = urllib.parse.urlparse(self.path)
                answer = fake._answer(url.path, dict(urllib.parse.parse_qsl(url.query)))
                if answer is not None:
                    self.send_response(answer[0])
                    self.end_headers()
                    self.wfile.write(answer[1])

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    @property
    def client(self) -> Prometheus:
        return Prometheus(self.url)

    def holds(self, pattern: str, labels: Labels, values: Any, begin: float = BEGIN, step: float = 5.0) -> None:
        """A series that answers every range query in which the pattern is found, whatever its step."""
        self._series.append((pattern, labels, [(begin + step * number, str(value)) for number, value in enumerate(values)]))

    def holds_everything(self, begin: float = BEGIN, samples: int = 121, without: str = "$^") -> None:
        """Two buckets for every panel's query in which `without` is not found."""
        for bound, count in {"1.0": 2, "+Inf": 3}.items():
            values = [count * (1 + number % 7) for number in range(samples)]
            self.holds(rf'^(?!gem_run_info|ALERTS|gem_central_version{{instance="|.*({without}))', {"le": bound}, values, begin)

    def has_run(
        self, run_id: str, instance: str = "server:9464", begin: float = BEGIN, seconds: int = 600, **more: str
    ) -> None:
        """A run that was seen from `begin` on, by its settings."""
        labels = {"__name__": "gem_run_info", "job": "gem-server", "instance": instance, "run_id": run_id, **SETTINGS, **more}
        self.holds(r"^last_over_time\(gem_run_info", labels, ["1"] * (seconds // 5 + 1), begin)

    def queries(self, what: str = "query_range") -> list[str]:
        return [arguments["query"] for kind, arguments in self.asked if kind == what]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, path: str, arguments: dict[str, str]) -> Answer | None:
        what = path.rpartition("/api/v1/")[2]
        self.asked.append((what, arguments))
        if self.respond is not None:
            return self.respond()
        data = {"targets": self._targets, "query": self._value, "query_range": self._range}[what](arguments)
        return 200, json.dumps({"status": "success", "data": data}).encode()

    def _targets(self, arguments: dict[str, str]) -> Any:
        return {"activeTargets": self.targets}

    def _value(self, arguments: dict[str, str]) -> Any:
        found: list[Any] = [[({}, number)] for part, number in self.numbers.items() if part in arguments["query"]]
        found += [vector for part, vector in self.vectors.items() if part in arguments["query"]]
        rows = [{"metric": labels, "value": [float(arguments["time"]), value]} for labels, value in (found or [[]])[0]]
        return {"resultType": "vector", "result": rows}

    def _range(self, arguments: dict[str, str]) -> Any:
        begin, end = float(arguments["start"]), float(arguments["end"])
        result = []
        for pattern, labels, samples in self._series:
            within = [sample for sample in samples if begin <= sample[0] <= end]
            if within and re.search(pattern, arguments["query"]):
                result.append({"metric": labels, "values": within})
        return {"resultType": "matrix", "result": result}


def found(fake: FakePrometheus, run_id: str | None = None, last: float = 86400.0) -> Run:
    return find_run(fake.client, run_id, last, NOW)
