"""The token file: its syntax, its permissions, and when it is reloaded."""

from __future__ import annotations

import errno
import logging
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from gem_api.errors import Unauthenticated
from gem_api.methods import ADMIN as ADMIN_SERVICE
from gem_api.methods import TRAINING, methods
from gem_api.process import secret_file
from gem_api.process.addresses import is_loopback, is_this_machine
from gem_api.process.lifetime import LAUNCHER
from gem_api.process.secret_file import read_token
from gem_client.transport.security import Security
from gem_ctl.cli import main as ctl
from gem_server.cli import main as server
from gem_server.security.access import MAY_CALL
from gem_server.security.exposure import how_to_join, what_is_open
from gem_server.security.tls import TlsFiles
from gem_server.security.tokens import Entry, Role, TokenFile, parse
from gem_worker.evaluation.evaluator import main as evaluator
from gem_worker.process.cli import main as worker
from kit.failing import failing
from kit.logs import captured
from kit.server import config, serving
from kit.tokens import ADMIN, ALICE, ANY, BOB, EVALUATOR, LINES, write_tokens


class Log:
    """Keeps what is logged."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def info(self, event: str, **fields: Any) -> None:
        self.lines.append(f"{event} {fields}")

    warning = info


def token_file(path: Path, *lines: str) -> tuple[TokenFile, Log]:
    log = Log()
    return TokenFile(write_tokens(path, *lines), log), log  # type: ignore[arg-type]


# -- what it says


def test_each_line_is_a_token_a_role_and_for_a_worker_perhaps_its_name(tmp_path: Path) -> None:
    tokens, _ = token_file(tmp_path / "tokens", "# staff", "", *LINES, "  star-0123456789abcdef  worker   *  ")
    found = {token: tokens.find(token) for token in (ALICE, ANY, EVALUATOR, ADMIN, "star-0123456789abcdef")}
    assert [(entry.role, entry.worker) for entry in found.values()] == [
        ("worker", "alice"), ("worker", ""), ("evaluator", ""), ("admin", ""), ("worker", ""),
    ]  # fmt: skip


def test_a_worker_name_may_have_spaces(tmp_path: Path) -> None:
    tokens, _ = token_file(tmp_path / "tokens", f"{ALICE} worker Alice in the lab")
    assert tokens.find(ALICE).worker == "Alice in the lab"


@pytest.mark.parametrize("token", ["", ALICE[:-1], ALICE + "x", ALICE.upper(), f" {ALICE}", "alice", "ä" * 20, "#", "*"])
def test_another_token_is_not_known(token: str, tmp_path: Path) -> None:
    tokens, _ = token_file(tmp_path / "tokens", *LINES)
    with pytest.raises(Unauthenticated):
        tokens.find(token)


@pytest.mark.parametrize("token", [ALICE, ADMIN, "wrong-0123456789abcdef", "short"])
def test_a_token_is_compared_with_every_entry_as_digests_in_constant_time(
    token: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever it is, first, last or none: the time tells nothing."""
    tokens, _ = token_file(tmp_path / "tokens", *LINES)
    compared: list[tuple[int, int]] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return one == other

    monkeypatch.setattr("gem_server.security.tokens.hmac.compare_digest", compare)
    with suppress(Unauthenticated):
        tokens.find(token)
    assert compared == [(32, 32)] * len(LINES)


def test_no_command_takes_a_token_as_an_argument() -> None:
    """Everybody on a machine can read the arguments of everybody's processes."""
    for command in (server, worker, evaluator, ctl, *ctl.commands.values()):
        options = {name for parameter in command.params for name in parameter.opts}
        assert "--token" not in options, command.name


@pytest.mark.parametrize(
    ("lines", "what"),
    [
        ([], "has no token"),
        (["# nothing"], "has no token"),
        ([ALICE], ":1: the second word"),
        (["worker " + ALICE], ":1: the second word"),
        ([LINES[0], f"{BOB} root"], ":2: the second word"),
        (["fifteen-letters worker"], "16 characters"),
        (["ünprintable-0123456789 worker"], "printable ASCII"),
        ([f"{ADMIN} admin ops"], "only a token of the role worker"),
        ([LINES[0], f"{ALICE} admin"], "twice"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused_and_never_quoted(lines: list[str], what: str) -> None:
    with pytest.raises(ValueError, match=what) as refused:
        parse("\n".join(lines), "tokens")
    assert not [word for line in lines for word in line.split() if len(word) > 9 and word in str(refused.value)]


def test_an_entry_keeps_no_token_and_its_owner_tells_none() -> None:
    entries = parse("\n".join(LINES), "tokens")
    assert not [line for line in LINES if line.split()[0] in repr(entries)]
    assert len({entry.owner for entry in entries}) == len(entries)
    assert not [entry for entry in entries if entry.digest.hex()[:8] in entry.owner]


def test_a_pinned_name_owns_the_same_leases_under_its_next_token() -> None:
    (old,), (new,) = parse(f"{ALICE} worker alice", "old"), parse(f"{BOB} worker alice", "new")
    assert old.owner == new.owner
    assert Entry(b"1", Role.WORKER, "").owner != Entry(b"2", Role.WORKER, "").owner


# -- who may read it


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o644, 0o777])
def test_a_file_that_others_can_read_or_write_is_refused(mode: int, tmp_path: Path) -> None:
    path = write_tokens(tmp_path / "tokens", *LINES)
    path.chmod(mode)
    with pytest.raises(ValueError, match="chmod 600"):
        TokenFile(path, Log())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="chmod 600"):
        read_token(path)


def test_what_the_container_runtime_mounts_is_this_containers_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compose mounts a secret with the mode that it has outside."""
    monkeypatch.setattr(secret_file, "MOUNTED", tmp_path)
    path = write_tokens(tmp_path / "token", ALICE)
    path.chmod(0o644)
    assert read_token(path) == ALICE


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tokens"):
        TokenFile(tmp_path / "tokens", Log())  # type: ignore[arg-type]


@pytest.mark.parametrize("content", ["", "short\n", f"{ALICE} {BOB}\n", f"{ALICE}\n{BOB}\n"])
def test_a_clients_file_holds_one_token(content: str, tmp_path: Path) -> None:
    path = write_tokens(tmp_path / "token")
    path.write_text(content)
    with pytest.raises(ValueError, match="token") as refused:
        read_token(path)
    assert ALICE not in str(refused.value)


# -- when it changes


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    tokens, _ = token_file(tmp_path / "tokens", *LINES)
    write_tokens(tmp_path / "tokens", f"{BOB} evaluator")
    assert tokens.find(BOB).role == "evaluator"
    with pytest.raises(Unauthenticated):
        tokens.find(ALICE)


def test_a_file_that_is_replaced_is_read_again(tmp_path: Path) -> None:
    tokens, _ = token_file(tmp_path / "tokens", f"{ALICE} worker")
    write_tokens(tmp_path / "next", f"{BOB} worker").rename(tmp_path / "tokens")
    assert tokens.find(BOB)


@pytest.mark.parametrize("change", ["junk", "gone", "open to others", "empty"])
def test_a_change_that_makes_no_sense_is_logged_once_and_changes_nothing(change: str, tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    tokens, log = token_file(path, *LINES)
    if change == "gone":
        path.unlink()
    elif change == "open to others":
        path.chmod(0o644)
    else:
        write_tokens(path, *(["what is this"] if change == "junk" else []))
    assert tokens.find(ALICE) == tokens.find(ALICE)
    (line,) = log.lines
    assert "can't use the changed token file" in line
    path.unlink(missing_ok=True)
    write_tokens(path, f"{BOB} admin")
    assert tokens.find(BOB).role == "admin"


# -- roles


def test_every_call_of_the_contract_but_the_admins_is_listed() -> None:
    assert {method.name for method in methods(TRAINING)} == MAY_CALL.keys()
    assert not {method.name for method in methods(ADMIN_SERVICE)} & MAY_CALL.keys()


# -- what is open


HERE = ["127.0.0.1:1", "127.9.9.9:1", "localhost:1", "[::1]:1", "::1:1", "unix:/run/gem.sock", "unix-abstract:gem"]
ELSEWHERE = ["0.0.0.0:1", "[::]:1", ":1", "server:1", "192.168.1.2:1", "127.0.0.1.evil.example:1", ""]


@pytest.mark.parametrize("address", [*HERE, *ELSEWHERE])
def test_loopback_is_this_machines_own(address: str) -> None:
    assert is_loopback(address) == (address in HERE)


def own_address() -> str:
    """An address of this machine's interfaces, as the system chooses it for a packet to elsewhere; skips without one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            pytest.skip("this machine has no network")
        return str(probe.getsockname()[0])


def test_what_goes_to_an_interface_of_this_machine_stays_on_it() -> None:
    assert is_this_machine("127.0.0.1:1")
    assert is_this_machine(f"{own_address()}:1")
    assert not Security(token="t" * 16).exposes_token(f"{own_address()}:1")
    for address in ("192.0.2.77:1", "server:1", "[2001:db8::77]:1", "255.255.255.255:1", ""):
        assert not is_this_machine(address)


def test_what_a_server_leaves_open_is_said_with_what_closes_it() -> None:
    tokens, tls, mutual = Path("t"), TlsFiles(Path("c"), Path("k")), TlsFiles(Path("c"), Path("k"), Path("a"))
    everywhere, here = "0.0.0.0:50051", "127.0.0.1:50051"
    closers = {
        (everywhere, None, None): ["--tokens", "--tls-cert"],
        (everywhere, tokens, None): ["--tls-cert"],
        (everywhere, None, tls): ["--tokens"],
        (everywhere, tokens, tls): [],
        (everywhere, None, mutual): [],
        (here, None, None): [],
    }
    for (listen, given_tokens, given_tls), expected in closers.items():
        found = what_is_open(listen, listen, "127.0.0.1:9464", given_tokens, given_tls)
        assert [closer.split()[0] for _, closer in found] == expected
        assert all(listen in what or "unencrypted" in what for what, _ in found)
    ((what, _),) = what_is_open(here, here, "0.0.0.0:9464", None, None)
    assert "metrics" in what
    assert what_is_open(here, "", "", None, None) == []


def test_a_lane_that_is_open_alone_shows_tensors_but_no_tokens_and_lets_nobody_in() -> None:
    tokens, tls = Path("t"), TlsFiles(Path("c"), Path("k"))
    here, everywhere = "127.0.0.1:50051", "[::]:50052"
    for given_tokens in (None, tokens):
        assert what_is_open(here, everywhere, "", given_tokens, None) == [
            ("gradients and the model cross the network unencrypted", "--tls-cert FILE --tls-key FILE")
        ]
    assert what_is_open(here, everywhere, "", None, tls) == []


def test_the_log_has_the_command_for_another_machines_worker_and_it_is_one_that_works(tmp_path: Path) -> None:
    tls, mutual = TlsFiles(Path("c"), Path("k")), TlsFiles(Path("c"), Path("k"), Path("a"))
    for name in ("token", "ca.pem"):
        (tmp_path / name).write_text("x")
    for tokens, encrypted, flags in (
        (None, None, []),
        (Path("t"), None, ["--token-file", "token"]),
        (Path("t"), tls, ["--token-file", "token", "--tls-ca", "ca.pem"]),
        (None, mutual, ["--tls-ca", "ca.pem"]),
    ):
        before, _, rest = how_to_join("10.0.0.1:7", tokens, encrypted).partition("gem-worker ")
        words = rest.partition(" (")[0].split()
        assert words == ["--server", "10.0.0.1:7", "--task", "my_task:Sine", *flags]
        assert ("GEM_TLS_CERT=" in before) == (encrypted is mutual)
        worker.make_context("gem-worker", [str(tmp_path / word) if (tmp_path / word).exists() else word for word in words])
    for everywhere in ("0.0.0.0:7", "[::]:7"):
        address = how_to_join(everywhere, None, None).partition("--server ")[2].split()[0]
        assert address.endswith(":7")
        assert is_this_machine(address) or address == f"{socket.gethostname()}:7"
        assert not address.startswith(("0.0.0.0", "["))


@pytest.mark.parametrize("listen", ["127.0.0.1:7", "localhost:7", "[::1]:7", "unix:/tmp/x"])
def test_if_no_other_machine_can_join_the_log_names_the_option_that_lets_them_in(listen: str) -> None:
    assert "only workers on this machine" in how_to_join(listen, None, None)
    assert f"--listen 0.0.0.0:{50051 if listen.startswith('unix') else 7}" in how_to_join(listen, None, None)


@pytest.mark.parametrize(("launcher", "lines"), [("", 1), ("1", 0)])
def test_a_server_says_so_once_unless_gem_train_starts_its_workers(
    launcher: str, lines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if launcher:
        monkeypatch.setenv(LAUNCHER, launcher)
    with captured(logging.INFO) as logged, serving(config()):
        assert sum("only workers on this machine" in line["event"] for line in logged) == lines


@pytest.mark.parametrize(
    ("address", "tls_ca", "exposed"),
    [("127.0.0.1:1", None, False), ("server:1", None, True), ("server:1", "ca.pem", False)],
)
def test_a_token_in_the_clear_is_noticed(address: str, tls_ca: str | None, exposed: bool) -> None:
    security = Security(ALICE, tls_ca)
    assert security.exposes_token(address) is exposed
    assert ALICE not in repr(security)
    assert not Security().exposes_token(address)


def test_a_changed_file_that_can_not_be_read_for_now_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tokens"
    tokens, log = token_file(path, f"{ALICE} worker")
    write_tokens(path, f"{BOB} worker", f"{ALICE} worker")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", failing(errno.EMFILE))
        assert [tokens.find(ALICE).role for _ in range(3)] == ["worker"] * 3
    assert len(log.lines) == 1, "one line, not one for each call"
    assert tokens.find(BOB).role == "worker"
