"""A pod's network as tapmanager made it: what the guest's NICs must look like."""

from __future__ import annotations

from dataclasses import dataclass, field

from virtshim.devices.values import GrantedDevices, PciAddress, PciFunction


@dataclass(frozen=True, slots=True)
class Route:
    """`destination` is a CIDR; `gateway` None means on-link."""

    destination: str
    gateway: str | None = None


@dataclass(frozen=True, slots=True)
class PolicyRule:
    """Packets of that `family` (4, 6) from `source` to `target`, networks or "" for all, follow the routing table `table`. Rules
    are asked by `priority`, the lowest first."""

    family: int
    priority: int
    table: int
    source: str = ""
    target: str = ""


@dataclass(frozen=True, slots=True)
class TableRoute:
    """A route of another table than the main one, by the NIC that has it. `gateway` "": on-link; `source`: the sender's address,
    "" for any; `metric` and `mtu` 0: the guest's choice."""

    table: int
    destination: str
    gateway: str = ""
    source: str = ""
    metric: int = 0
    mtu: int = 0


@dataclass(frozen=True, slots=True)
class Interface:
    """One guest NIC. `name` is the CNI interface's name in the netns, `mac` the one the guest must use,
    `addresses` CIDRs (`10.88.0.5/16`) the guest must carry. `function`: the host's PCI address (`0000:3b:00.1`) of the network
    card's function that is this NIC, at VFIO; "" for a NIC that vmwrapper makes. `taken`: tapmanager took the function from the
    pod's namespace, so it is the pod's; of one that was at VFIO before, a network's configuration says so and no more.
    `rules` choose other tables than the main one, of which `table_routes` lead to this NIC."""

    name: str
    mac: str
    mtu: int
    addresses: tuple[str, ...]
    routes: tuple[Route, ...] = ()
    function: str = ""
    taken: bool = True
    rules: tuple[PolicyRule, ...] = ()
    table_routes: tuple[TableRoute, ...] = ()


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bits a second, into the pod and out of it; 0 for no limit."""

    ingress: int = 0
    egress: int = 0


@dataclass(frozen=True, slots=True)
class Dns:
    servers: tuple[str, ...] = ()
    searches: tuple[str, ...] = ()
    options: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PluginRuns:
    """A CNI plugin's runs of one command since tapmanager was started, `seconds` long in all. `buckets`: an upper bound in
    seconds, the last one infinite, and how many were not longer, shorter ones included."""

    command: str
    plugin: str
    failures: int
    seconds: float
    buckets: tuple[tuple[float, int], ...]


@dataclass(frozen=True, slots=True)
class PodNetwork:
    """The result of attaching a pod. `ips` are bare addresses, primary first; `fetch_key` is the secret with which
    this pod's vmwrapper, and nobody else, gets the tap descriptors."""

    netns: str
    interfaces: tuple[Interface, ...]
    ips: tuple[str, ...]
    dns: Dns
    fetch_key: str = field(repr=False)

    def __repr__(self) -> str:  # keeps the key out of logs
        return f"PodNetwork(netns={self.netns!r}, ips={self.ips!r})"


def nics_of(network: PodNetwork | None, granted: GrantedDevices) -> tuple[Interface, ...]:
    """The pod's NICs that a container's VM has. A function that was at VFIO before the network was made is a NIC of those
    containers alone that kubelet granted it to: any network's configuration could name it. Pure."""
    interfaces = network.interfaces if network else ()
    return tuple(
        nic for nic in interfaces if nic.taken or not nic.function or passed_through(nic).claim in granted.claims
    )


def passed_through(nic: Interface) -> PciFunction:
    """The function that a NIC with one is."""
    return PciFunction(PciAddress.parse(nic.function))
