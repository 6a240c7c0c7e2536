"""virtshim accepts what a pod with containers beside its VM may ask for, and refuses the rest by name."""

from __future__ import annotations

import re

import pytest

from virtshim.annotations.beside_containers import guest_ports, own_ports, refuse_alone, refuse_beside_containers
from virtshim.annotations.parse import parse_vm_options
from virtshim.model.errors import InvalidRequest
from virtshim.model.network import GuestPorts
from virtshim.model.sandbox import PortMapping

PORTS = "virtshim.io/ports"


def declared(*ports: int | str, protocol: str = "tcp") -> list[PortMapping]:
    return [PortMapping(protocol, int(port), 0, "") for port in ports]


def asked(text: str) -> GuestPorts:
    return guest_ports(parse_vm_options({PORTS: text}), declared(80))


def test_the_annotation_names_the_guests_ports() -> None:
    assert asked("22,443,53/udp") == GuestPorts((22, 443), (53,))
    assert asked(" 53/tcp, 53/udp ") == GuestPorts((53,), (53,))
    assert asked("15000") == GuestPorts((15000,))
    assert asked("") == GuestPorts()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("22,ssh", "'ssh' is not a port; write them like 22,443,53/udp"),
        ("0", "'0' is not a port"),
        ("65536", "'65536' is not a port"),
        ("022", "'022' is not a port"),
        ("22;23", "'22;23' is not a port"),
        ("22,", "'' is not a port"),
        ("22/icmp", "'22/icmp' is not a port"),
        ("22,22/tcp", "port 22/tcp is there twice"),
        ("5/udp,5/udp", "port 5/udp is there twice"),
        ("9/sctp", "passt carries no SCTP"),
        (",".join(str(port) for port in range(1, 66)), "65 ports; a virtual machine has at most 64"),
    ],
)
def test_a_bad_port_is_refused_by_name(text: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(f"annotation {PORTS}: ")) as refused:
        parse_vm_options({PORTS: text})
    assert words in str(refused.value)


def test_without_the_annotation_the_declared_ports_are_the_guests_each_once() -> None:
    options = parse_vm_options({})
    assert guest_ports(options, [*declared(80, 80, 443), *declared(53, protocol="udp")]) == GuestPorts((80, 443), (53,))
    assert guest_ports(options, []) == GuestPorts()


def test_the_ports_of_a_meshs_proxy_are_not_the_guests() -> None:
    meshes = declared(15000, 15001, 15006, 15008, 15020, 15021, 15090, 4140, 4143, 4190, 4191, 80)
    assert guest_ports(parse_vm_options({}), meshes) == GuestPorts((80,))


def test_declared_ports_that_passt_cannot_carry_are_refused() -> None:
    for options in (parse_vm_options({}), parse_vm_options({PORTS: "80"})):
        with pytest.raises(InvalidRequest, match="port 9 is SCTP, which passt does not carry"):
            guest_ports(options, declared(9, protocol="sctp"))
    with pytest.raises(InvalidRequest, match=r"65 ports.*name the guest's in the annotation virtshim\.io/ports"):
        guest_ports(parse_vm_options({}), declared(*range(1, 66)))


@pytest.mark.parametrize(
    "annotations",
    [
        {"virtshim.io/network-filter": "mac"},
        {"virtshim.io/nic-queues": "2"},
        {"virtshim.io/vm": "db", "virtshim.io/on-stop": "save"},
        {"virtshim.io/vm": "db", "virtshim.io/on-stop": "save", "virtshim.io/state-volume": "/state"},
        {"virtshim.io/vm": "db", "virtshim.io/restore-from": "node-2"},
        {"virtshim.io/warm-start": "true"},
    ],
)
def test_what_passt_does_not_support_is_refused_by_name(annotations: dict[str, str]) -> None:
    with pytest.raises(InvalidRequest, match="use the RuntimeClass virtshim") as refused:
        refuse_beside_containers(parse_vm_options(annotations))
    assert list(annotations)[-1] in str(refused.value)


def test_other_annotations_hold_beside_containers_too() -> None:
    refuse_beside_containers(parse_vm_options({"virtshim.io/nic-queues": "1", "virtshim.io/vm": "db", PORTS: "22"}))


@pytest.mark.parametrize("annotations", [{PORTS: ""}, {PORTS: "22"}, {"virtshim.io/vm-container": "vm"}])
def test_a_vm_alone_in_its_pod_cannot_have_the_annotations(annotations: dict[str, str]) -> None:
    with pytest.raises(InvalidRequest, match="use the RuntimeClass virtshim-pod"):
        refuse_alone(parse_vm_options(annotations))


@pytest.mark.parametrize("name", ["", "VM", "a b", "-a", "x" * 64])
def test_the_vms_container_has_a_name(name: str) -> None:
    with pytest.raises(InvalidRequest, match="is not the name of a container"):
        parse_vm_options({"virtshim.io/vm-container": name})


def test_kubelet_names_the_ports_of_a_vm_that_is_an_init_container_or_a_sidecar() -> None:
    told = '[{"name":"web","containerPort":8080,"protocol":"TCP"},{"containerPort":53,"protocol":"UDP"}]'
    found = own_ports({"io.kubernetes.container.ports": told})
    assert guest_ports(parse_vm_options({}), [*declared(8080), *found]) == GuestPorts((8080,), (53,))


@pytest.mark.parametrize(
    "told", ["", "no JSON", "[1]", '{"containerPort": 1}', '[{"containerPort": null}]', "[" * 100_000]
)
def test_what_is_no_list_of_ports_names_none(told: str) -> None:
    assert own_ports({"io.kubernetes.container.ports": told}) == ()
