"""A guest gets its part of each of its pod's networks, and nothing else."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import pytest

from tapmanager.cni.delegate_records import Delegate
from tapmanager.cni.result import CniResult, parse_result
from tapmanager.errors import TapmanagerError
from tapmanager.links import network_plan
from tapmanager.links.nic_plan import KernelLink, KernelRoute
from tapmanager.pod import Nic, NicFunction, Route

VF = "0000:3b:02.1"
SANDBOX = "/run/netns/x"


def result(name: str, *, ip: str = "", routes: Sequence[Mapping[str, str]] = (), **said: object) -> CniResult:
    """Of a plugin that put the interface `name` into the pod; `ip` 10.88.0.5 has the gateway 10.88.0.1."""
    gateway = ip.rpartition(".")[0] + ".1"
    ips = [{"address": f"{ip}/24", "gateway": gateway, "interface": 0}] if ip else []
    interfaces = [{"name": name, "sandbox": SANDBOX, **said}]
    return parse_result({"interfaces": interfaces, "ips": ips, "routes": list(routes)})


def link(name: str, ip: str = "", kind: str = "veth", routes: Sequence[KernelRoute] = (), **more: object) -> KernelLink:
    subnet = (KernelRoute(f"{ip.rpartition('.')[0]}.0/24", None),) if ip else ()
    addresses = (f"{ip}/24",) if ip else ()
    more = {"leads_out": True, **more}
    return KernelLink(name, kind, f"0a:58:00:00:00:{len(name):02x}", 1500, addresses, (*subnet, *routes), **more)


ANYWHERE = {"dst": "0.0.0.0/0"}
FIRST = result("eth0", ip="10.88.0.5", routes=[ANYWHERE])
FIRST_LINK = link("eth0", "10.88.0.5", routes=[KernelRoute("0.0.0.0/0", "10.88.0.1")])


def record(name: str, found: CniResult, network: str = "blue", device: str = "", kind: str = "bridge") -> Delegate:
    return Delegate(network, name, found, device, (kind,))


def planned(
    links: Sequence[KernelLink],
    records: Sequence[Delegate] = (),
    *,
    first: CniResult = FIRST,
    among: Mapping[str, str] | None = None,
    drivers: Mapping[str, str] | None = None,
) -> dict[str, Nic | NicFunction]:
    """By interface, in the guest's order."""
    numbers = itertools.count(1)
    networks = network_plan.networks_of(first, links, records)
    functions = network_plan.functions_of(networks, links, among or {}, drivers or {})
    nics = network_plan.nics_of(
        networks, links, lambda: f"02:00:00:00:00:{next(numbers):02x}", {function.link for function in functions}
    )
    nics, functions = network_plan.with_one_default(networks, nics, functions)
    by_link: dict[str, Nic | NicFunction] = {one.link: one for one in (*nics, *functions)}
    order = [name for network in networks for name in network.interfaces if name in by_link]
    return {name: by_link[name] for name in order}


def test_each_recorded_network_is_a_nic_with_its_own_addresses_and_routes() -> None:
    second = result("net1", ip="10.90.0.7", routes=[{"dst": "172.30.0.0/16"}])
    found = planned([link("net1", "10.90.0.7"), FIRST_LINK], [record("net1", second)])
    assert list(found) == ["eth0", "net1"]
    assert found["net1"].addresses == ("10.90.0.7/24",)
    assert found["net1"].routes == (Route("172.30.0.0/16", "10.90.0.1"),)
    assert found["eth0"].routes == (Route("0.0.0.0/0", "10.88.0.1"),)
    assert {found[name].tap for name in found} == {"tap0", "tap1"}


def test_a_network_without_addresses_is_a_nic_without_addresses() -> None:
    found = planned([FIRST_LINK, link("net1")], [record("net1", result("net1"))])
    assert (found["net1"].addresses, found["net1"].routes) == ((), ())


def test_networks_come_after_the_first_in_the_order_of_their_numbers() -> None:
    names = ["net10", "zeta", "net2", "alpha", "net1"]
    links = [link(name) for name in names]
    records = [record(name, result(name)) for name in names if name != "alpha"]
    assert list(planned([*links, FIRST_LINK], records)) == ["eth0", "alpha", "net1", "net2", "net10", "zeta"]
    raw = {"interfaces": [{"name": "eth0", "sandbox": SANDBOX}]}
    order = network_plan.in_guest_order(raw, ["net10", "eth0", "net2"])
    assert list(order) == ["eth0", "net2", "net10"]


@pytest.mark.parametrize("kind", ["veth", "vlan", "vxlan", ""])
def test_a_link_that_leads_out_of_the_pod_is_given_even_without_a_record(kind: str) -> None:
    found = planned([FIRST_LINK, link("net1", "10.90.0.7", kind)])
    assert found["net1"].addresses == ("10.90.0.7/24",)


@pytest.mark.parametrize("kind", ["dummy", "bridge", "gretap", "erspan", "tun"])
def test_a_link_that_stays_inside_the_pod_is_not_given_to_the_guest(kind: str) -> None:
    assert list(planned([FIRST_LINK, link("helper", "169.254.3.1", kind, leads_out=False)])) == ["eth0"]


def test_a_link_that_stays_inside_the_pod_is_given_to_the_guest_if_a_network_recorded_it() -> None:
    found = planned([FIRST_LINK, link("net1", kind="dummy", leads_out=False)], [record("net1", result("net1"))])
    assert list(found) == ["eth0", "net1"]


@pytest.mark.parametrize("kind", ["macvlan", "macvtap", "ipvlan", "ipvtap"])
def test_a_network_that_cannot_carry_a_guests_frames_is_refused_by_its_name(kind: str) -> None:
    links = [FIRST_LINK, link("net1", kind=kind)]
    with pytest.raises(TapmanagerError, match=rf'"net1" of network "blue" is of kind {kind}.*use a network') as caught:
        planned(links, [record("net1", result("net1"))])
    assert caught.value.kind == "unimplemented"
    with pytest.raises(TapmanagerError, match=rf'interface "net1" is of kind {kind}'):
        planned(links)


def test_plugins_that_only_change_existing_links_add_no_nic() -> None:
    empty = parse_result({"cniVersion": "1.0.0"})
    assert list(planned([FIRST_LINK], [record("net1", empty, kind="tuning")])) == ["eth0"]


def test_a_result_that_names_no_interface_applies_to_the_requested_interface() -> None:
    old = parse_result({"ip4": {"ip": "10.90.0.7/24", "gateway": "10.90.0.1"}})
    found = planned([FIRST_LINK, link("net1", "10.90.0.7")], [record("net1", old)])
    assert found["net1"].addresses == ("10.90.0.7/24",)


def test_a_record_of_the_first_networks_interface_adds_no_second_nic() -> None:
    found = planned([FIRST_LINK], [record("net1", result("eth0", ip="10.90.0.7"))])
    assert list(found) == ["eth0"]
    assert found["eth0"].addresses == ("10.88.0.5/24",)


# -- default routes ------------------------------------------------------------------------------------------------------


def second_with_default() -> tuple[KernelLink, CniResult]:
    """Plugins add their default route beside the one that is there."""
    on = link("net1", "10.90.0.7", routes=[KernelRoute("0.0.0.0/0", "10.90.0.1")])
    return on, result("net1", ip="10.90.0.7", routes=[ANYWHERE])


def test_the_first_networks_default_route_is_kept() -> None:
    on, said = second_with_default()
    for records in ([record("net1", said)], []):
        found = planned([FIRST_LINK, on], records)
        assert found["eth0"].routes == (Route("0.0.0.0/0", "10.88.0.1"),)
        assert found["net1"].routes == ()


def test_each_address_family_has_its_own_default_route() -> None:
    on = link("net1", "10.90.0.7", routes=[KernelRoute("::/0", "fe80::1"), KernelRoute("0.0.0.0/0", "10.90.0.1")])
    on = KernelLink(on.name, on.kind, on.mac, on.mtu, (*on.addresses, "fd00::7/64"), on.routes, leads_out=True)
    found = planned([FIRST_LINK, on])
    assert found["net1"].routes == (Route("::/0", "fe80::1"),)


@pytest.mark.parametrize("still_there", [True, False])
def test_a_network_chosen_for_the_default_route_gets_it_despite_the_first_result(
    still_there: bool,
) -> None:
    """Multus changes its record of the first network, and not in all its versions the namespace."""
    on, said = second_with_default()
    changed = record("eth0", result("eth0", ip="10.88.0.5"), "first")
    first = FIRST_LINK if still_there else link("eth0", "10.88.0.5")
    found = planned([first, on], [changed, record("net1", said)])
    assert found["eth0"].routes == ()
    assert found["net1"].routes == (Route("0.0.0.0/0", "10.90.0.1"),)


def test_a_default_route_missing_from_a_later_networks_record_is_not_given() -> None:
    on, _ = second_with_default()
    found = planned([link("eth0", "10.88.0.5"), on], [record("net1", result("net1", ip="10.90.0.7"))])
    assert found["net1"].routes == ()


# -- functions of network cards ------------------------------------------------------------------------------------------


def at_vfio(**said: object) -> Delegate:
    found = result("net1", ip="10.90.0.7", routes=[{"dst": "172.30.0.0/16"}], **said)
    return record("net1", found, device=VF, kind="sriov")


def test_a_function_found_at_vfio_has_its_networks_addresses() -> None:
    found = planned([FIRST_LINK], [at_vfio(mac="0a:58:00:00:00:09")], drivers={VF: "vfio-pci"})
    function = found["net1"]
    assert isinstance(function, NicFunction)
    assert (function.pci, function.driver, function.mac) == (VF, "", "0a:58:00:00:00:09")
    assert (function.addresses, function.routes) == (("10.90.0.7/24",), (Route("172.30.0.0/16", "10.90.0.1"),))
    assert function.link_addresses == ()


@pytest.mark.parametrize("driver", ["mlx5_vfio_pci", "hisi-acc-vfio-pci"])
def test_variants_of_vfio_count(driver: str) -> None:
    assert list(planned([FIRST_LINK], [at_vfio()], drivers={VF: driver})) == ["eth0", "net1"]


def test_a_route_without_a_gateway_is_on_the_link() -> None:
    bare = parse_result(
        {
            "interfaces": [{"name": "net1", "sandbox": SANDBOX}],
            "ips": [{"address": "10.90.0.7/24", "interface": 0}],
            "routes": [{"dst": "172.30.0.0/16"}, {"dst": "10.0.0.0/8", "gw": "10.90.0.254"}],
        }
    )
    found = planned([FIRST_LINK], [record("net1", bare, device=VF)], drivers={VF: "vfio-pci"})
    assert found["net1"].routes == (Route("172.30.0.0/16"), Route("10.0.0.0/8", "10.90.0.254"))


def test_the_first_network_may_be_a_function_at_vfio() -> None:
    first = result("eth0", ip="10.88.0.5", routes=[ANYWHERE], mac="0a:58:00:00:00:09")
    found = planned([], [record("eth0", first, device=VF, kind="sriov")], first=first, drivers={VF: "vfio-pci"})
    assert found["eth0"].routes == (Route("0.0.0.0/0", "10.88.0.1"),)


def test_a_function_in_the_pod_is_found_by_its_link_whatever_the_record_says() -> None:
    on = link("net1", "10.90.0.7", kind="", parent=VF)
    lying = record("net1", result("net1", ip="10.90.0.7"), device="0000:3b:02.2")
    found = planned([FIRST_LINK, on], [lying], among={"net1": VF}, drivers={VF: "iavf", "0000:3b:02.2": "vfio-pci"})
    function = found["net1"]
    assert isinstance(function, NicFunction)
    assert (function.pci, function.driver) == (VF, "iavf")


@pytest.mark.parametrize("device", [VF, "mlx5_core.sf.4", "mdev-uuid"])
def test_a_device_that_is_neither_a_link_nor_at_vfio_is_left_to_its_grant_and_logged(device: str) -> None:
    """vDPA: the guest has it by the device node that kubelet granted."""
    other = record("net1", result("net1", ip="10.90.0.7"), device=device)
    networks = network_plan.networks_of(FIRST, [FIRST_LINK], [other])
    nics = network_plan.nics_of(networks, [FIRST_LINK], lambda: "02:00:00:00:00:01")
    assert [nic.link for nic in nics] == ["eth0"]
    (told,) = network_plan.not_given(networks, nics)
    assert '"net1" of network "blue"' in told
    assert device in told


def test_a_network_without_link_or_device_is_an_error() -> None:
    with pytest.raises(TapmanagerError, match='"net1" of network "blue" is not in the pod'):
        planned([FIRST_LINK], [record("net1", result("net1", ip="10.90.0.7"))])
    first = record("eth0", FIRST, "first", device=VF)
    with pytest.raises(TapmanagerError, match=f"device {VF} is not at VFIO either"):
        planned([], [first], drivers={VF: "ice"})


def test_a_guest_has_the_mac_that_its_pod_asks_for() -> None:
    networks = network_plan.networks_of(result("eth0", ip="10.88.0.5"), [FIRST_LINK], ())
    (nic,) = network_plan.nics_of(
        networks,
        [FIRST_LINK],
        lambda: "02:00:00:00:00:01",
        macs={"eth0": "0a:58:00:00:00:02", "net1": "0a:58:00:00:00:03"},
    )
    assert nic.mac == "0a:58:00:00:00:02"
