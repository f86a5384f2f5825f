"""`connect`: opens a session with a server."""

from __future__ import annotations

from functools import partial

from gem_api.process.addresses import default_name
from gem_api.wire import wire_format

from gem_client.arguments import require_connection, require_started
from gem_client.retry import Retry
from gem_client.run.link import Caller
from gem_client.session import Session
from gem_client.transport.channel import checked_address
from gem_client.transport.connection import Connection
from gem_client.transport.security import Security, Source, or_that_of_dry_run


def connect(
    address: str,
    *,
    name: str | None = None,
    retry: Retry | None = None,
    timeout: float = 60.0,
    shared_memory: bool = True,
    gradient_dtype: str = "float32",
    theta_dtype: str = "float32",
    token: str | None = None,
    tls_ca: Source | None = None,
    tls_cert: Source | None = None,
    tls_key: Source | None = None,
) -> Session:
    """Opens a session with a server. Sends nothing yet: the first call of the session does.

    Commits use the server's lane: shared memory on the server's machine, or else a TCP port beside gRPC's. If the lane can't
    be opened, they go over gRPC, and a warning says why.

    Args:
        address: The server's address, "host:port". The host is a name, an IPv4 address, or an IPv6 address in brackets
            ("[::1]:50051"). The default port is 50051. gRPC's own forms, such as "unix:/path", work too. If several servers
            hold θ together, it is that of the server of range 0, which names the others.
        name: The worker's name, unique within the run. The default is made of the host, the process id and a random suffix.
        retry: How long to retry while the server is unreachable. The default retries for five minutes.
        timeout: Seconds without progress after which a call is cancelled and retried.
        shared_memory: Whether to exchange tensors through shared memory if the server runs on the same machine. Has no effect
            if the server is on another machine.
        gradient_dtype: Format of gradients on the network: "float32", "bfloat16" or "int8" (blocks that have one
            scale each, with error feedback). Gradients in shared memory are always float32.
        theta_dtype: Format of θ on the network: "float32", "bfloat16" or "int8" (its difference to what this worker holds,
            in the same blocks; it takes 4·P bytes at both ends).
        token: The access token, for a server that runs with --tokens. The SDK reads no file or environment variable for it.
        tls_ca: PEM file with the certificate authorities to trust. If given, the connection is encrypted, and the server's
            certificate must come from one of them.
        tls_cert: PEM file with this client's certificate, for a server that runs with tls_client_ca.
        tls_key: PEM file with the private key of `tls_cert`.

    Returns:
        The session. Use it as a context manager, or call `close` at the end.

    Raises:
        InvalidRequest: An argument is malformed, a file can't be read, or the TLS arguments do not go together. Or the call is
            in a script that a process started by `multiprocessing` is importing, and which must not join the run once more.
    """
    require_started()
    require_connection(name, retry, timeout)
    address, security = or_that_of_dry_run(checked_address(address), Security(token, tls_ca, tls_cert, tls_key))
    caller = Caller(
        name=name or default_name(),
        connect=partial(Connection, timeout=timeout, security=security),
        retry=retry or Retry(),
        shared_memory=shared_memory,
        gradient_format=wire_format(gradient_dtype),
        theta_format=wire_format(theta_dtype),
    )
    return Session(address, caller)
