"""What a server's log says about other machines: what is open to them, and how their workers join."""

from __future__ import annotations

from pathlib import Path

from gem_api.process.addresses import DEFAULT_PORT, address_for_others, host_and_port, is_loopback, is_unix

from gem_server.security.tls import TlsFiles


def what_is_open(
    listen: str, lane_listen: str, metrics_listen: str, tokens: Path | None, tls: TlsFiles | None
) -> list[tuple[str, str]]:
    """Lists what is open beyond this machine, and how to close it; empty if all addresses are loopback.

    Only who may train through `listen` gets the token that opens a lane. So an open lane shows tensors, but lets nobody in.
    """
    found = []
    is_open, lane_is_open = (bool(address) and not is_loopback(address) for address in (listen, lane_listen))
    if is_open and tokens is None and (tls is None or tls.client_ca is None):
        found.append((
            f"anyone who can reach {listen} may train, read the model and drain the server",
            "--tokens FILE, or tls_client_ca FILE",
        ))  # fmt: skip
    if (is_open or lane_is_open) and tls is None:
        what = "tokens, gradients and the model" if is_open and tokens is not None else "gradients and the model"
        found.append((f"{what} cross the network unencrypted", "--tls-cert FILE --tls-key FILE"))
    if metrics_listen and not is_loopback(metrics_listen):
        found.append(
            (
                f"anyone who can reach {metrics_listen} may read the metrics and the live page",
                "--metrics-listen on a private address",
            )
        )
    return found


def how_to_join(listen: str, tokens: Path | None, tls: TlsFiles | None) -> str:
    """A line that says how a worker on another machine joins, or that none can. `listen` names the port that is served."""
    if is_loopback(listen):
        port = DEFAULT_PORT if is_unix(listen) else host_and_port(listen)[1]
        return f"only workers on this machine can join: --listen 0.0.0.0:{port} lets those of other machines in"
    certificate = "GEM_TLS_CERT=worker.pem GEM_TLS_KEY=worker.key " * bool(tls is not None and tls.client_ca)
    flags = " --token-file token" * (tokens is not None) + " --tls-ca ca.pem" * (tls is not None)
    worker = f"{certificate}gem-worker --server {address_for_others(listen)} --task my_task:Sine{flags}"
    return f"another machine joins with: {worker} (or an address of this one that it reaches); a loop, with gem_client.connect"
