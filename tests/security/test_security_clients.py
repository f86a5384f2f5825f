"""The SDK and the commands with a server that requires tokens: their credentials, their messages, and that no token is
shown."""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from click.testing import CliRunner, Result
from gem_api.hyperparameters import Hyperparameters
from gem_client import Admin, InvalidRequest, PermissionDenied, Retry, Unauthenticated, connect
from gem_ctl.cli import main as ctl
from kit.model import GRADIENT, model
from kit.process import python
from kit.server import Live, config, serving
from kit.settings import configured
from kit.tokens import ADMIN, ALICE, ANY, BOB, EVALUATOR, LINES, write_tokens

SECRETS = (ALICE, BOB, ANY, EVALUATOR, ADMIN)


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Live]:
    """A server that asks for tokens."""
    tokens = write_tokens(tmp_path / "tokens", *LINES)
    with serving(config(Hyperparameters(epochs=1), tokens=tokens, checkpoint_dir=tmp_path / "saved")) as server:
        yield server


@pytest.fixture
def impatient() -> Retry:
    """Fails a test that tries again what can't get better."""

    def sleep(seconds: float) -> None:
        raise AssertionError("tried again")

    return Retry(sleep=sleep)


def token_of(tmp_path: Path, token: str) -> Path:
    return write_tokens(tmp_path / "token", token)


# -- the SDK


@pytest.mark.parametrize("token", [None, "wrong-0123456789abcdef"], ids=["none", "wrong"])
def test_a_session_without_a_token_that_is_known_fails_at_once(token: str | None, live: Live, impatient: Retry) -> None:
    with connect(live.address, token=token, retry=impatient) as session, pytest.raises(Unauthenticated):
        session.join(model())
    with Admin(live.address, token=token) as admin:
        assert admin.healthy()
        with pytest.raises(Unauthenticated):
            admin.status()


def test_what_is_denied_is_not_tried_again(live: Live, impatient: Retry) -> None:
    with connect(live.address, name="alice", token=BOB, retry=impatient) as session, pytest.raises(PermissionDenied):
        session.join(model())
    with connect(live.address, token=EVALUATOR, retry=impatient) as session, pytest.raises(PermissionDenied, match="worker"):
        session.join(model())
    with Admin(live.address, token=ALICE) as admin:
        for call in (admin.checkpoint, admin.drain):
            with pytest.raises(PermissionDenied):
                call()


def test_an_evaluator_reads_and_reports_and_an_admin_checkpoints(live: Live) -> None:
    with connect(live.address, name="alice", token=ALICE) as session:
        session.join(model())
        session.commit(GRADIENT)
        session.report_evaluation(0.75)
        evaluation = live.on_loop(lambda: live.server.wiring.progress.evaluation)
        assert evaluation is not None
        assert evaluation.loss == 0.75
        with connect(live.address, token=EVALUATOR) as reader, Admin(live.address, token=EVALUATOR) as judge:
            assert len(reader.pull()) == GRADIENT.size
            judge.report_evaluation(1, 0.5, 0.9)
            assert judge.status().evaluation.version == 1
        with Admin(live.address, token=ADMIN) as admin:
            assert admin.checkpoint().version == 1


@pytest.mark.parametrize("token", ["", "short", "with spaces 0123456789", "line\n0123456789abcdef", "ü" * 20])
def test_what_can_be_no_token_is_refused_before_it_is_sent_and_not_quoted(token: str) -> None:
    with pytest.raises(InvalidRequest, match="token") as refused:
        connect("127.0.0.1:1", token=token)
    assert not token or token not in str(refused.value)


def test_a_token_that_would_cross_a_network_in_the_clear_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "gem_client"):
        connect("127.0.0.1:1", token=ALICE).close()
        assert not caplog.records
        connect("server.example:1", token=ALICE).close()
    (record,) = caplog.records
    assert "UNENCRYPTED" in record.message
    assert ALICE not in record.message


# -- gem-ctl


def run(command: Any, *arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(command, arguments, env=environment)


def test_gem_ctl_takes_a_token_file_by_flag_over_environment(live: Live, tmp_path: Path) -> None:
    right = str(token_of(tmp_path, ADMIN))
    wrong = str(write_tokens(tmp_path / "wrong", "wrong-0123456789abcdef"))
    target = f"--server={live.address}"
    assert run(ctl, target, f"--token-file={right}", "status").exit_code == 0
    assert run(ctl, target, "status", GEM_TOKEN_FILE=right).exit_code == 0
    assert run(ctl, target, f"--token-file={right}", "status", GEM_TOKEN_FILE=wrong).exit_code == 0
    assert run(ctl, target, "health").exit_code == 0
    for refused in (run(ctl, target, "status"), run(ctl, target, "status", GEM_TOKEN_FILE=wrong)):
        (line,) = refused.stderr.splitlines()
        assert (refused.exit_code, "Unauthenticated" in line) == (1, True)


def test_gem_ctl_warns_of_a_token_in_the_clear(tmp_path: Path) -> None:
    path = token_of(tmp_path, ADMIN)
    result = run(ctl, "--server=server.invalid:1", configured(timeout=0.1), f"--token-file={path}", "health")
    assert "UNENCRYPTED" in result.stderr.splitlines()[0]
    assert ADMIN not in result.output


@pytest.mark.long
@pytest.mark.parametrize("module", ["gem_worker", "gem_worker.evaluation.evaluator"])
def test_a_token_file_that_others_can_read_is_wrong_use(module: str, tmp_path: Path) -> None:
    path = token_of(tmp_path, ANY)
    path.chmod(0o644)
    done = python("-m", module, f"--token-file={path}")
    assert done.returncode == 2
    assert "chmod 600" in done.stderr
    assert ANY not in done.stderr


@pytest.mark.long
def test_a_worker_with_a_missing_authority_file_is_wrong_use(tmp_path: Path) -> None:
    """Its supervisor must not start it again and again: the file does not come by itself."""
    done = python("-m", "gem_worker", "--server=127.0.0.1:1", f"--tls-ca={tmp_path / 'ca.pem'}")
    assert done.returncode == 2, done.stderr
    assert "can't read" in done.stderr


@pytest.mark.parametrize("half", ["tls_cert", "tls_key"])
def test_half_of_a_client_certificate_is_wrong_use(half: str, tmp_path: Path) -> None:
    (tmp_path / "half.pem").touch()
    result = run(ctl, "--server=server.invalid:1", configured(**{half: str(tmp_path / "half.pem")}), "health")
    assert result.exit_code == 2
    assert "needs both tls_cert and tls_key" in result.stderr


# -- the worker and the evaluator as processes, and what is shown


@pytest.mark.long
def test_gem_worker_and_gem_evaluator_work_with_their_tokens(live: Live, tmp_path: Path) -> None:
    common = [f"--server={live.address}", "--task=digits", configured(log_format="json")]

    def process(module: str, token: str, *more: str) -> subprocess.CompletedProcess[str]:
        path = write_tokens(tmp_path / module, token)
        return python("-m", module, *common, f"--token-file={path}", *more)

    refused = process("gem_worker", "wrong-0123456789abcdef")
    assert (refused.returncode, "Unauthenticated" in refused.stderr) == (1, True), refused.stderr
    trained = process("gem_worker", ANY)
    assert trained.returncode == 0, trained.stderr
    evaluated = process("gem_worker.evaluation.evaluator", EVALUATOR, "--once")
    assert evaluated.returncode == 0, evaluated.stderr
    assert live.on_loop(lambda: live.server.wiring.progress.evaluation) is not None
    shown = refused.stderr + trained.stderr + evaluated.stderr
    assert not [secret for secret in (*SECRETS, "wrong-0123456789abcdef") if secret in shown]


def test_the_servers_log_names_who_was_refused_and_shows_no_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = structlog.get_config()
    structlog.reset_defaults()  # a command that was tested in this process may have sent its log elsewhere
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG), cache_logger_on_first_use=False)
    try:
        listening = config(tokens=write_tokens(tmp_path / "tokens", *LINES), listen="0.0.0.0:0")
        with serving(listening) as live:
            address = f"127.0.0.1:{live.server.port}"
            for token in (None, "wrong-0123456789abcdef", ALICE):
                with Admin(address, token=token) as admin, pytest.raises((Unauthenticated, PermissionDenied)):
                    admin.drain()
            with connect(address, name="alice", token=ALICE) as session:
                session.join(model())
            lease_ids = live.on_loop(lambda: list(live.core.leases._reasons))
    finally:
        structlog.configure(**before)
    shown = capsys.readouterr().out
    assert shown.count("call refused") == 3
    assert "peer=ipv4:127.0.0.1" in shown
    assert "OPEN: tokens, gradients and the model cross the network unencrypted" in shown
    assert lease_ids
    assert not [secret for secret in (*SECRETS, "wrong-0123456789abcdef", *lease_ids) if secret in shown]
