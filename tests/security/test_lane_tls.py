"""The lane of a server with TLS: who is believed, who is let in, and that nothing crosses it in the clear."""

from __future__ import annotations

import select
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives import serialization
from gem_api.v1 import lane_pb2, training_pb2
from gem_client import ServerUnavailable, connect
from gem_client.run.pending_commit import PendingCommit
from gem_client.transport.security import Security
from gem_client.transport.theta_receiver import IN_FLOAT32
from gem_server.security.access import ANYONE
from gem_server.security.tls import TlsFiles
from kit.certificates import Authority, Pair
from kit.listening import answering
from kit.model import ELSEWHERE, GRADIENT, Wire, in_background, lane_port_of, model, theta, transports
from kit.raw_lane import HELLO, message
from kit.server import DEADLINE, Live, config, serving

HOSTS = ("localhost", "127.0.0.1", ELSEWHERE)
SEEN = GRADIENT.tobytes()


@pytest.fixture
def live(own: Pair, authority: Authority) -> Iterator[Live]:
    """A server that encrypts, and asks for certificates."""
    with serving(config(tls=TlsFiles(own.cert, own.key, authority.cert))) as server:
        yield server


@pytest.fixture
def shown(authority: Authority) -> dict[str, Any]:
    """What a worker is given: whom it believes, and its certificate."""
    pair = authority.issue("worker:*", file="worker")
    return {"tls_ca": authority.cert, "tls_cert": pair.cert, "tls_key": pair.key}


def assert_trains(live: Live, address: str, transport: str, **security: Any) -> None:
    with connect(address, **security) as session:
        session.join(model())
        for _ in range(2):
            np.testing.assert_array_equal(session.commit(GRADIENT).theta, theta(live))
        assert transports(live) == {session.name: transport}


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_worker_trains_over_an_encrypted_lane(host: str, live: Live, shown: dict[str, Any]) -> None:
    assert_trains(live, f"{host}:{live.server.port}", "tls", **shown)


def test_nothing_of_a_commit_can_be_read_on_the_way(live: Live, shown: dict[str, Any]) -> None:
    """And on a lane without TLS it can: this test would notice."""
    with serving(config()) as plain, tapped(plain, lane_port_of(plain)) as (address, heard):
        assert_trains(plain, address, "tcp")
        assert SEEN in b"".join(heard)
    with tapped(live, lane_port_of(live)) as (address, heard):
        assert_trains(live, address, "tls", **shown)
        assert len(b"".join(heard)) > 1000
        assert SEEN not in b"".join(heard)
        assert b"GEML" not in b"".join(heard)


@contextmanager
def tapped(live: Live, port: int) -> Iterator[tuple[str, list[bytes]]]:
    """An address of the server, and what passes on the way to and from its lane."""
    heard: list[bytes] = []
    with (
        Wire(live.address) as wire,
        answering(socket.create_server((ELSEWHERE, port)), lambda client: _relay(client, port, heard)),
    ):
        yield wire.address, heard


def _relay(client: socket.socket, port: int, heard: list[bytes]) -> None:
    def carry(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                heard.append(data)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    with socket.create_connection(("127.0.0.1", port)) as server:
        back = threading.Thread(target=carry, args=(server, client), daemon=True)
        back.start()
        carry(client, server)
        back.join(DEADLINE)


def test_a_lane_that_another_thread_closes_stays_encrypted(live: Live, shown: dict[str, Any]) -> None:
    """Python's way to shut an encrypted socket down drops the encryption first: the rest of a gradient could go out without."""
    half = np.frombuffer(SEEN, np.uint8)[: len(SEEN) // 2]
    with connect(live.address, **shown) as session:
        session.join(model())
        lane = session._member.links.leader.connection.lane
        assert lane is not None
        encrypted: Any = lane._sock
        ended = select.poll()
        ended.register(encrypted, 0)

        def pieces() -> Iterator[Any]:
            yield half
            closing.append(in_background(lane.close))
            assert ended.poll(1000 * DEADLINE), "the connection has not ended"
            assert encrypted._sslobj is not None
            yield half

        closing: list[Any] = []
        commit = PendingCommit("gradient", None, 0, session.base, sequence=1)
        header = session._member.links.leader._header(commit)
        with pytest.raises(ServerUnavailable):
            lane.exchange(header, 2 * half.size, pieces(), np.empty(GRADIENT.size, np.float32), IN_FLOAT32)
        closing[0].result(DEADLINE)
        assert encrypted.fileno() == -1


# -- whom the client believes


def of_a_stranger(folder: Path, authority: Authority) -> Pair:
    return Authority(folder, "stranger").issue("stranger-server", hosts=HOSTS)


def expired(folder: Path, authority: Authority) -> Pair:
    return authority.issue("old", hosts=HOSTS, days=(-9, -2))


def of_another_host(folder: Path, authority: Authority) -> Pair:
    return authority.issue("elsewhere", hosts=("server.example", "127.0.0.1"))


@pytest.mark.parametrize("impostor", [of_a_stranger, expired, of_another_host])
def test_an_impostor_at_the_lanes_port_gets_nothing_and_grpc_carries_on(
    impostor: Any, live: Live, shown: dict[str, Any], authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pair, heard = impostor(tmp_path, authority), []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.cert, pair.key)

    def serve(client: socket.socket) -> None:
        with context.wrap_socket(client, server_side=True) as encrypted:
            heard.append(encrypted.recv(1 << 16))

    with Wire(live.address) as wire, answering(socket.create_server((ELSEWHERE, lane_port_of(live))), serve):
        assert_trains(live, wire.address, "grpc", **shown)
    assert not any(heard)
    assert "CERTIFICATE_VERIFY_FAILED" in caplog.text


def test_a_lane_that_does_not_encrypt_gets_nothing_and_grpc_carries_on(live: Live, shown: dict[str, Any]) -> None:
    heard: list[bytes] = []

    def serve(client: socket.socket) -> None:
        while data := client.recv(1 << 16):
            heard.append(data)
            client.sendall(message(2, b""))  # what a lane would say: welcome

    with Wire(live.address) as wire, answering(socket.create_server((ELSEWHERE, lane_port_of(live))), serve):
        assert_trains(live, wire.address, "grpc", **shown)
    said = b"".join(heard)
    assert said.startswith(b"\x16\x03"), "the first bytes are those of a TLS handshake"
    assert b"GEML" not in said
    assert SEEN not in said


@pytest.mark.parametrize("trusted", ["the certificate itself", "an authority that is no root"])
def test_a_lane_is_believed_for_what_grpc_believes(trusted: str, authority: Authority, tmp_path: Path) -> None:
    if trusted == "the certificate itself":
        own = authority.issue("server", hosts=HOSTS)
        believed = own.cert
    else:
        intermediate = authority.delegate("intermediate")
        own, believed = intermediate.issue("server", hosts=HOSTS), intermediate.cert
    with serving(config(tls=TlsFiles(own.cert, own.key))) as live:
        assert_trains(live, live.address, "tls", tls_ca=believed)


def test_a_client_key_with_a_passphrase_is_asked_for_nowhere(authority: Authority) -> None:
    pair = authority.issue("worker:*", file="worker")
    key = serialization.load_pem_private_key(pair.key.read_bytes(), None)
    locked = serialization.BestAvailableEncryption(b"secret passphrase")
    pair.key.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, locked))
    with pytest.raises(OSError, match="passphrase"):
        Security(None, authority.cert, pair.cert, pair.key).context()


# -- whom the server lets in


def trained_beside(live: Live, shown: dict[str, Any], visit: Any) -> None:
    """A worker trains over its lane before and after a visit to the lane's port."""
    with connect(live.address, **shown) as session:
        session.join(model())
        session.commit(GRADIENT)
        before = theta(live)
        visit()
        np.testing.assert_array_equal(theta(live), before)
        np.testing.assert_array_equal(session.commit(GRADIENT).theta, theta(live))
        assert transports(live) == {session.name: "tls"}
        assert session.generation == 1


@pytest.mark.parametrize("said", [message(HELLO, lane_pb2.LaneHello(token=bytes(16)).SerializeToString()), bytes(4096), b""])
def test_who_does_not_encrypt_is_turned_away(said: bytes, live: Live, shown: dict[str, Any]) -> None:
    def visit() -> None:
        with socket.create_connection(("127.0.0.1", lane_port_of(live)), DEADLINE) as visitor:
            received = bytearray()
            with suppress(OSError):  # the server may have hung up at the first bytes
                visitor.sendall(said)
                visitor.shutdown(socket.SHUT_WR)
                while data := visitor.recv(4096):
                    received += data
            assert b"GEML" not in received

    trained_beside(live, shown, visit)


def said_to_a_hello(offered: training_pb2.OpenLaneResponse, context: ssl.SSLContext) -> bytes:
    with (
        socket.create_connection(("127.0.0.1", offered.port), DEADLINE) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as visitor,
    ):
        visitor.sendall(message(HELLO, lane_pb2.LaneHello(token=offered.token).SerializeToString()))
        return visitor.recv(4096)


@pytest.mark.parametrize("what", ["none", "another authority's", "expired"])
def test_a_mutual_lane_turns_a_client_without_a_good_certificate_away(
    what: str, own: Pair, authority: Authority, shown: dict[str, Any], tmp_path: Path
) -> None:
    """Before it says anything, even if it knows a lease's token."""
    context = ssl.create_default_context(cafile=authority.cert)
    if what != "none":
        issuer = Authority(tmp_path, "stranger") if what == "another authority's" else authority
        pair = issuer.issue("worker:bad", days=(-9, -2) if what == "expired" else (-1, 30))
        context.load_cert_chain(pair.cert, pair.key)
    with serving(config(tls=TlsFiles(own.cert, own.key, authority.cert))) as live:

        def visit() -> None:
            lease_id = live.on_loop(lambda: next(iter(live.core.leases.live)))
            offered = live.on_loop(lambda: live.server.wiring.lane.listener.offer(lease_id, lambda: ANYONE))
            with pytest.raises((ssl.SSLError, ConnectionResetError)):
                said_to_a_hello(offered, context)

        trained_beside(live, shown, visit)


# -- certificates that change


def seen_at(port: int) -> bytes:
    """The certificate that the lane shows."""
    return ssl.get_server_certificate(("127.0.0.1", port), timeout=DEADLINE).encode()


def test_a_new_certificate_is_shown_by_new_lanes_and_open_ones_go_on(own: Pair, authority: Authority, tmp_path: Path) -> None:
    with serving(config(tls=TlsFiles(own.cert, own.key))) as live:
        with connect(live.address, tls_ca=authority.cert) as session:
            session.join(model())
            session.commit(GRADIENT)
            successor = Authority(tmp_path, "successor")
            successor.issue("server", hosts=HOSTS)
            assert seen_at(lane_port_of(live)) == own.cert.read_bytes()
            assert session.commit(GRADIENT).version == 2
            assert transports(live) == {session.name: "tls"}
        assert_trains(live, live.address, "tls", tls_ca=successor.cert)
