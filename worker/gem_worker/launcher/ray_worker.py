"""A gem-worker inside a Ray actor. `RayHost` makes the actor of it."""

from __future__ import annotations

import os
import socket
import sys
from collections import deque
from typing import TextIO

import click
from gem_api.process import logs
from gem_api.process.lifetime import print_stacks_on_signal

from gem_worker.command import EXIT_WRONG_USE, Stopped, log_as
from gem_worker.process.cli import main
from gem_worker.process.stopping import Stopping
from gem_worker.process.work import work

CONTROL = "control"  # the actor's thread for everything but its work
_MAX_PIECES = 10_000  # of output that the launcher has not fetched


class Worker:
    """The body of gem-worker as the methods of an actor. `work` runs in one thread, the other methods meanwhile in another.

    What is written to standard output and standard error goes to Ray's log of the actor, and to the launcher too.
    """

    def __init__(self) -> None:
        print_stacks_on_signal()
        self._stopping = Stopping()
        self._output: deque[str] = deque(maxlen=_MAX_PIECES)
        for name in list(os.environ):
            if name.startswith("GEM_"):  # meant for commands on that node
                del os.environ[name]
        sys.stdout, sys.stderr = _Copying(sys.stdout, self._output), _Copying(sys.stderr, self._output)

    def work(self, name: str, flags: list[str], variables: dict[str, str], token: str | None) -> tuple[int, str]:
        """Runs gem-worker with these flags and environment variables; returns its exit status and the output that `report` has
        not returned."""
        os.environ.update(variables)
        try:
            options = main.make_context("gem-worker", list(flags)).params
            log = logs.configure(options["log_format"], options["log_level"])
            log_as(name)
            security = {key: options[key] for key in ("tls_ca", "tls_cert", "tls_key")}
            status, _ = work(name, options, {"token": token, **security}, self._stopping, log)
        except click.ClickException as error:
            sys.stderr.write(f"{error.format_message()}\n")
            status = EXIT_WRONG_USE
        except Stopped:
            status = 0
        return status, self._taken()

    def report(self) -> tuple[str, int, str]:
        """Returns the node's name, the process's id, and the output since the last report."""
        return socket.gethostname(), os.getpid(), self._taken()

    def stop(self) -> None:
        """Makes `work` leave the run and return."""
        self._stopping.begin()

    def _taken(self) -> str:
        """The output so far, which is forgotten."""
        pieces = []
        while self._output:
            pieces.append(self._output.popleft())
        return "".join(pieces)


class _Copying:
    """A text stream that also appends what is written to a list."""

    def __init__(self, stream: TextIO, copy: deque[str]) -> None:
        self._stream, self._copy = stream, copy

    def write(self, text: str) -> int:
        self._copy.append(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)
