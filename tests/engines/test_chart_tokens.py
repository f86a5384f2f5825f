"""The tokens that the chart makes: understood by the server, and kept by an upgrade."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import helm_python
import structlog
import yaml
from engines.chart import CHART, NAMESPACE, RELEASE, Object, found, objects
from gem_server.security.tokens import TokenFile

ROLES = ("worker", "evaluator", "admin")


def decoded(secret: Object) -> dict[str, str]:
    return {key: base64.b64decode(text).decode() for key, text in secret["data"].items()}


@contextmanager
def kubernetes(secret: Object | None) -> Iterator[str]:
    """An API server with one Secret or none: as much of it as Helm's `lookup` asks for. Yields its address."""
    path = f"/api/v1/namespaces/{NAMESPACE}/secrets/{RELEASE}-gem-tokens"
    resource = {"name": "secrets", "singularName": "secret", "namespaced": True, "kind": "Secret", "verbs": ["get"]}
    answers: dict[str, Object] = {
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": []},
        "/api/v1": {"kind": "APIResourceList", "groupVersion": "v1", "resources": [resource]},
        "/version": {"major": "1", "minor": "37", "gitVersion": "v1.37.0"},
    }
    if secret:
        answers[path] = secret
    missing: Object = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = self.path.partition("?")[0] in answers
            body = json.dumps(answers[self.path.partition("?")[0]] if found else missing).encode()
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 the base class names it so
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def on(address: str) -> dict[str, str]:
    """The content of the Secret that an upgrade on this API server renders."""
    with helm_python.Config(kube_apiserver=address, namespace=NAMESPACE) as config, helm_python.Chart.load(CHART) as chart:
        texts = config.render(chart, name=RELEASE, namespace=NAMESPACE, is_upgrade=True)
    return decoded(yaml.safe_load(texts["gem/templates/token-secret.yaml"]))


def test_the_server_understands_the_tokens_that_the_chart_makes(tmp_path: Path) -> None:
    data = decoded(found(objects(), "Secret"))
    file = tmp_path / "tokens"
    file.touch(mode=0o600)
    file.write_text(data["tokens"])
    tokens = TokenFile(file, structlog.get_logger())
    assert [tokens.find(data[role]).role for role in ROLES] == list(ROLES)
    assert decoded(found(objects(), "Secret"))["admin"] != data["admin"], "every release has tokens of its own"


def test_an_upgrade_keeps_the_tokens_and_what_was_added_to_them() -> None:
    secret = found(objects(), "Secret")
    with kubernetes(None) as address:
        assert on(address) != decoded(secret), "a first install makes new ones"
    more = decoded(secret)["tokens"] + "notebook-0123456789abcdef worker notebook\n"
    secret["data"]["tokens"] = base64.b64encode(more.encode()).decode()
    with kubernetes(secret) as address:
        assert on(address) == decoded(secret)


def test_an_upgrade_makes_only_the_tokens_that_are_missing() -> None:
    secret = found(objects(), "Secret")
    before = decoded(secret)
    del secret["data"]["evaluator"], secret["data"]["tokens"]
    with kubernetes(secret) as address:
        after = on(address)
    assert {role: after[role] for role in ("worker", "admin")} == {role: before[role] for role in ("worker", "admin")}
    assert f"{after['evaluator']} evaluator\n" in after["tokens"]
