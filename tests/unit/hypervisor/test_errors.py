"""libvirt's codes become our kinds; the words stay."""

from __future__ import annotations

import errno

import libvirt
import pytest

from virtshim.domain import errors as ours
from virtshim.hypervisor.errors import talking_to_libvirt


def _error(code: int, domain: int = libvirt.VIR_FROM_QEMU, int1: int = 0) -> libvirt.libvirtError:
    error = libvirt.libvirtError("a call failed")
    error.err = (code, domain, "words of QEMU", 2, None, None, None, int1, 0)
    return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (_error(libvirt.VIR_ERR_NO_DOMAIN), ours.NotFound),
        (_error(libvirt.VIR_ERR_OPERATION_INVALID), ours.WrongState),
        (_error(libvirt.VIR_ERR_XML_ERROR), ours.InvalidRequest),
        (_error(libvirt.VIR_ERR_CONFIG_UNSUPPORTED), ours.InvalidRequest),
        (_error(libvirt.VIR_ERR_OPERATION_TIMEOUT), ours.DeadlineExceeded),
        (_error(libvirt.VIR_ERR_ACCESS_DENIED), ours.PermissionRefused),
        (_error(libvirt.VIR_ERR_INTERNAL_ERROR), ours.InternalError),
        (_error(libvirt.VIR_ERR_INTERNAL_ERROR, libvirt.VIR_FROM_RPC), ours.Unavailable),
        (_error(libvirt.VIR_ERR_SYSTEM_ERROR, libvirt.VIR_FROM_RPC), ours.Unavailable),
        (_error(libvirt.VIR_ERR_SYSTEM_ERROR, int1=errno.ENOSPC), ours.ResourceExhausted),
        (_error(libvirt.VIR_ERR_SYSTEM_ERROR, int1=errno.EACCES), ours.InternalError),
        (_error(999_999), ours.InternalError),
    ],
)
def test_a_code_becomes_a_kind(error: libvirt.libvirtError, kind: type[ours.ShimError]) -> None:
    with pytest.raises(kind, match="start VM x: words of QEMU") as raised, talking_to_libvirt("start VM x"):
        raise error
    assert type(raised.value) is kind
    assert raised.value.__cause__ is error


def test_an_error_that_libvirt_never_set_is_internal() -> None:
    error = libvirt.libvirtError("")
    # The constructor takes what this thread saw last.
    error.err, error.args = None, ("a call failed",)
    with pytest.raises(ours.InternalError, match="list VMs: a call failed"), talking_to_libvirt("list VMs"):
        raise error
