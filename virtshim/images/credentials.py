"""Kubelet's credentials, made ready for HTTP headers. Pure. Nothing here may reach a log or an error text."""

from __future__ import annotations

import base64
import binascii

from virtshim.domain.errors import InvalidRequest
from virtshim.domain.image import Credentials
from virtshim.images.names import host_of

# All names of the registry that is meant when none is written.
_DEFAULT_REGISTRY = frozenset({"docker.io", "index.docker.io", "registry-1.docker.io"})


def basic_login(credentials: Credentials | None) -> str:
    """base64 of `user:password`, "" if there is none. Raises InvalidRequest for an `auth` that is not that."""
    if credentials is None:
        return ""
    if credentials.username or credentials.password:
        return base64.b64encode(f"{credentials.username}:{credentials.password}".encode()).decode()
    if not credentials.auth:
        return ""
    try:
        # Docker's own decoder takes NUL padding off, too.
        login = base64.b64decode(credentials.auth, validate=True).rstrip(b"\0")
    except (binascii.Error, ValueError) as exc:
        raise InvalidRequest("the credentials' auth field is not base64; correct the image pull secret") from exc
    if b":" not in login:
        raise InvalidRequest("the credentials' auth field is not user:password; correct the image pull secret")
    return base64.b64encode(login).decode()


def meant_for(credentials: Credentials | None, authority: str) -> bool:
    """Whether these credentials may be shown to `host[:port]`: they name no server, or this one."""
    if credentials is None:
        return False
    server = credentials.server_address.partition("://")[2] or credentials.server_address
    server = server.partition("/")[0]
    if not server:
        return True
    if {host_of(server), host_of(authority)} <= _DEFAULT_REGISTRY:
        return True
    return host_of(server) == host_of(authority) and (":" not in _port_part(server) or server == authority)


def _port_part(authority: str) -> str:
    return authority.rpartition("]")[2]
