"""A plugin's rules and tables reach the guest, or are refused. The VM is a namespace behind the taps' descriptors."""

from __future__ import annotations

import contextlib
import secrets
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from far_subnet import POD, POD6, beyond, ip, namespace, second_network
from packets import Echoes
from shapes import bridged, install
from tap_node import TapNode, until
from vm_pods import Vm, forwarding_host, marks, told_of, vm

from tapmanager.links import kernel_links, netns
from tapmanager.links.policy_routes import Policies, PolicyRule, TableRoute
from virtshim.guest.set_up_scripts import policy_routes_command

pytestmark = pytest.mark.network

# -- packets -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def two_networks(node: TapNode, bridge: str) -> Iterator[Vm]:
    install(node)
    second = second_network(f"{node.network}-1", bridge, node.leases)
    first = {"name": node.network, **bridged("46")(node, 2)[0]}
    node.configure({"type": "meta", "cniDir": str(node.folder / "multus"), "delegates": [first, second]})
    with forwarding_host(), vm(node, "VM") as made:
        yield made


def set_in_guest(made: Vm) -> None:
    """Sets them as the guest's agent does, any number of times."""
    words = policy_routes_command(made.network.interfaces)
    for _ in range(2):
        subprocess.run(["ip", "netns", "exec", Path(made.place.path).name, *words], check=True, timeout=60)


def test_a_guest_answers_on_the_network_of_the_request(tap_node: TapNode) -> None:
    bridge = f"vstb{secrets.token_hex(3)}"
    with beyond(bridge) as far, two_networks(tap_node, bridge) as made, Echoes([made.place]) as echoes:
        first, second = made.network.interfaces
        assert (first.rules, first.table_routes) == ((), ())
        assert {rule.source for rule in second.rules} == {f"{POD}/32", f"{POD6}/128"}
        assert not any(far.pings(address) for address in (POD, POD6)), "its answers leave by the first network"
        set_in_guest(made)
        for address in (POD, POD6):
            assert far.pings(address)
            for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
                assert echoes.answer(far, address, kind, b"who is there" * 90)
        # Other traffic uses the usual route, once ARP's next request follows the new rules.
        until(lambda: made.place.pings(f"{tap_node.subnet}.1"), 60, "an answer of the first network's gateway")
        words = marks([made])
    until(lambda: not told_of(tap_node, words), 60, "all of the pod gone")
    assert [path for path in tap_node.leases.rglob("*") if path.is_file() and path.name[0].isdigit()] == []


# -- what a guest cannot be given --------------------------------------------------------------------------------------


@pytest.fixture
def inside() -> Iterator[str]:
    """A namespace with a NIC and a routing table for it."""
    with namespace("rules") as path:
        name = Path(path).name
        for words in ("link add eth0 type veth peer name eth1", "link set eth0 up", "link set eth1 up"):
            ip(*words.split(), inside=name)
        ip("address", "add", "10.1.0.2/24", "dev", "eth0", inside=name)
        ip("address", "add", "fd00:1::2/64", "dev", "eth0", "nodad", inside=name)
        yield path


def policies(path: str) -> dict[str, Policies]:
    return {link.name: link.policies for link in netns.run_inside(path, kernel_links.read)}


def done(path: str, *commands: str) -> None:
    for command in commands:
        ip(*command.split(), inside=Path(path).name)


def test_rules_and_tables_are_read_with_everything_that_guests_get(inside: str) -> None:
    done(
        inside,
        "route add 10.1.0.0/24 dev eth0 src 10.1.0.2 table 1000",
        "route add default via 10.1.0.1 dev eth0 table 1000 metric 7 mtu 1300",
        "route add 10.7.0.0/16 via 10.9.9.9 dev eth0 onlink table 1000",
        "-6 route add default via fd00:1::1 dev eth0 table 100",
        "rule add from 10.1.0.2 to 10.0.0.0/8 priority 9 table 1000",
        "rule add from all priority 10 table 1000",
        "-6 rule add from fd00:1::2 priority 11 table 100",
        "rule add from 10.1.0.2 priority 12 table 77",  # which is empty
    )
    found = policies(inside)
    assert found["eth1"] == Policies()
    assert found["eth0"].refused == ()
    assert set(found["eth0"].rules) == {
        PolicyRule(4, 9, 1000, "10.1.0.2/32", "10.0.0.0/8"),
        PolicyRule(4, 10, 1000),
        PolicyRule(6, 11, 100, "fd00:1::2/128"),
    }
    assert set(found["eth0"].routes) == {
        TableRoute(1000, "10.1.0.0/24", "", "10.1.0.2"),
        TableRoute(1000, "0.0.0.0/0", "10.1.0.1", "", 7, 1300),
        TableRoute(1000, "10.7.0.0/16", "10.9.9.9"),
        TableRoute(100, "::/0", "fd00:1::1", "", 1024),
    }


@pytest.mark.parametrize(
    ("command", "field"),
    [
        ("rule add fwmark 5 table 100", "fwmark"),
        ("rule add iif eth1 table 100", "iif"),
        ("rule add oif eth0 table 100", "oif"),
        ("rule add uidrange 5-9 table 100", "uidrange"),
        ("rule add ipproto tcp table 100", "ipproto"),
        ("rule add ipproto tcp dport 80 table 100", "dport, ipproto"),
        ("rule add tos 0x10 table 100", "tos"),
        ("rule add not from 10.1.0.9 table 100", "not"),
        ("rule add tun_id 9 table 100", "tun_id"),
        ("rule add from all suppress_prefixlength 0 table 100", "suppress_prefixlength"),
        ("rule add from 10.1.0.9 blackhole", "blackhole"),
        ("rule add from 10.1.0.9 prohibit", "prohibit"),
        ("rule add from 10.1.0.9 goto 32766", "goto"),
        ("rule add priority 0 from 10.1.0.9 table 100", "priority 0"),
        ("rule add priority 3 from 10.1.0.9 table main", "every system has"),
        (
            "route add 10.5.0.0/16 table 100 nexthop via 10.1.0.1 dev eth0 nexthop via 10.1.0.3 dev eth0",
            "10.5.0.0/16: nexthop",
        ),
        ("route add blackhole 10.5.0.0/16 table 100", "10.5.0.0/16: blackhole"),
        ("route add 10.5.0.0/16 via 10.1.0.1 tos 0x10 table 100", "10.5.0.0/16: tos"),
        ("route add 10.5.0.0/16 via 10.1.0.1 advmss 900 table 100", "metrics other than mtu"),
        ("route add 10.5.0.0/16 via inet6 fd00:1::1 dev eth0 table 100", "via inet6"),
        ("route add 10.5.0.0/16 encap ip id 7 dst 10.1.0.9 dev eth0 table 100", "encap"),
        ("route append default via 10.1.0.3 dev eth0 table 100", "0.0.0.0/0: nexthop"),
    ],
)
def test_routing_that_no_guest_can_have_is_refused_by_name(inside: str, command: str, field: str) -> None:
    done(inside, "route add default via 10.1.0.1 dev eth0 table 100", "rule add from 10.1.0.2 priority 9 table 100")
    try:
        done(inside, command)
    except subprocess.CalledProcessError as exc:
        pytest.skip(f"NOT TO BE HAD HERE: in this kernel {command}: {exc.stderr.strip()}")
    assert [one for one in policies(inside)["eth0"].refused if one.endswith(field)]


def test_a_group_of_next_hops_is_refused(inside: str) -> None:
    done(
        inside,
        "nexthop add id 5 via 10.1.0.1 dev eth0",
        "route add default nhid 5 table 100",
        "rule add from 10.1.0.2 table 100",
    )
    (refused,) = policies(inside)["eth0"].refused
    assert refused.endswith("route 0.0.0.0/0: nhid")


def test_a_vrf_is_refused(inside: str) -> None:
    try:
        done(inside, "link add vrf1 type vrf table 10")
    except subprocess.CalledProcessError as exc:
        pytest.skip(f"NOT TO BE HAD HERE: VRFs in this kernel: {exc.stderr.strip()}")
    done(inside, "link set vrf1 up", "link set eth0 master vrf1", "route add default via 10.1.0.1 dev eth0 table 10")
    assert [one for one in policies(inside)["eth0"].refused if "l3mdev" in one]


def test_rules_without_effect_are_not_given_to_the_guest(inside: str) -> None:
    done(
        inside,
        "rule add fwmark 5 table 100",
        "rule add from 10.1.0.9 table main",
        "-6 rule add from fd00:1::9 table 77",
    )
    assert set(policies(inside).values()) == {Policies()}
