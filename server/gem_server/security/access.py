"""Identifies callers and their permissions. Without credentials, everyone is an admin."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from gem_api.errors import PermissionDenied, Unauthenticated

from gem_server.security.tokens import Role, TokenFile

AUTHORIZATION = "authorization"
ANY_NAME = "*"
Metadata = Sequence[tuple[str, str | bytes]]
Certificate = Mapping[str, Sequence[bytes]]  # what gRPC knows of it
_TRAINS = frozenset({Role.WORKER})
_EVALUATES = frozenset({Role.EVALUATOR})
# An admin may make every call, and is the only one who may make one that is not listed here.
MAY_CALL = {
    "RegisterWorker": _TRAINS,
    "InitializeCentral": _TRAINS,
    "OpenLane": _TRAINS,
    "Commit": _TRAINS,
    "RenewLease": _TRAINS,
    "LeaveCluster": _TRAINS,
    "LeaseShard": _TRAINS,
    "CompleteShard": _TRAINS,
    "ReportEvaluation": _TRAINS | _EVALUATES,
    "Pull": _TRAINS | _EVALUATES,
    "GetStatus": _TRAINS | _EVALUATES,
}


@dataclass(frozen=True)
class Identity:
    """The caller of an RPC.

    Attributes:
        role: Determines which RPCs the caller may use.
        owner: A name for the credentials that does not reveal them. A lease is bound to it.
        worker: The only worker name that the caller may register, or "*" for any.
    """

    role: Role
    owner: str
    worker: str = ANY_NAME


ANYONE = Identity(Role.ADMIN, owner="")


@dataclass(frozen=True, eq=False)
class Access:
    """Identifies callers by their token, their client certificate, or both.

    Attributes:
        tokens: The known tokens; None to ask for none.
        client_certificates: Whether clients must have shown a certificate, which gRPC has checked.
    """

    tokens: TokenFile | None = None
    client_certificates: bool = False

    @property
    def asks(self) -> bool:
        """Whether callers need credentials."""
        return self.tokens is not None or self.client_certificates

    def identifier(self, rpc: str, context: Any) -> Callable[[], Identity]:
        """What returns who makes a call of gRPC. It may be called later too, when the call has ended.

        It raises:
            Unauthenticated: The call has no token, or an unknown one.
            PermissionDenied: The caller's role may not use this RPC, or the certificate names no role.
        """
        if not self.asks:
            return lambda: ANYONE
        return partial(self._identify, rpc, context.invocation_metadata() or (), context.auth_context())

    def _identify(self, rpc: str, metadata: Metadata, certificate: Certificate) -> Identity:
        name = _common_name(certificate) if self.client_certificates else ""
        if self.tokens is None:
            identity = _certified(name)
        else:
            entry = self.tokens.find(_bearer_token(metadata))
            identity = Identity(entry.role, entry.owner, entry.worker or ANY_NAME)
            if name:
                identity = replace(identity, owner=f"{identity.owner}, certificate {name}")
        if identity.role is not Role.ADMIN and identity.role not in MAY_CALL.get(rpc, ()):
            needed = " or ".join(sorted(MAY_CALL.get(rpc, frozenset()) | {Role.ADMIN}))
            raise PermissionDenied(f"{rpc} needs the role {needed}, but these credentials have the role {identity.role}")
        return identity


def require_name(identity: Identity, worker: str) -> None:
    """Raises PermissionDenied if a caller may not register under this name."""
    if identity.worker not in (ANY_NAME, worker):
        raise PermissionDenied(f"these credentials are for the worker {identity.worker!r}: use that name, or other credentials")


def _bearer_token(metadata: Metadata) -> str:
    """Raises Unauthenticated if the call carries none."""
    for key, value in metadata:
        scheme, _, token = value.partition(" ") if key == AUTHORIZATION and isinstance(value, str) else ("", "", "")
        if scheme.lower() == "bearer":
            return str(token.strip())
    raise Unauthenticated("this server requires a token: give --token-file, or token= in the SDK")


def _common_name(certificate: Certificate) -> str:
    """The client certificate's common name; empty if it has none, or several."""
    names = certificate.get("x509_common_name", [])
    return names[0].decode("utf-8", "replace") if len(names) == 1 else ""


def _certified(name: str) -> Identity:
    """The identity that a client certificate names, for servers without tokens. Raises PermissionDenied."""
    role, _, who = name.partition(":")
    if role not in set(Role) or not who:
        raise PermissionDenied(
            f"the client certificate's common name is {name!r}; it must be ROLE:NAME, for example worker:alice, with one of "
            f"the roles {', '.join(Role)}"
        )
    return Identity(Role(role), f"certificate {name}", who if role == Role.WORKER else ANY_NAME)
