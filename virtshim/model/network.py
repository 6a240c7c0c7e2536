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
    """Packets of that `family` (4, 6) from `source` to `target` (networks, "" for all) use the routing table `table`.
    The rule with the lowest `priority` is tried first."""

    family: int
    priority: int
    table: int
    source: str = ""
    target: str = ""


@dataclass(frozen=True, slots=True)
class TableRoute:
    """A route of a table other than main, by the NIC that has it. `gateway`: "" for on-link. `source`: the sender's
    address, "" for any. `metric` and `mtu`: 0 lets the guest choose."""

    table: int
    destination: str
    gateway: str = ""
    source: str = ""
    metric: int = 0
    mtu: int = 0


@dataclass(frozen=True, slots=True)
class Interface:
    """One guest NIC. `name`: of the CNI interface in the netns. `mac`: the guest must use it. `addresses`: CIDRs
    (`10.88.0.5/16`) that the guest must have. `function`: the host's PCI address (`0000:3b:00.1`) of the network card's
    function that is this NIC, bound to VFIO; "" for a NIC that vmwrapper makes. `taken`: tapmanager took the function
    from the pod's namespace, so it is the pod's. A function that was bound to VFIO before is only named by a network's
    configuration. `rules`: choose tables other than main. `table_routes`: the routes of those tables to this NIC."""

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
    """Bits a second into the pod and out of it, 0 for no limit."""

    ingress: int = 0
    egress: int = 0


@dataclass(frozen=True, slots=True)
class Dns:
    servers: tuple[str, ...] = ()
    searches: tuple[str, ...] = ()
    options: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PluginRuns:
    """The runs of one command of a CNI plugin since tapmanager started; `seconds`: their total time. `buckets`: upper
    bounds in seconds, the last one infinite, each with the number of runs up to it, shorter ones included."""

    command: str
    plugin: str
    failures: int
    seconds: float
    buckets: tuple[tuple[float, int], ...]


@dataclass(frozen=True, slots=True)
class GuestPorts:
    """The guest's ports in a pod whose network it shares with containers: passt takes them in the pod's namespace."""

    tcp: tuple[int, ...] = ()
    udp: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PodNetwork:
    """The result of attaching a pod. `ips`: bare addresses, primary first. `fetch_key`: the secret with which only this
    pod's vmwrapper gets the tap descriptors. `inode`: identifies a namespace that another runtime made, 0 otherwise."""

    netns: str
    interfaces: tuple[Interface, ...]
    ips: tuple[str, ...]
    dns: Dns
    fetch_key: str = field(repr=False)
    inode: int = 0

    def __repr__(self) -> str:  # keeps the key out of logs
        return f"PodNetwork(netns={self.netns!r}, ips={self.ips!r})"


def nics_of(network: PodNetwork | None, granted: GrantedDevices) -> tuple[Interface, ...]:
    """The pod's NICs that a container's VM has. A function that was bound to VFIO before the network was made only
    counts for containers that kubelet granted it to, because any network's configuration could name it. Pure."""
    interfaces = network.interfaces if network else ()
    return tuple(
        nic for nic in interfaces if nic.taken or not nic.function or passed_through(nic).claim in granted.claims
    )


def taps_of(network: PodNetwork | None) -> tuple[Interface, ...]:
    """The NICs that vmwrapper makes, in its order."""
    return tuple(nic for nic in network.interfaces if not nic.function) if network else ()


def passed_through(nic: Interface) -> PciFunction:
    """The PCI function of a NIC that is a function of a network card."""
    return PciFunction(PciAddress.parse(nic.function))
