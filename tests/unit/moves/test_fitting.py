"""A VM that cannot continue on this node is refused before anything is started, with the field and the remedy."""

from __future__ import annotations

import dataclasses
import re
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.moving import NAMED, Node, two_nodes

from virtshim.model.container import ContainerPhase
from virtshim.model.errors import InvalidRequest, WrongState
from virtshim.model.vm import Power
from virtshim.moves.fitting import Nic, Offer, Place, offer_in, refusals, text_of_offer
from virtshim.vm.guest_needs import GuestCpu, GuestNeeds, QemuHere, begins_at, cpu_of, cpu_xml, machine_of, version_in

GIB = 1 << 30
NEEDS = GuestNeeds("pc-q35-7.2", (7, 2), GuestCpu("Nehalem", "Intel", {"aes": "require"}), (2,))
OFFER = Offer("sha256:1", NEEDS, disk_bytes=4 * GIB, memory_bytes=2 * GIB, nics={"eth0": Nic(1450, 2)})
PLACE = Place("sha256:1", QemuHere((7, 2)), free_disk=8 * GIB, free_memory=4 * GIB, nics={"eth0": Nic(1450, 2)})


def place(**changes: object) -> Place:
    return dataclasses.replace(PLACE, **changes)


def test_a_vm_that_fits_is_not_refused() -> None:
    assert refusals("node1", OFFER, PLACE) == []


def test_a_newer_qemu_and_a_larger_mtu_are_no_obstacle() -> None:
    better = place(qemu=QemuHere((9, 0)), nics={"eth0": Nic(9000, 2)})
    assert refusals("node1", OFFER, better) == []


REFUSED = {
    "image": (
        place(image="sha256:2"),
        "image: .* node node1 is based on sha256:1, .* has sha256:2; name the image by its digest",
    ),
    "machine": (
        place(qemu=QemuHere((7, 2), has_machine=False)),
        "machine type: .* does not have the guest's pc-q35-7.2; install the QEMU of node node1 here",
    ),
    "QEMU": (place(qemu=QemuHere((7, 1))), "QEMU: .*version 7.2, and this node has the older 7.1; upgrade QEMU here"),
    "CPU": (
        place(qemu=QemuHere((7, 2), lacks_cpu="Host CPU does not provide required features: aes")),
        "CPU: .*required features: aes; choose a node with the same features, .*VirtletLibvirtCPUSetting",
    ),
    "disk": (
        place(free_disk=4 * GIB),
        "disk: the root disk takes 4096 MiB, and 4096 MiB are free below paths.state_dir; make room on this node",
    ),
    "memory": (
        place(free_memory=GIB),
        "memory: the guest has 2048 MiB, and 1024 MiB are available on this node; choose another node",
    ),
    "MTU": (
        place(nics={"eth0": Nic(1400, 2)}),
        "MTU: the NIC eth0 sends frames of 1450 bytes, .* carries 1400; give the network the MTU .* on node node1",
    ),
    "queues": (
        place(nics={"eth0": Nic(1450, 1)}),
        'queues: the NIC eth0 has 2, and would have 1 here; .* annotation virtshim.io/nic-queues: "2"',
    ),
    "a missing network": (place(nics={}), "network: the guest alone has the NIC eth0; give both nodes the same CNI"),
    "another network": (
        place(nics={"eth0": Nic(1450, 2), "net1": Nic(1500, 2)}),
        "network: this pod alone has the NIC net1; give both nodes the same CNI",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_each_thing_that_does_not_fit_is_named_with_its_remedy(what: str) -> None:
    there, text = REFUSED[what]
    (found,) = refusals("node1", OFFER, there)
    assert re.search(text, found), found


def test_all_that_does_not_fit_is_named_at_once() -> None:
    there = place(image="sha256:2", free_disk=0, free_memory=0, nics={"eth0": Nic(68, 1)})
    fields = [one.partition(":")[0] for one in refusals("node1", OFFER, there)]
    assert fields == ["image", "disk", "memory", "MTU", "queues"]


def test_a_disk_on_a_volume_and_huge_pages_need_no_room() -> None:
    offer = dataclasses.replace(OFFER, disk_bytes=0, memory_bytes=0)
    assert refusals("node1", offer, place(free_disk=0, free_memory=0)) == []


def test_of_a_saved_vm_qemu_alone_knows_the_nics() -> None:
    offer = dataclasses.replace(OFFER, nics=None)
    assert refusals("node1", offer, place(nics={"net1": Nic(68, 8)})) == []


def test_an_offer_arrives_as_it_was_sent() -> None:
    assert offer_in(text_of_offer(OFFER)) == OFFER


@pytest.mark.parametrize(
    "text",
    [None, 7, "", "[]", "{}", '[{"image": 1}]', text_of_offer(OFFER)[:-2], text_of_offer(OFFER) + " " * (1 << 16)],
)
def test_what_is_no_offer_is_refused(text: object) -> None:
    with pytest.raises(InvalidRequest, match="did not say properly"):
        offer_in(text)


# --- what libvirt says


DEFINITION = "<domain><os><type arch='x86_64' machine='pc-q35-7.2'>hvm</type></os>{cpu}</domain>"
NAMED_CPU = (
    "<cpu mode='custom' match='exact' check='full'><model fallback='forbid'>Nehalem</model><vendor>Intel</vendor>"
    "<topology sockets='1' dies='1' cores='1' threads='1'/><feature policy='require' name='aes'/>"
    "<feature policy='disable' name='vmx'/></cpu>"
)
CAPABILITIES = (
    "<domainCapabilities><cpu><mode name='host-passthrough' supported='yes'/><mode name='host-model' supported='{yes}'>"
    "<model fallback='forbid'>EPYC</model><vendor>AMD</vendor><feature policy='require' name='pku'/></mode></cpu>"
    "</domainCapabilities>"
)


def test_the_cpu_of_a_guest_is_the_one_that_its_definition_names() -> None:
    definition = DEFINITION.format(cpu=NAMED_CPU)
    assert machine_of(definition) == "pc-q35-7.2"
    cpu = cpu_of(definition, CAPABILITIES.format(yes="yes"))
    assert cpu == GuestCpu("Nehalem", "Intel", {"aes": "require", "vmx": "disable"})


@pytest.mark.parametrize("mode", ["host-passthrough", "maximum"])
def test_the_cpu_of_a_guest_that_has_all_is_the_nodes(mode: str) -> None:
    definition = DEFINITION.format(
        cpu=f"<cpu mode='{mode}' check='none'><topology sockets='1' cores='1' threads='1'/></cpu>"
    )
    assert cpu_of(definition, CAPABILITIES.format(yes="yes")) == GuestCpu("EPYC", "AMD", {"pku": "require"})
    assert cpu_of(definition, CAPABILITIES.format(yes="no")) is None


def test_libvirt_gets_the_cpu_to_compare_without_what_the_other_node_may_have_slipped_in() -> None:
    cpu = GuestCpu("<model>", "Intel", {"aes": "require", "'/><evil": "force"})
    text = cpu_xml(cpu)
    assert "<evil" not in text
    assert cpu_of(f"<domain>{text}</domain>", "<x/>") == cpu


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18)\nCopyright", (7, 2)),
        ("QEMU emulator version 10.0.2", (10, 0)),
    ],
)
def test_the_version_of_qemu_is_read_from_its_own_words(text: str, version: tuple[int, int]) -> None:
    assert version_in(text) == version


def saved_file(*, length: int = 1000, compression: int = 0) -> bytes:
    """The beginning of a file that libvirt saved."""
    return b"LibvirtQemudSave" + struct.pack("=5I56x", 2, length, 1, compression, 0) + b"<domain/>"


def test_qemus_part_of_a_saved_file_is_found_behind_libvirts() -> None:
    assert begins_at(saved_file(length=1000)) == 92 + 1000


@pytest.mark.parametrize(
    ("head", "why"),
    [
        (b"", "not a file that libvirt saved"),
        (b"LibvirtQemudSave", "not a file that libvirt saved"),
        (b"LibvirtQemudPart" + saved_file()[16:], "not a file that libvirt saved"),
        (saved_file(compression=1), "remove snapshot_image_format from libvirt's qemu.conf"),
    ],
)
def test_a_file_that_cannot_be_sent_to_qemu_is_refused(head: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        begins_at(head)


# --- the conversation of two nodes


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[tuple[Node, Node]]:
    with two_nodes(tmp_path) as both:
        yield both


def test_a_refused_move_starts_nothing_and_the_guest_runs_on(nodes: tuple[Node, Node]) -> None:
    here, there = nodes
    old = here.run(b"a guest's files")
    new = there.create(1, {**NAMED, "virtshim.io/restore-from": "here"}, content=b"")
    there.world.outside.memory_streams.has = QemuHere((7, 0))
    there.world.journal.forget()
    with pytest.raises(
        WrongState, match=r"default/db/vm cannot move here, and stays on node here\. QEMU: .*upgrade QEMU here"
    ):
        there.world.start(new)
    assert not {"vms.await_memory", "streams.receive"} & set(there.world.journal.calls)
    ended = there.world.container(new).exit
    assert ended is not None
    assert "upgrade QEMU here" in ended.message, "kubectl shows it"
    assert here.power(old) is Power.RUNNING
    assert not here.world.container(old).status.saving
    assert here.world.outside.vms.domains[here.world.domain(old)].boots == 1


def test_after_the_remedy_the_next_attempt_moves_the_vm(nodes: tuple[Node, Node]) -> None:
    here, there = nodes
    here.run(b"a guest's files")
    new = there.create(1, {**NAMED, "virtshim.io/restore-from": "here"}, content=b"")
    there.world.outside.vms.free_memory = 0
    with pytest.raises(WrongState, match="memory: the guest has"):
        there.world.start(new)
    there.world.outside.vms.free_memory = 1 << 40
    again = there.create_in(there.world.container(new).sandbox_id, attempt=1, content=b"")
    there.world.start(again)
    there.until_here(again)
    assert there.phase(again) is ContainerPhase.RUNNING
    assert there.disk.read_bytes() == b"a guest's files"
