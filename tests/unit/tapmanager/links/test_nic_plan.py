"""A guest's NICs follow from what CNI plugins of several kinds make."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping

import pytest

from tapmanager.cni.result import CniResult, parse_result
from tapmanager.errors import TapmanagerError
from tapmanager.links import network_plan, nic_plan
from tapmanager.links.nic_plan import KernelLink, KernelRoute
from tapmanager.links.policy_routes import Policies, PolicyRule, TableRoute
from tapmanager.network_values import Dns
from tapmanager.pod import Nic, NicFunction, Route

SANDBOX = "/run/netns/x"


def macs() -> Callable[[], str]:
    numbers = itertools.count(1)
    return lambda: f"02:00:00:00:00:{next(numbers):02x}"


def link(name: str = "eth0", kind: str = "veth", mtu: int = 1450, **more: object) -> KernelLink:
    return KernelLink(name=name, kind=kind, mac="0a:58:0a:58:00:05", mtu=mtu, **more)


def result(**raw: object) -> CniResult:
    return parse_result({"cniVersion": "1.0.0", **raw})


def planned(found: CniResult, *links: KernelLink) -> tuple[Nic, ...]:
    return network_plan.nics_of(network_plan.networks_of(found, links, ()), links, macs())


def functions(found: CniResult, *links: KernelLink, among: Mapping[str, str], drivers: Mapping[str, str]):
    return network_plan.functions_of(network_plan.networks_of(found, links, ()), links, among, drivers)


def beside(found: CniResult, *links: KernelLink, among: Mapping[str, str]) -> tuple[Nic, ...]:
    return network_plan.nics_of(network_plan.networks_of(found, links, ()), links, macs(), set(among))


BRIDGE = result(
    interfaces=[
        {"name": "cni0", "mac": "66:00:00:00:00:01"},
        {"name": "veth12", "mac": "66:00:00:00:00:02"},
        {"name": "eth0", "mac": "0a:58:0a:58:00:05", "sandbox": SANDBOX},
    ],
    ips=[{"address": "10.88.0.5/16", "gateway": "10.88.0.1", "interface": 2}],
    routes=[{"dst": "0.0.0.0/0"}],
)
BRIDGE_LINK = link(
    addresses=("10.88.0.5/16",),
    routes=(KernelRoute("0.0.0.0/0", "10.88.0.1"), KernelRoute("10.88.0.0/16", None)),
)


# What the plugin `sbr` leaves: all routes are in its table.
SBR = Policies(
    (PolicyRule(4, 32765, 100, "10.88.0.5/32"),),
    (TableRoute(100, "0.0.0.0/0", "10.88.0.1"), TableRoute(100, "10.88.0.0/16", source="10.88.0.5")),
)


def test_the_guest_takes_over_mac_mtu_and_address_of_a_bridged_veth() -> None:
    (nic,) = planned(BRIDGE, BRIDGE_LINK)
    assert (nic.link, nic.mac, nic.mtu) == ("eth0", "0a:58:0a:58:00:05", 1450)
    assert (nic.bridge, nic.tap) == ("br0", "tap0")
    assert nic.addresses == ("10.88.0.5/16",)
    assert nic.routes == (Route("0.0.0.0/0", "10.88.0.1"),)
    assert len({nic.mac, nic.link_mac, nic.bridge_mac}) == 3


def test_the_links_settings_are_kept_for_restoring_them() -> None:
    (nic,) = planned(BRIDGE, BRIDGE_LINK)
    assert nic.link_addresses == ("10.88.0.5/16",)
    assert nic.link_routes == (Route("10.88.0.0/16"), Route("0.0.0.0/0", "10.88.0.1"))


def test_calico_s_gateway_off_the_subnet_is_reached_by_an_on_link_route() -> None:
    calico = result(
        interfaces=[{"name": "cali123"}, {"name": "eth0", "sandbox": SANDBOX}],
        ips=[{"address": "192.168.4.7/32"}],
    )
    on = link(
        addresses=("192.168.4.7/32",),
        routes=(KernelRoute("169.254.1.1/32", None), KernelRoute("0.0.0.0/0", "169.254.1.1")),
    )
    (nic,) = planned(calico, on)
    assert nic.addresses == ("192.168.4.7/32",)
    assert nic.routes == (Route("169.254.1.1/32"), Route("0.0.0.0/0", "169.254.1.1"))


def test_routes_of_another_table_stay_in_that_table_in_the_guest() -> None:
    (nic,) = planned(BRIDGE, link(addresses=("10.88.0.5/16",), policies=SBR))
    assert (nic.rules, nic.table_routes) == (SBR.rules, SBR.routes)
    assert nic.routes == ()
    assert nic.addresses == ("10.88.0.5/32",), "its network is not on the main table's link"
    assert Nic.from_json(json.loads(json.dumps(nic.to_json())), "nic") == nic


def test_without_support_for_rules_in_virtshim_pods_that_need_them_are_refused() -> None:
    network_plan.refuse_policies(planned(BRIDGE, BRIDGE_LINK))
    with pytest.raises(TapmanagerError, match=r"eth0.*32765: lookup 100.*restart virtshim") as caught:
        network_plan.refuse_policies(planned(BRIDGE, link(addresses=("10.88.0.5/16",), policies=SBR)))
    assert caught.value.kind == "unimplemented"


@pytest.mark.parametrize(
    ("addresses", "mtus", "guest_mtu"),
    [
        (("10.0.1.9/32",), (0, 1450), 1450),
        (("10.0.1.9/32",), (1400, 1450), 1400),
        (("10.0.1.9/32",), (0, 0), 1500),
        (("10.0.1.9/32",), (0, 9000), 1500),
        (("10.0.1.9/32",), (0, 600), 600),
        (("10.0.1.9/32", "fd00:1::9/128"), (0, 600), 1280),
    ],
    ids=["cilium", "smallest", "none", "larger", "small", "ipv6 ends below"],
)
def test_a_routes_smaller_mtu_applies_in_the_guest_and_not_on_the_tap(
    addresses: tuple[str, ...], mtus: tuple[int, int], guest_mtu: int
) -> None:
    routes = (KernelRoute("10.0.1.1/32", None, mtu=mtus[0]), KernelRoute("0.0.0.0/0", "10.0.1.1", mtu=mtus[1]))
    found = result(ips=[{"address": address} for address in addresses])
    (nic,) = planned(found, link(mtu=1500, addresses=addresses, routes=routes))
    assert (nic.mtu, nic.guest_mtu) == (1500, guest_mtu)
    assert Nic.from_json(json.loads(json.dumps(nic.to_json())), "nic") == nic


def test_ptp_s_neighbours_are_not_on_link_so_the_guest_gets_a_host_address() -> None:
    ptp = result(
        interfaces=[{"name": "eth0", "sandbox": SANDBOX}],
        ips=[{"address": "10.1.0.2/24", "gateway": "10.1.0.1", "interface": 0}],
        routes=[{"dst": "0.0.0.0/0"}],
    )
    on = link(
        addresses=("10.1.0.2/24",),
        routes=(
            KernelRoute("0.0.0.0/0", "10.1.0.1"),
            KernelRoute("10.1.0.0/24", "10.1.0.1"),
            KernelRoute("10.1.0.1/32", None),
        ),
    )
    (nic,) = planned(ptp, on)
    assert nic.addresses == ("10.1.0.2/32",)
    assert nic.routes == (Route("10.1.0.1/32"), Route("10.1.0.0/24", "10.1.0.1"), Route("0.0.0.0/0", "10.1.0.1"))
    assert nic.link_addresses == ("10.1.0.2/24",)


def test_a_gateway_nothing_leads_to_gets_a_host_route() -> None:
    odd = result(interfaces=[{"name": "eth0", "sandbox": SANDBOX}], ips=[{"address": "10.1.0.2/32"}])
    (nic,) = planned(odd, link(addresses=("10.1.0.2/32",), routes=(KernelRoute("0.0.0.0/0", "10.9.9.9"),)))
    assert nic.routes == (Route("10.9.9.9/32"), Route("0.0.0.0/0", "10.9.9.9"))


def test_a_route_only_the_result_knows_is_added_by_the_addresss_gateway() -> None:
    found = result(
        interfaces=[{"name": "eth0", "sandbox": SANDBOX}],
        ips=[{"address": "10.88.0.5/16", "gateway": "10.88.0.1", "interface": 0}],
        routes=[{"dst": "0.0.0.0/0"}, {"dst": "172.30.0.0/16"}, {"dst": "172.31.0.0/16", "gw": "10.88.0.250"}],
    )
    (nic,) = planned(found, BRIDGE_LINK)
    assert nic.routes == (Route("172.30.0.0/16", "10.88.0.1"), Route("0.0.0.0/0", "10.88.0.1"))


def test_both_families_keep_their_addresses_and_routes_in_the_results_order() -> None:
    dual = result(
        interfaces=[{"name": "eth0", "sandbox": SANDBOX}],
        ips=[
            {"address": "fd00::5/64", "gateway": "fd00::1", "interface": 0},
            {"address": "10.88.0.5/16", "gateway": "10.88.0.1", "interface": 0},
        ],
    )
    on = link(
        addresses=("10.88.0.5/16", "fd00::5/64"),
        routes=(
            KernelRoute("10.88.0.0/16", None),
            KernelRoute("fd00::/64", None),
            KernelRoute("0.0.0.0/0", "10.88.0.1"),
            KernelRoute("::/0", "fe80::1"),
        ),
    )
    (nic,) = planned(dual, on)
    assert nic.addresses == ("fd00::5/64", "10.88.0.5/16")
    assert set(nic.routes) == {Route("0.0.0.0/0", "10.88.0.1"), Route("::/0", "fe80::1")}
    assert nic_plan.ips_of(dual) == ("fd00::5", "10.88.0.5")


def test_the_better_of_two_routes_to_one_place_is_kept() -> None:
    on = link(
        addresses=("10.88.0.5/16",),
        routes=(
            KernelRoute("10.88.0.0/16", None),
            KernelRoute("0.0.0.0/0", "10.88.0.2", 600),
            KernelRoute("0.0.0.0/0", "10.88.0.1", 100),
        ),
    )
    (nic,) = planned(BRIDGE, on)
    assert nic.routes == (Route("0.0.0.0/0", "10.88.0.1"),)


def test_several_interfaces_come_in_the_results_order_with_names_of_their_own() -> None:
    two = result(
        interfaces=[{"name": "eth1", "sandbox": SANDBOX}, {"name": "eth0", "sandbox": SANDBOX}],
        ips=[{"address": "10.88.0.5/16", "interface": 1}, {"address": "10.99.0.5/16", "interface": 0}],
    )
    nics = planned(two, BRIDGE_LINK, link("eth1", addresses=("10.99.0.5/16",)))
    assert [(nic.link, nic.tap, nic.bridge) for nic in nics] == [("eth1", "tap0", "br0"), ("eth0", "tap1", "br1")]


def test_names_that_the_plugin_uses_are_avoided() -> None:
    nics = planned(BRIDGE, BRIDGE_LINK, link("br0", "bridge"))
    assert [(nic.tap, nic.bridge) for nic in nics] == [("tap1", "br1")]


def test_an_interface_that_awss_plugin_only_mentions_is_not_the_pods() -> None:
    aws = result(
        interfaces=[
            {"name": "eni12ab"},
            {"name": "eth0", "sandbox": SANDBOX},
            {"name": "dummy12ab", "mac": "0", "sandbox": "0"},
        ],
        ips=[{"address": "192.168.4.7/32", "interface": 1}],
    )
    (nic,) = planned(aws, link(addresses=("192.168.4.7/32",)))
    assert nic.link == "eth0"


def test_an_old_result_without_interfaces_is_matched_by_address() -> None:
    old = result(ip4={"ip": "10.88.0.5/16", "gateway": "10.88.0.1", "routes": [{"dst": "0.0.0.0/0"}]})
    (nic,) = planned(old, link("other", addresses=("10.77.0.5/16",)), BRIDGE_LINK)
    assert nic.link == "eth0"


def test_a_nic_has_the_address_in_the_cni_result_if_the_kernel_shows_none() -> None:
    (nic,) = planned(BRIDGE, link())
    assert nic.addresses == ("10.88.0.5/16",)


@pytest.mark.parametrize(
    ("found", "links", "kind", "words"),
    [
        (result(interfaces=[{"name": "eth0", "sandbox": SANDBOX}]), [link()], "internal", "no IP address"),
        (BRIDGE, [link("other")], "internal", 'interface "eth0" is not in'),
        (BRIDGE, [link(kind="macvlan")], "unimplemented", "macvlan"),
        (
            BRIDGE,
            [link(policies=Policies(refused=("9: from all lookup 100: fwmark",)))],
            "unimplemented",
            "eth0.*from all lookup 100: fwmark.*remove it",
        ),
        (
            BRIDGE,
            [link(policies=SBR), link("tunl0", kind="ipip", frames=False, policies=SBR)],
            "unimplemented",
            "eth0.*32765: lookup 100: dev tunl0",
        ),
        (BRIDGE, [link(kind="netkit", frames=False)], "unimplemented", "of kind netkit, .*bpf.datapathMode=veth"),
        (BRIDGE, [link(kind="wireguard", frames=False)], "unimplemented", "of kind wireguard, .*a veth pair"),
        (result(ips=[{"address": "10.1.1.1/24"}]), [link()], "internal", "no interface in the pod"),
    ],
)
def test_the_error_says_what_cannot_be_given_to_a_guest(
    found: CniResult, links: list[KernelLink], kind: str, words: str
) -> None:
    with pytest.raises(TapmanagerError, match=words) as caught:
        planned(found, *links)
    assert caught.value.kind == kind


def test_the_pods_dns_settings_win_field_by_field() -> None:
    found = result(ips=[], dns={"nameservers": ["10.0.0.1"], "search": ["a"], "domain": "d", "options": ["x"]})
    assert nic_plan.dns_of(Dns(("10.96.0.10",)), found) == Dns(("10.96.0.10",), ("d", "a"), ("x",))
    assert nic_plan.dns_of(Dns(searches=("s",)), found) == Dns(("10.0.0.1",), ("s",), ("x",))


def test_a_plan_survives_its_way_through_json() -> None:
    (nic,) = planned(BRIDGE, BRIDGE_LINK)
    assert Nic.from_json(json.loads(json.dumps(nic.to_json())), "nic") == nic


# -- functions of network cards ------------------------------------------------------------------------------------------

VF = "0000:3b:02.1"
VF_LINK = link(
    name="net1",
    kind="",
    addresses=("10.1.0.7/24",),
    routes=(KernelRoute("10.1.0.0/24", None), KernelRoute("10.0.0.0/8", "10.1.0.1")),
    parent=VF,
    leads_out=True,
    alias="enp59s0v1",
    policies=SBR,
)


def test_a_function_goes_into_the_vm_with_its_links_settings() -> None:
    found = result(
        interfaces=[{"name": "net1", "sandbox": SANDBOX}],
        ips=[{"address": "10.1.0.7/24", "gateway": "10.1.0.1", "interface": 0}],
    )
    (function,) = functions(found, VF_LINK, among={"net1": VF}, drivers={VF: "iavf"})
    assert (function.link, function.pci, function.driver) == ("net1", VF, "iavf")
    assert (function.mac, function.mtu, function.addresses) == ("0a:58:0a:58:00:05", 1450, ("10.1.0.7/24",))
    assert function.routes == (Route("10.0.0.0/8", "10.1.0.1"),)
    assert (function.rules, function.table_routes) == (SBR.rules, SBR.routes)
    assert beside(found, VF_LINK, among={"net1": VF}) == ()
    assert function.alias == "enp59s0v1", "where host-device looks for the name that the link had on the host"
    assert NicFunction.from_json(json.loads(json.dumps(function.to_json())), "function") == function


def test_a_function_beside_an_ordinary_nic_is_found_without_a_result_entry() -> None:
    """Multus tells of the first network alone."""
    (function,) = functions(BRIDGE, BRIDGE_LINK, VF_LINK, among={"net1": VF}, drivers={VF: "iavf"})
    assert function.addresses == ("10.1.0.7/24",)
    (nic,) = beside(BRIDGE, BRIDGE_LINK, VF_LINK, among={"net1": VF})
    assert nic.link == "eth0"


def test_a_function_without_addresses_gets_no_addresses_of_another_network() -> None:
    old = result(ips=[{"address": "10.88.0.5/16"}])
    bare = link(name="net1", kind="", parent=VF, leads_out=True)
    (function,) = functions(old, BRIDGE_LINK, bare, among={"net1": VF}, drivers={VF: "iavf"})
    assert (function.addresses, function.routes) == ((), ())


def test_a_function_already_at_vfio_is_found_by_the_result_only() -> None:
    found = result(
        interfaces=[{"name": "net1", "sandbox": SANDBOX, "mac": "0A:58:00:00:00:09", "pciID": VF, "mtu": 9000}],
        ips=[{"address": "10.1.0.7/24", "gateway": "10.1.0.1", "interface": 0}],
        routes=[{"dst": "0.0.0.0/0"}],
    )
    (function,) = functions(found, among={}, drivers={VF: "vfio-pci"})
    assert (function.pci, function.driver, function.mac, function.mtu) == (VF, "", "0a:58:00:00:00:09", 9000)
    assert function.addresses == ("10.1.0.7/24",)
    assert function.routes == (Route("0.0.0.0/0", "10.1.0.1"),)


def test_a_missing_interface_is_refused_and_the_error_says_what_is_missing() -> None:
    found = result(interfaces=[{"name": "net1", "sandbox": SANDBOX}], ips=[{"address": "10.1.0.7/24", "interface": 0}])
    assert functions(found, among={}, drivers={}) == ()
    with pytest.raises(TapmanagerError, match="its PCI device is not known"):
        planned(found)
