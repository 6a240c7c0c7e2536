"""A local user without rights sees no VM on a libvirt that is set up as documented."""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from own_libvirtd import OwnLibvirtd, missing

pytestmark = [pytest.mark.e2e, pytest.mark.faults, pytest.mark.hostile]

GUIDE = Path(__file__).resolve().parents[2] / "docs/install.md"
DOMAIN = """<domain type='qemu'><name>vm</name><title>seen</title><memory>65536</memory><vcpu>1</vcpu>
<os><type arch='x86_64' machine='q35'>hvm</type></os></domain>"""
LOCAL_USER = ("setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups")


@contextlib.contextmanager
def libvirtd(settings: str) -> Iterator[OwnLibvirtd]:
    """A libvirtd with one VM."""
    if why := missing():
        pytest.skip(why)
    made = OwnLibvirtd(settings=settings)
    try:
        made.start()
        command = [*made.enter, "virsh", "-c", "qemu:///system", "define", "/dev/stdin"]
        subprocess.run(command, input=DOMAIN, text=True, check=True, capture_output=True)
        yield made
    finally:
        made.end()


def seen_by_a_local_user(there: OwnLibvirtd) -> str:
    command = [*there.enter, *LOCAL_USER, "virsh", "-r", "-c", "qemu:///system", "dumpxml", "vm"]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60).stdout


def test_a_local_user_sees_no_vm_on_a_libvirt_set_up_as_documented() -> None:
    (setting,) = re.findall(r"`(unix_sock_ro_perms = .*?)`", GUIDE.read_text())
    with libvirtd("") as there:
        assert "<title>seen</title>" in seen_by_a_local_user(there), "he would on one that was not"
    with libvirtd(f"{setting}\n") as there:
        assert seen_by_a_local_user(there).strip() == ""
