"""A taken-over QEMU that writes another file name into its disk's header gains nothing at the next start of that
disk."""

from __future__ import annotations

import libvirt
import pytest

from virtshim.vm.disk_chains import OPEN_IMAGES_SINCE

pytestmark = pytest.mark.hostile

# A VM has run once; then its QEMU writes into its disk, and it is started again.
ONCE = """
import subprocess, struct
from virtshim.model.errors import WrongState
from virtshim.vm import driver
boot(); hypervisor.destroy(SPEC.uuid, SPEC.container_id)
DISK = SPEC.disks[0].path
def names(path, kind):
    subprocess.run(["qemu-img", "rebase", "-u", "-F", kind, "-b", path, DISK], check=True)
def patch(at, kind, value):
    with open(DISK, "r+b") as file:
        file.seek(at); file.write(struct.pack(kind, value))
"""
AGAIN = """
try:
    hypervisor.start(SPEC.uuid)
    say("started")
except WrongState as exc:
    say(str(exc))
"""


REWRITTEN = {
    "names('/etc/shadow', 'raw')": "names '/etc/shadow' as the file below it",
    "names('/dev/zero', 'raw')": "names '/dev/zero' as the file below it",
    "names(SPEC.disks[0].backing.path, 'qcow2')": "the format 'qcow2', not 'raw'",
    'names(\'json:{"driver":"nbd","host":"127.0.0.1"}\', \'raw\')': "names 'json:",
    "patch(8, '>Q', 0)": "names 'nothing'",
    "patch(72, '>Q', 4)": "a file for its data",
    "patch(32, '>I', 2)": "encrypted",
    "patch(0, '>I', 0)": "not a qcow2 any more",
}


def test_a_disk_that_names_another_file_is_not_started(place) -> None:
    as_made = "with open(DISK, 'rb') as file: made = file.read()\n"
    as_before = "with open(DISK, 'wb') as file: file.write(made)\n"
    attempts = "".join(f"{rewritten}{AGAIN}{as_before}" for rewritten in REWRITTEN)
    *refused, last = place.run(f"{ONCE}{as_made}{attempts}{AGAIN}")
    for said, why in zip(refused, REWRITTEN.values(), strict=True):
        assert "is not as virtshim made it" in said
        assert why in said
    assert last == "started", "the disk as it was made"


@pytest.mark.parametrize("named", ["/nowhere/at/all", "/etc/shadow"])
def test_a_disk_header_changed_after_its_check_is_not_followed(place, named: str) -> None:
    """Another VM's QEMU of the same user may be fast enough."""
    said = place.run(
        f"{ONCE}\nnames({named!r}, 'raw')\ndriver.refuse_changed = lambda disk: None\n{AGAIN}"
        "wait_for_log(b'guest is up', 2)\n"
        "say(Path(f'/proc/{qemu_pid()}/cmdline').read_bytes().count(b'" + named + "'))\n"
        "say([os.path.realpath(f'/proc/{qemu_pid()}/fd/{n}') for n in os.listdir(f'/proc/{qemu_pid()}/fd')])\n"
    )
    assert said[:2] == ["started", 0]
    assert named not in said[2]


def test_the_image_under_a_disk_still_belongs_to_root(place) -> None:
    """libvirt gets the backing chain of a disk, and gives QEMU's user no rights on it."""
    said = place.run(
        f"{ONCE}\n{AGAIN}found = os.stat(SPEC.disks[0].backing.path); say([found.st_uid, found.st_mode & 0o022])"
    )
    assert said == ["started", [0, 0]]


@pytest.mark.skipif(libvirt.getVersion() < OPEN_IMAGES_SINCE, reason="NOT TESTED: needs libvirt 9.0")
def test_a_vm_runs_on_an_image_that_only_root_can_read(place) -> None:
    said = place.run(
        "os.chmod(SPEC.disks[0].backing.path, 0o600); boot()\n"
        "say([os.path.realpath(f'/proc/{qemu_pid()}/fd/{n}') for n in os.listdir(f'/proc/{qemu_pid()}/fd')])\n"
        "os.kill(os.getpid(), 9)",
        expect=-9,
    )
    assert str(place.vm / "base.raw") in said[0]
    # Another process finds it again, and starts it once more.
    said = place.run(
        "say(state()[0]); hypervisor.destroy(SPEC.uuid, SPEC.container_id)\n"
        "hypervisor.start(SPEC.uuid); wait_for_log(b'guest is up', 2); say(state()[0])"
    )
    assert said == ["running", "running"]


def test_a_disk_is_limited_to_the_size_that_the_node_allows(place) -> None:
    said = place.run(
        "import libvirt\n"
        "from virtshim.vm.elements.disk import DiskRates\n"
        "profile = dataclasses.replace(profile, disk_rates=DiskRates(iops=200, bandwidth=20 << 20))\n"
        "hypervisor._profile = profile\n"
        "boot()\n"
        "with connection.using('read limits') as conn:\n"
        "    limits = conn.lookupByName(SPEC.name).blockIoTune('sda', libvirt.VIR_DOMAIN_AFFECT_LIVE)\n"
        "say([limits['total_iops_sec'], limits['total_bytes_sec']])"
    )
    assert said == [[200, 20 << 20]]
