"""vmwrapper adds NIC arguments to QEMU command lines as libvirt writes them."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmwrapper import argv_plan
from vmwrapper.argv_plan import PlanError

NIC = {"mac": "0a:58:0a:58:00:05", "mtu": 1450}
Q35 = ["-name", "guest=x", "-machine", "pc-q35-7.2,usb=off,dump-guest-core=off"]


def added(argv: list[str], nics: int = 1) -> list[str]:
    return argv_plan.nic_arguments(argv, [NIC] * nics, list(range(5, 5 + nics)))


def test_each_nic_is_a_netdev_on_its_descriptor_and_a_virtio_device() -> None:
    common = "mac=0a:58:0a:58:00:05,host_mtu=1450,bus=pcie.0"
    assert added(Q35, 2) == [
        "-netdev",
        "tap,id=virtshimnet0,fd=5,vhost=off",
        "-device",
        f"virtio-net-pci,netdev=virtshimnet0,id=virtshimnic0,{common},addr=0x10,romfile=",
        "-netdev",
        "tap,id=virtshimnet1,fd=6,vhost=off",
        "-device",
        f"virtio-net-pci,netdev=virtshimnet1,id=virtshimnic1,{common},addr=0x11,romfile=",
    ]


def test_each_queue_and_each_vhost_net_has_its_descriptor() -> None:
    nics = [{**NIC, "queues": 2, "vhost": True}, {**NIC, "vhost": True}, {**NIC, "queues": 3}, NIC]
    words = argv_plan.nic_arguments(Q35, nics, list(range(5, 15)))
    assert [words[at] for at in range(1, len(words), 4)] == [
        "tap,id=virtshimnet0,fds=5:6,vhost=on,vhostfds=7:8",
        "tap,id=virtshimnet1,fd=9,vhost=on,vhostfd=10",
        "tap,id=virtshimnet2,fds=11:12:13,vhost=off",
        "tap,id=virtshimnet3,fd=14,vhost=off",
    ]
    assert [",mq=on,vectors=" in words[at] for at in range(3, len(words), 4)] == [True, False, True, False]
    assert "mq=on,vectors=6" in words[3]
    assert "mq=on,vectors=8" in words[11]


def test_a_connection_to_passt_is_a_nic_of_one_queue() -> None:
    words = argv_plan.nic_arguments(Q35, [{**NIC, "mtu": 65520, "stream": True}], [7])
    assert words[:2] == ["-netdev", "stream,id=virtshimnet0,server=off,addr.type=fd,addr.str=7"]
    assert "virtio-net-pci,netdev=virtshimnet0," in words[3]
    assert "host_mtu=65520" in words[3]
    with pytest.raises(PlanError, match="descriptors"):
        argv_plan.nic_arguments(Q35, [{**NIC, "stream": True}], [7, 8])
    for more in ({"queues": 2}, {"vhost": True}):
        with pytest.raises(PlanError, match="passt"):
            argv_plan.nic_arguments(Q35, [{**NIC, **more, "stream": True}], [7, 8])


@pytest.mark.parametrize("queues", [0, 9, -1, "2", None, 1.5])
def test_an_impossible_number_of_queues_is_refused(queues: object) -> None:
    with pytest.raises(PlanError, match="queues"):
        argv_plan.nic_arguments(Q35, [{**NIC, "queues": queues}], [5])


@pytest.mark.parametrize(("nic", "count"), [({"queues": 2}, 1), ({"vhost": True}, 1), ({}, 2), ({"queues": 2}, 3)])
def test_the_number_of_descriptors_must_match_the_interfaces(nic: dict[str, object], count: int) -> None:
    with pytest.raises(PlanError, match="descriptors"):
        argv_plan.nic_arguments(Q35, [{**NIC, **nic}], list(range(5, 5 + count)))


def test_without_nics_nothing_is_added() -> None:
    assert added(Q35, 0) == []


@pytest.mark.parametrize(
    "device",
    [
        "pcie-root-port,port=16,chassis=9,bus=pcie.0,multifunction=on,addr=0x10",
        '{"driver":"pcie-root-port","bus":"pcie.0","multifunction":true,"addr":"0x10.0x3"}',
        "vfio-pci,host=0000:01:00.0,bus=pcie.0,addr=10.1",
    ],
)
def test_a_slot_that_libvirt_took_is_left_alone(device: str) -> None:
    assert "addr=0x11" in added([*Q35, "-device", device])[3]


def test_a_nic_has_the_slot_that_its_guest_knows() -> None:
    argv = argv_plan.nic_arguments(Q35, [NIC, NIC], [5, 6], [3, 0])
    assert [word.split("addr=")[1][:4] for word in argv if "addr=" in word] == ["0x13", "0x10"]
    taken = [*Q35, "-device", "vfio-pci,host=0000:01:00.0,bus=pcie.0,addr=13.0"]
    with pytest.raises(PlanError, match="free PCI slots"):
        argv_plan.nic_arguments(taken, [NIC, NIC], [5, 6], [3, 0])


@pytest.mark.parametrize(
    "device",
    [
        '{"driver":"virtio-blk-pci","bus":"pci.5","addr":"0x10"}',
        "virtio-blk-pci,bus=pci.5,addr=0x10",
        "{broken",
        "usb-kbd",
    ],
)
def test_the_same_number_on_another_bus_does_not_matter(device: str) -> None:
    assert "addr=0x10" in added([*Q35, "-device", device])[3]


@pytest.mark.parametrize(
    ("machine", "bus"),
    [
        ("q35", "pcie.0"),
        ("pc-q35-7.2,accel=kvm", "pcie.0"),
        ("type=pc-q35-rhel9.2.0,usb=off", "pcie.0"),
        ("pc-i440fx-7.2", "pci.0"),
        ("pc", "pci.0"),
        ("virt-8.0,gic-version=3", "pcie.0"),
    ],
)
def test_the_root_bus_follows_the_machine_type(machine: str, bus: str) -> None:
    assert argv_plan.root_bus(["-machine", machine]) == bus


@pytest.mark.parametrize("machine", ["microvm", "none", "s390-ccw-virtio"])
def test_a_machine_without_a_known_root_bus_is_refused_by_name(machine: str) -> None:
    with pytest.raises(PlanError, match=machine):
        added(["-machine", machine])


@pytest.mark.parametrize(
    "nic", [{}, {"mac": "x", "mtu": 1500}, {"mac": "0a:58:0a:58:00:05,x=y"[:17], "mtu": "1500"}, {**NIC, "mtu": 1}]
)
def test_a_malformed_interface_is_refused(nic: dict[str, object]) -> None:
    with pytest.raises(PlanError):
        argv_plan.nic_arguments(Q35, [nic], [5])


def test_an_answer_that_does_not_match_its_descriptors_is_refused() -> None:
    with pytest.raises(PlanError, match="2 interfaces and 1 descriptors"):
        argv_plan.nic_arguments(Q35, [NIC, NIC], [5])


def test_more_nics_than_slots_are_refused() -> None:
    with pytest.raises(PlanError, match="free PCI slots"):
        added(Q35, 11)


@given(
    argv=st.lists(
        st.text(max_size=12) | st.sampled_from(["-device", "-machine", "-M", "{}", "q35", "[1]", '{"bus":1}'])
    )
)
def test_any_command_line_gives_arguments_or_a_plan_error(argv: list[str]) -> None:
    with contextlib.suppress(PlanError):
        assert len(argv_plan.nic_arguments(argv, [NIC], [5])) == 4


@pytest.mark.parametrize("model", ["e1000e", "e1000", "rtl8139"])
def test_a_nic_of_another_model_has_no_virtio_options(model: str) -> None:
    added = argv_plan.nic_arguments(Q35, [NIC], [5], (), model)
    assert added[1] == "tap,id=virtshimnet0,fd=5,vhost=off"
    mac = "mac=0a:58:0a:58:00:05"
    assert added[3] == f"{model},netdev=virtshimnet0,id=virtshimnic0,{mac},bus=pcie.0,addr=0x10,romfile="
    with pytest.raises(PlanError, match="one queue"):
        argv_plan.nic_arguments(Q35, [{**NIC, "queues": 2}], [5, 6], (), model)


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(PlanError, match="NIC model 'ne2k'"):
        argv_plan.nic_arguments(Q35, [NIC], [5], (), "ne2k")


RAM = '{"qom-type":"memory-backend-ram","id":"pc.ram","size":134217728}'


def test_offered_memory_takes_the_place_of_the_guests_own() -> None:
    argv = [*Q35, "-object", '{"qom-type":"secret","id":"key"}', "-object", RAM, "-m", "128"]
    changed = argv_plan.memory_arguments(argv, 7, shared=False)
    assert changed[:-3] == argv[:-3]
    assert changed[-2:] == argv[-2:]
    assert json.loads(changed[-3]) == {
        "qom-type": "memory-backend-file", "id": "pc.ram", "size": 134217728, "mem-path": "/proc/self/fd/7", "share": False,
    }  # fmt: skip


@pytest.mark.parametrize("backends", [[], [RAM, RAM], [RAM.replace("backend-ram", "backend-memfd")]])
def test_memory_that_is_not_one_plain_part_is_not_replaced(backends: list[str]) -> None:
    argv = [*Q35, *(word for backend in backends for word in ("-object", backend))]
    with pytest.raises(PlanError, match="not one plain part"):
        argv_plan.memory_arguments(argv, 7, shared=True)
