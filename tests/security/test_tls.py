"""TLS and mutual TLS: real certificates, real clients, and which of them are rejected."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from cryptography.hazmat.primitives import serialization
from gem_client import Admin, InvalidRequest, PermissionDenied, Retry, ServerUnavailable, connect
from gem_ctl.cli import main as ctl
from gem_server.cli import main as server_command
from gem_server.config import ServerConfig, StartError
from gem_server.security.tls import TlsFiles
from kit.certificates import Authority, Pair
from kit.model import GRADIENT, model
from kit.server import Live, config, serving
from kit.settings import configured

ONCE = Retry(give_up_after=0.0)


def encrypting(own: Pair, client_ca: Path | None = None) -> ServerConfig:
    return config(tls=TlsFiles(own.cert, own.key, client_ca))


@pytest.fixture
def tls(own: Pair) -> Iterator[Live]:
    """A server that encrypts and asks clients for nothing."""
    with serving(encrypting(own)) as live:
        yield live


@pytest.fixture
def mutual(own: Pair, authority: Authority) -> Iterator[Live]:
    """A server that asks for certificates of its own authority."""
    with serving(encrypting(own, authority.cert)) as live:
        yield live


def shown(authority: Authority, pair: Pair) -> dict[str, Any]:
    """What a client is given that believes the authority and shows a certificate."""
    return {"tls_ca": authority.cert, "tls_cert": pair.cert, "tls_key": pair.key}


def status(live: Live, **security: Any) -> str:
    """The run's id, asked for over a connection of its own."""
    with Admin(live.address, timeout=10.0, **security) as admin:
        return admin.status().run_id


# -- the server's certificate


def test_a_server_of_another_authority_is_not_believed(tls: Live, tmp_path: Path) -> None:
    stranger = Authority(tmp_path, "stranger")
    with pytest.raises(ServerUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
        status(tls, tls_ca=stranger.cert)
    with connect(tls.address, tls_ca=stranger.cert, retry=ONCE) as session, pytest.raises(ServerUnavailable):
        session.join(model())
    assert not tls.on_loop(lambda: tls.core.leases.live)


@pytest.mark.parametrize(
    ("hosts", "days", "why"),
    [(("elsewhere",), (-1, 30), "is for other hosts, not 127.0.0.1"), (("127.0.0.1",), (-9, -2), "expired.* renew it")],
    ids=["host", "expired"],
)
def test_a_certificate_for_another_host_or_time_is_not_believed(
    hosts: tuple[str, ...], days: tuple[int, int], why: str, authority: Authority
) -> None:
    own = authority.issue("server", hosts=hosts, days=days)
    with (
        serving(encrypting(own)) as live,
        pytest.raises(ServerUnavailable, match=f"^the certificate of the server at .* {why}"),
    ):
        status(live, tls_ca=authority.cert)


def test_a_client_that_does_not_encrypt_is_turned_away_and_told_how_to(tls: Live) -> None:
    with pytest.raises(ServerUnavailable, match=r"^the server at .* Does it use TLS\? Then give --tls-ca \(tls_ca in Python\)"):
        status(tls)
    result = CliRunner().invoke(ctl, ["status", "--server", tls.address])
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "Does it use TLS?" in result.stderr


def test_a_server_that_does_not_encrypt_is_not_believed(live: Live, authority: Authority) -> None:
    with pytest.raises(ServerUnavailable, match=r"^the server at .* does not use TLS: omit --tls-ca"):
        status(live, tls_ca=authority.cert)


# -- reloaded


def test_a_new_certificate_is_shown_without_a_restart_and_open_sessions_go_on(
    tls: Live, authority: Authority, tmp_path: Path
) -> None:
    with connect(tls.address, tls_ca=authority.cert) as session:
        session.join(model())
        successor = Authority(tmp_path, "successor")
        successor.issue("server", file="server")
        assert status(tls, tls_ca=successor.cert)
        with pytest.raises(ServerUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
            status(tls, tls_ca=authority.cert)
        assert session.commit(GRADIENT).version == 1


def test_while_the_files_make_no_sense_the_certificate_from_before_stays(tls: Live, own: Pair, authority: Authority) -> None:
    own.key.write_bytes(authority.issue("other").key.read_bytes())
    for _ in range(2):
        assert status(tls, tls_ca=authority.cert)
    authority.issue("server")
    assert status(tls, tls_ca=authority.cert)


def test_client_authorities_are_read_again_too(mutual: Live, authority: Authority, tmp_path: Path) -> None:
    successor = Authority(tmp_path, "successor")
    newcomer = successor.issue("admin:ops")
    security = {"tls_ca": authority.cert, "tls_cert": newcomer.cert, "tls_key": newcomer.key}
    with pytest.raises(ServerUnavailable):
        status(mutual, **security)
    old = authority.cert.read_bytes()
    believed = tmp_path / "believed.pem"  # what the client believes; the server's list is the authority's file
    believed.write_bytes(old)
    authority.cert.write_bytes(old + successor.cert.read_bytes())
    assert status(mutual, **security | {"tls_ca": believed})


# -- the client's certificate


def test_a_client_without_a_certificate_is_turned_away(mutual: Live, authority: Authority) -> None:
    with pytest.raises(ServerUnavailable):
        status(mutual, tls_ca=authority.cert)
    with Admin(mutual.address, tls_ca=authority.cert) as admin, pytest.raises(ServerUnavailable):
        admin.healthy()


@pytest.mark.parametrize("what", ["another authority's", "expired", "not yet good"])
def test_a_client_certificate_that_is_not_good_is_turned_away(
    what: str, mutual: Live, authority: Authority, tmp_path: Path
) -> None:
    issuer = Authority(tmp_path, "stranger") if what == "another authority's" else authority
    days = {"expired": (-9, -2), "not yet good": (2, 9)}.get(what, (-1, 30))
    pair = issuer.issue("admin:ops", days=days)
    with pytest.raises(ServerUnavailable):
        status(mutual, **shown(authority, pair))


def test_the_common_name_says_the_role(mutual: Live, authority: Authority) -> None:
    admin, worker, evaluator = (authority.issue(name) for name in ("admin:ops", "worker:alice", "evaluator:e"))
    with connect(mutual.address, name="alice", **shown(authority, worker)) as session:
        session.join(model())
        assert session.commit(GRADIENT).version == 1
        with Admin(mutual.address, **shown(authority, evaluator)) as judge:
            judge.report_evaluation(1, 0.5)
            with pytest.raises(PermissionDenied, match="admin"):
                judge.drain()
        with Admin(mutual.address, **shown(authority, worker)) as alice, pytest.raises(PermissionDenied, match="admin"):
            alice.drain()
    with Admin(mutual.address, **shown(authority, admin)) as operator:
        assert operator.drain() == 0
    mutual.stop()


def test_a_worker_can_take_no_other_name_than_its_certificates(mutual: Live, authority: Authority) -> None:
    mallory = shown(authority, authority.issue("worker:mallory"))
    with connect(mutual.address, name="alice", **mallory) as session, pytest.raises(PermissionDenied, match="mallory"):
        session.join(model())
    anyone = shown(authority, authority.issue("worker:*", file="anyone"))
    with connect(mutual.address, name="alice", **anyone) as session:
        session.join(model())


@pytest.mark.parametrize("name", ["alice", "root:alice", "worker:", ":alice", "WORKER:alice", "admin"])
def test_a_common_name_that_states_no_role_may_do_nothing(name: str, mutual: Live, authority: Authority) -> None:
    pair = authority.issue(name, file="odd")
    with pytest.raises(PermissionDenied, match="ROLE:NAME"):
        status(mutual, **shown(authority, pair))


# -- files that can't be used


def refusal(configuration: ServerConfig) -> str:
    """Why a server does not start."""
    with pytest.raises(StartError) as refused, serving(configuration):
        pass
    (line,) = str(refused.value).splitlines()
    return line


def test_a_server_does_not_start_with_files_that_make_no_sense(own: Pair, authority: Authority, tmp_path: Path) -> None:
    other, junk = authority.issue("other"), tmp_path / "junk"
    junk.write_text("junk")
    junk.chmod(0o600)
    assert "match" in refusal(config(tls=TlsFiles(own.cert, other.key))).lower()
    assert "junk" in refusal(config(tls=TlsFiles(own.cert, junk)))
    assert "junk" in refusal(config(tls=TlsFiles(own.cert, own.key, junk)))
    assert "none" in refusal(config(tls=TlsFiles(own.cert, tmp_path / "none")))


def test_a_key_that_others_can_read_is_refused(own: Pair) -> None:
    own.key.chmod(0o640)
    with serving(encrypting(own)):
        pass  # a group may be the service's own
    own.key.chmod(0o644)
    assert "chmod 600" in refusal(encrypting(own))


def test_a_key_with_a_passphrase_is_refused_and_asked_for_nowhere(own: Pair) -> None:
    key = serialization.load_pem_private_key(own.key.read_bytes(), None)
    locked = serialization.BestAvailableEncryption(b"secret passphrase")
    own.key.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, locked)
    )  # fmt: skip
    assert "passphrase" in refusal(encrypting(own))


@pytest.mark.parametrize("given", [["tls_cert"], ["tls_key"], ["tls_client_ca"], ["tls_cert", "tls_client_ca"]])
def test_half_of_tls_is_wrong_use(given: list[str], own: Pair) -> None:
    result = CliRunner().invoke(server_command, [configured(**dict.fromkeys(given, str(own.cert)))])
    assert result.exit_code == 2
    assert "--tls-cert and --tls-key" in result.stderr


def test_a_client_says_what_is_wrong_with_its_files(own: Pair, authority: Authority, tmp_path: Path) -> None:
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("none.pem", {"tls_ca": tmp_path / "none.pem"}),
        ("PEM", {"tls_ca": os.devnull}),
        ("holds no certificate", {"tls_ca": own.key}),
        ("tls_key", {"tls_ca": authority.cert, "tls_cert": own.cert}),
        ("tls_ca", {"tls_cert": own.cert, "tls_key": own.key}),
    ]
    for what, security in wrong:
        with pytest.raises(InvalidRequest, match=what):
            connect("127.0.0.1:1", **security)
        with pytest.raises(InvalidRequest, match=what):
            Admin("127.0.0.1:1", **security)


# -- the commands


def test_gem_ctl_takes_its_certificates_from_a_file_or_the_environment(mutual: Live, authority: Authority) -> None:
    pair = authority.issue("admin:ops")
    file = configured(tls_ca=str(authority.cert), tls_cert=str(pair.cert), tls_key=str(pair.key))
    result = CliRunner().invoke(ctl, [f"--server={mutual.address}", file, "health"])
    assert (result.exit_code, result.stdout) == (0, "serving\n"), result.stderr
    environment = {"GEM_TLS_CA": str(authority.cert), "GEM_TLS_CERT": str(pair.cert), "GEM_TLS_KEY": str(pair.key)}
    result = CliRunner().invoke(ctl, [f"--server={mutual.address}", "health"], env=environment)
    assert (result.exit_code, result.stdout) == (0, "serving\n"), result.stderr
    result = CliRunner().invoke(ctl, [f"--server={mutual.address}", "health"])
    assert result.exit_code == 1
    assert len(result.stderr.splitlines()) == 1
