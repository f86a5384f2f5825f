"""The client of Prometheus's API: any response is either understood or a `PrometheusError` that says why."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from ctl.fake_prometheus import BEGIN, NOW, RUN, Answer, FakePrometheus
from gem_ctl.prometheus import Prometheus, PrometheusError
from gem_ctl.report import page

# A warning of Matplotlib or NumPy would reach the user's terminal.
pytestmark = pytest.mark.filterwarnings("error")


@pytest.mark.parametrize("url", ["", "127.0.0.1:9090", "ftp://127.0.0.1", "file:///etc/passwd"])
def test_an_address_without_http_is_refused(url: str) -> None:
    with pytest.raises(PrometheusError, match="write http://HOST:9090"):
        Prometheus(url)


@pytest.mark.parametrize("url", ["http://", "http://127.0.0.1:port", "http://127.0.0.1:99999", "http://a b", "http://[::1"])
def test_an_address_that_makes_no_sense_is_an_error_of_its_own_kind(url: str) -> None:
    with pytest.raises(PrometheusError):
        Prometheus(url).value("x", NOW)


def test_nobody_there_is_an_error_that_names_the_address() -> None:
    with socket.socket() as taken:  # bound, but it does not listen
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(PrometheusError, match=re.escape(url)):
            Prometheus(url).range("x", 0, 1, 1)


def test_who_does_not_answer_in_time_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(PrometheusError, match="timed out"):
        Prometheus(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout=0.05).value("x", NOW)


def test_a_prometheus_may_live_below_a_path(fake: FakePrometheus) -> None:
    fake.numbers = {"x": "1"}
    assert Prometheus(f"{fake.url}/prometheus/").value("x", NOW) == 1


def test_series_come_with_their_labels_and_all_kinds_of_numbers(fake: FakePrometheus) -> None:
    fake.holds("x", {"a": "b"}, ["1", "-2.5e-3", "NaN", "+Inf", "-Inf"])
    (one,) = fake.client.range("x", BEGIN, NOW, 5)
    assert one.labels == {"a": "b"}
    np.testing.assert_array_equal(one.times, BEGIN + 5.0 * np.arange(5))
    np.testing.assert_array_equal(one.values, [1, -2.5e-3, np.nan, np.inf, -np.inf])


def test_no_series_is_an_empty_list_and_no_value_is_none(fake: FakePrometheus) -> None:
    assert fake.client.range("x", BEGIN, NOW, 5) == []
    assert fake.client.value("x", NOW) is None


@pytest.mark.parametrize(("text", "value"), [("0", 0.0), ("1e9", 1e9), ("+Inf", np.inf), ("-Inf", -np.inf)])
def test_a_value_is_a_number(fake: FakePrometheus, text: str, value: float) -> None:
    fake.numbers = {"x": text}
    assert fake.client.value("x", NOW) == value


def test_a_question_is_passed_on_to_the_letter(fake: FakePrometheus) -> None:
    query = 'x{a="&=+ %20#π"}'
    fake.client.range(query, 1.25, 2.5, 0.5)
    assert fake.asked == [("query_range", {"query": query, "start": "1.250", "end": "2.500", "step": "0.500"})]


def refusal(status: int, **body: Any) -> Callable[[], Answer]:
    return lambda: (status, json.dumps({"status": "error", **body}).encode())


@pytest.mark.parametrize(
    ("respond", "words"),
    [
        (refusal(400, errorType="bad_data", error="parse error: unexpected }"), "parse error: unexpected }"),
        (refusal(422, errorType="execution", error="too many samples"), "too many samples"),
        (refusal(503, errorType="timeout", error="query timed out"), "query timed out"),
        (refusal(503), "503"),
        (lambda: (503, b"Service Unavailable"), "503"),
        (lambda: (404, b"<html>not found</html>"), "404"),
        (lambda: (500, b"[]"), "500"),
        (lambda: (401, b""), "401"),
    ],
)
def test_a_refusal_is_an_error_that_says_why(fake: FakePrometheus, respond: Callable[[], Answer], words: str) -> None:
    fake.respond = respond
    for ask in questions(fake.client):
        with pytest.raises(PrometheusError, match=re.escape(words)):
            ask()


def questions(client: Prometheus) -> list[Callable[[], object]]:
    return [lambda: client.range("x", BEGIN, NOW, 5), lambda: client.value("x", NOW), lambda: page(client, RUN, NOW)]


GARBAGE = {
    "nothing": b"",
    "HTML": b"<html>log in first</html>",
    "no UTF-8": b'{"data": "\xff"}',
    "half of it": b'{"status": "success", "data": {"resul',
    "a list": b"[]",
    "a number": b"7",
    "no data": b'{"status": "success"}',
    "data that is null": b'{"status": "success", "data": null}',
    "data that is a list": b'{"status": "success", "data": []}',
    "data without a result": b'{"status": "success", "data": {}}',
    "a result that is a number": b'{"data": {"result": 7, "activeTargets": 7}}',
    "a result of another kind": b'{"data": {"result": [7], "activeTargets": [7]}}',
    "no values": b'{"data": {"result": [{"metric": {}}], "activeTargets": [{"scrapeInterval": 7}]}}',
    "no numbers": b'{"data": {"result": [{"metric": {}, "values": [[1, "x"]], "value": [1, "x"]}], "activeTargets": 7}}',
}


@pytest.mark.parametrize("body", GARBAGE.values(), ids=GARBAGE)
def test_an_answer_that_is_none_of_a_prometheus_is_an_error(fake: FakePrometheus, body: bytes) -> None:
    fake.respond = lambda: (200, body)
    for ask in questions(fake.client):
        with pytest.raises(PrometheusError, match=re.escape(fake.url)):
            ask()


RUDE = {
    "hangs up": b"",
    "hangs up in the headers": b"HTTP/1.1 200 OK\r\nContent-Le",
    "hangs up in the answer": b'HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{"status": "success", "data"',
    "hangs up in a chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n100\r\n{",
    "hangs up in a refusal": b"HTTP/1.1 503 Busy\r\nContent-Length: 1000\r\n\r\n{",
    "speaks no HTTP": b"\x00\x00\x12\x04\x00\x00\x00\x00\x00\r\n\r\n",
    "never ends a line": b"HTTP/1.1 200 " + b"x" * 70_000,
    "redirects to itself": b"HTTP/1.1 302 Found\r\nLocation: /api/v1/query\r\nContent-Length: 0\r\n\r\n",
}


@pytest.fixture(params=list(RUDE.values()), ids=list(RUDE))
def rude(request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of a server that reads a request, answers with these bytes and hangs up."""

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.recv(1 << 16)
                connection.sendall(request.param)

    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(5)


def test_a_connection_that_breaks_is_an_error(rude: str) -> None:
    with pytest.raises(PrometheusError):
        Prometheus(rude, timeout=5).value("x", NOW)
