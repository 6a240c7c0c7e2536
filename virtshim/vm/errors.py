"""Turns libvirt's errors into ours, by code and domain, never by text.

The message keeps libvirt's words, which for a failed start include the output of QEMU or vmwrapper.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

import libvirt

from virtshim.model.errors import (
    AlreadyExists,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    NotFound,
    PermissionRefused,
    ResourceExhausted,
    ShimError,
    Unavailable,
    Unimplemented,
    WrongState,
)

_BY_CODE: dict[int, type[ShimError]] = {
    libvirt.VIR_ERR_NO_DOMAIN: NotFound,
    libvirt.VIR_ERR_DOM_EXIST: AlreadyExists,
    libvirt.VIR_ERR_OPERATION_INVALID: WrongState,
    libvirt.VIR_ERR_OPERATION_TIMEOUT: DeadlineExceeded,
    libvirt.VIR_ERR_OPERATION_ABORTED: Unavailable,
    libvirt.VIR_ERR_RESOURCE_BUSY: ResourceExhausted,
    libvirt.VIR_ERR_NO_MEMORY: ResourceExhausted,
    libvirt.VIR_ERR_XML_ERROR: InvalidRequest,
    libvirt.VIR_ERR_XML_DETAIL: InvalidRequest,
    libvirt.VIR_ERR_XML_INVALID_SCHEMA: InvalidRequest,
    libvirt.VIR_ERR_CONFIG_UNSUPPORTED: InvalidRequest,
    libvirt.VIR_ERR_CPU_INCOMPATIBLE: InvalidRequest,
    libvirt.VIR_ERR_NO_SUPPORT: Unimplemented,
    libvirt.VIR_ERR_OPERATION_UNSUPPORTED: Unimplemented,
    libvirt.VIR_ERR_ACCESS_DENIED: PermissionRefused,
    libvirt.VIR_ERR_OPERATION_DENIED: PermissionRefused,
    libvirt.VIR_ERR_AUTH_FAILED: PermissionRefused,
    libvirt.VIR_ERR_AUTH_UNAVAILABLE: PermissionRefused,
    libvirt.VIR_ERR_AUTH_CANCELLED: PermissionRefused,
    libvirt.VIR_ERR_NO_CONNECT: Unavailable,
    libvirt.VIR_ERR_INVALID_CONN: Unavailable,
    libvirt.VIR_ERR_RPC: Unavailable,
    libvirt.VIR_ERR_GNUTLS_ERROR: Unavailable,
}

# Failures between us and libvirtd have a general code, but come from these parts of libvirt.
_TRANSPORT = frozenset({libvirt.VIR_FROM_RPC, libvirt.VIR_FROM_REMOTE})
_GENERAL = frozenset({libvirt.VIR_ERR_INTERNAL_ERROR, libvirt.VIR_ERR_SYSTEM_ERROR})

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EMFILE, errno.ENFILE})


def code_of(exc: libvirt.libvirtError) -> int:
    """libvirt-python returns None if libvirt set no error."""
    code: int | None = exc.get_error_code()
    return libvirt.VIR_ERR_INTERNAL_ERROR if code is None else code


def message_of(exc: libvirt.libvirtError) -> str:
    """libvirt's message without libvirt-python's additions."""
    message: str | None = exc.get_error_message()
    return message or str(exc)


def translated(what: str, exc: libvirt.libvirtError) -> ShimError:
    """The error to raise for `exc`; `what` names the action, for people."""
    message = f"{what}: {message_of(exc)}"
    code = code_of(exc)
    if code in _GENERAL and exc.get_error_domain() in _TRANSPORT:
        return Unavailable(message)
    if code == libvirt.VIR_ERR_SYSTEM_ERROR and exc.get_int1() in _NO_ROOM:
        return ResourceExhausted(message)
    return _BY_CODE.get(code, InternalError)(message)


@contextlib.contextmanager
def talking_to_libvirt(what: str) -> Iterator[None]:
    """Turns every libvirt error raised inside into a ShimError."""
    try:
        yield
    except libvirt.libvirtError as exc:
        raise translated(what, exc) from exc
