"""A request to a server's HTTP port."""

from __future__ import annotations

import http.client
import json
from dataclasses import dataclass
from typing import Any

from kit.server import DEADLINE


@dataclass
class Response:
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    def json(self) -> Any:
        def refuse(constant: str) -> None:
            raise AssertionError(f"{constant} is not JSON")

        return json.loads(self.body, parse_constant=refuse)


def ask_address(address: str, path: str, method: str = "GET", headers: dict[str, str] | None = None) -> Response:
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=DEADLINE)
    try:
        connection.request(method, path, headers=headers or {})
        response = connection.getresponse()
        return Response(response.status, response.headers, response.read())
    finally:
        connection.close()
