"""libvirt's error codes become virtshim's kinds, and the messages stay."""

from __future__ import annotations

import errno
import re

import libvirt
import pytest

from virtshim.model import errors as ours
from virtshim.vm.ends import start_failed
from virtshim.vm.errors import talking_to_libvirt


def _error(
    code: int, domain: int = libvirt.VIR_FROM_QEMU, int1: int = 0, words: str = "words of QEMU"
) -> libvirt.libvirtError:
    error = libvirt.libvirtError("a call failed")
    error.err = (code, domain, words, 2, None, None, None, int1, 0)
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


KILLED = "internal error: qemu unexpectedly closed the monitor"
REFUSED = f"{KILLED}: 2026-01-01T00:00:00.000000Z qemu-system-x86_64:"


@pytest.mark.parametrize(
    ("words", "kind", "told"),
    [
        (KILLED, ours.Unavailable, "killed during its start"),
        ("internal error: process exited while connecting to monitor: \n", ours.Unavailable, "killed during its start"),
        (f"{REFUSED} terminating on signal 15 from pid 7", ours.Unavailable, "killed during its start.*from pid 7"),
        (
            f"{REFUSED} cannot set up guest memory 'pc.ram': Cannot allocate memory",
            ours.ResourceExhausted,
            "lower the container's memory limit.*cannot set up guest memory 'pc.ram'",
        ),
        (f"{REFUSED} -device frob: unknown", ours.InternalError, "frob: unknown"),
        ("internal error: the capabilities are unreadable", ours.InternalError, "unreadable"),
    ],
)
def test_the_reason_for_qemus_end_during_its_start_is_read_from_its_output(
    words: str, kind: type[ours.ShimError], told: str
) -> None:
    failed = start_failed("web", _error(libvirt.VIR_ERR_INTERNAL_ERROR, words=words), "")
    assert type(failed) is kind
    assert re.search(f"start VM web: .*{told}", str(failed))


def test_the_message_is_not_used_if_libvirts_code_is_specific() -> None:
    assert type(start_failed("web", _error(libvirt.VIR_ERR_OPERATION_INVALID, words=KILLED), "")) is ours.WrongState


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("qemu: cannot set up guest memory 'pc.ram': Cannot allocate memory", ours.ResourceExhausted),
        ("qemu: terminating on signal 15 from pid 7", ours.Unavailable),
        ("qemu: -device frob: unknown", ours.InternalError),
    ],
)
def test_qemus_output_that_libvirt_has_not_read_counts_too(words: str, kind: type[ours.ShimError]) -> None:
    failed = start_failed("web", _error(libvirt.VIR_ERR_INTERNAL_ERROR, words=KILLED), words)
    assert type(failed) is kind
    assert words in str(failed)


def test_an_error_without_libvirts_code_is_internal() -> None:
    error = libvirt.libvirtError("")
    # The constructor takes what this thread saw last.
    error.err, error.args = None, ("a call failed",)
    with pytest.raises(ours.InternalError, match="list VMs: a call failed"), talking_to_libvirt("list VMs"):
        raise error
