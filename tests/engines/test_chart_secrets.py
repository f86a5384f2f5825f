"""The tokens, the authority and the certificate that the chart makes: right for server and clients, and kept by an upgrade."""

from __future__ import annotations

import base64
import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import helm_python
import pytest
import structlog
import yaml
from engines.chart import CHART, NAMESPACE, RELEASE, Object, named, objects, pod_specs, rendered, values_of
from gem_server.security.tokens import TokenFile

ROLES = ("worker", "evaluator", "admin")


Secrets = dict[str, dict[str, str]]  # the decoded content, by the name of the Secret and its key
TOKENS, AUTHORITY, CERTIFICATE = (f"{RELEASE}-gem-{name}" for name in ("tokens", "authority", "tls"))


def secrets_of(of: list[Object]) -> list[Object]:
    return [each for each in of if each["kind"] == "Secret"]


def decoded(of: list[Object]) -> Secrets:
    return {
        each["metadata"]["name"]: {key: base64.b64decode(text).decode() for key, text in each["data"].items()}
        for each in secrets_of(of)
    }


@contextmanager
def kubernetes(there: list[Object]) -> Iterator[str]:
    """An API server with these Secrets: as much of it as Helm's `lookup` asks for. Yields its address."""
    resource = {"name": "secrets", "singularName": "secret", "namespaced": True, "kind": "Secret", "verbs": ["get"]}
    answers: dict[str, Object] = {
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": []},
        "/api/v1": {"kind": "APIResourceList", "groupVersion": "v1", "resources": [resource]},
        "/version": {"major": "1", "minor": "37", "gitVersion": "v1.37.0"},
    }
    for each in secrets_of(there):
        answers[f"/api/v1/namespaces/{NAMESPACE}/secrets/{each['metadata']['name']}"] = each
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


def upgraded(there: list[Object], values: Object | None = None) -> Secrets:
    """The content of the Secrets that an upgrade renders on a cluster with these objects."""
    with (
        kubernetes(there) as address,
        helm_python.Config(kube_apiserver=address, namespace=NAMESPACE) as config,
        helm_python.Chart.load(CHART) as chart,
    ):
        texts = config.render(chart, values=values or {}, name=RELEASE, namespace=NAMESPACE, is_upgrade=True)
    return decoded(
        [each for path, text in texts.items() if path.endswith(".yaml") for each in yaml.safe_load_all(text) if each]
    )


# -- tokens


def test_the_server_understands_the_tokens_that_the_chart_makes(tmp_path: Path) -> None:
    data = decoded(objects())[TOKENS]
    file = tmp_path / "tokens"
    file.touch(mode=0o600)
    file.write_text(data["tokens"])
    tokens = TokenFile(file, structlog.get_logger())
    assert [tokens.find(data[role]).role for role in ROLES] == list(ROLES)
    assert decoded(objects())[TOKENS]["admin"] != data["admin"], "every release has tokens of its own"


def test_an_upgrade_keeps_all_that_is_secret_and_what_was_added_to_the_tokens() -> None:
    there = objects()
    assert upgraded([]).keys() == decoded(there).keys()
    assert upgraded([]) != decoded(there), "a first install makes new ones"
    tokens = named(there, "Secret", TOKENS)["data"]
    more = base64.b64decode(tokens["tokens"]) + b"notebook-0123456789abcdef worker notebook\n"
    tokens["tokens"] = base64.b64encode(more).decode()
    assert upgraded(there) == decoded(there)


def test_an_upgrade_makes_only_the_tokens_that_are_missing() -> None:
    there = objects()
    before = decoded(there)[TOKENS]
    data = named(there, "Secret", TOKENS)["data"]
    del data["evaluator"], data["tokens"]
    after = upgraded(there)[TOKENS]
    assert {role: after[role] for role in ("worker", "admin")} == {role: before[role] for role in ("worker", "admin")}
    assert f"{after['evaluator']} evaluator\n" in after["tokens"]


# -- the authority and the certificate


def trusts(authority: str, certificate: dict[str, str], name: str, folder: Path) -> bool:
    """Whether a client that trusts the authority connects to a server with the certificate by this name."""
    for key, text in certificate.items():
        (folder / key).write_text(text)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    client = ssl.create_default_context(cadata=authority)
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    ways = ssl.MemoryBIO(), ssl.MemoryBIO()
    one, other = client.wrap_bio(*ways, server_hostname=name), server.wrap_bio(*ways[::-1], server_side=True)
    try:
        for end in (one, other, one, other):
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()
    except ssl.SSLCertVerificationError:
        return False
    return one.version() is not None


def test_clients_trust_the_server_by_each_of_its_names_and_by_no_other(tmp_path: Path) -> None:
    secrets = decoded(objects())
    of_client = secrets[CERTIFICATE]["ca.crt"]
    for name in (
        "demo-gem",
        "demo-gem.ml",
        "demo-gem.ml.svc",
        "demo-gem.ml.svc.cluster.local",
        "localhost",
        "127.0.0.1",
        "::1",
    ):
        assert trusts(of_client, secrets[CERTIFICATE], name, tmp_path), name
    assert not trusts(of_client, secrets[CERTIFICATE], "other-gem", tmp_path)
    assert not trusts(decoded(objects())[CERTIFICATE]["ca.crt"], secrets[CERTIFICATE], "demo-gem", tmp_path), (
        "another release's"
    )


def test_other_names_get_another_certificate_of_the_same_authority(tmp_path: Path) -> None:
    there = objects()
    before, after = decoded(there), upgraded(there, {"server": {"ranges": 2}})
    assert after[AUTHORITY] == before[AUTHORITY]
    pod = "demo-gem-server-1.demo-gem-headless.ml.svc"
    assert not trusts(before[CERTIFICATE]["ca.crt"], before[CERTIFICATE], pod, tmp_path)
    assert trusts(before[CERTIFICATE]["ca.crt"], after[CERTIFICATE], pod, tmp_path)


@pytest.mark.parametrize("lost", [AUTHORITY, CERTIFICATE])
def test_a_secret_that_was_deleted_is_made_again_and_fits_the_other(lost: str, tmp_path: Path) -> None:
    there = objects()
    before, after = decoded(there), upgraded([each for each in there if each["metadata"]["name"] != lost])
    assert (after[AUTHORITY] == before[AUTHORITY]) == (lost == CERTIFICATE)
    assert after[CERTIFICATE] != before[CERTIFICATE]
    assert trusts(after[AUTHORITY]["tls.crt"], after[CERTIFICATE], "demo-gem", tmp_path)


def test_no_pod_reads_the_authoritys_key() -> None:
    for owner, spec in pod_specs(objects()).items():
        assert AUTHORITY not in str(spec), owner
        (tls,) = [volume["secret"] for volume in spec["volumes"] if volume["name"] == "tls"]
        assert owner.startswith("StatefulSet") or [each["key"] for each in tls["items"]] == ["ca.crt"], owner


# -- tools that render without the cluster


def test_argo_cd_leaves_out_what_would_be_another_at_each_rendering() -> None:
    """Then pods wait for a Secret, instead of being locked out by the next one."""
    for each in secrets_of(objects()):
        assert each["metadata"]["annotations"]["argocd.argoproj.io/hook"] == "Skip", each["metadata"]["name"]
    assert "demo-gem-tokens, demo-gem-tls, demo-gem-authority. `helm upgrade` keeps them" in rendered()["NOTES.txt"]


def test_with_secrets_of_ones_own_every_rendering_is_the_same() -> None:
    values = values_of("gitops")
    assert rendered(values) == rendered(values)
    assert secrets_of(objects(values)) == []
    assert "keeps them" not in rendered(values)["NOTES.txt"]
