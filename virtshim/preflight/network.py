"""Findings about pod networks: CNI configuration, CNI plugins, tapmanager. Pure: takes facts, returns findings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from tapmanager.cni.conf import ipam_program
from virtshim.preflight.finding import Finding, error, ok, warning

_ENDINGS = (".conf", ".conflist", ".json")


@dataclass(frozen=True, slots=True)
class Network:
    """A CNI configuration: its name, the programs that it runs, including IPAM, and the capabilities of its plugins."""

    name: str
    programs: tuple[str, ...]
    capabilities: frozenset[str] = frozenset()


def first_configuration(names: Sequence[str]) -> str:
    """The file that tapmanager uses; "" if none of the names is a configuration."""
    return next((name for name in sorted(names) if name.endswith(_ENDINGS) and not name.startswith(".")), "")


def parsed(text: str) -> Network:
    """Raises ValueError, which names the fault."""
    raw = json.loads(text)
    if not isinstance(raw, dict):
        raise ValueError("the file is not a JSON object")  # noqa: TRY004  one kind of error for the caller
    name = raw.get("name")
    if not isinstance(name, str) or not name:
        raise ValueError("the configuration has no name")
    plugins = raw.get("plugins", [raw])
    if not isinstance(plugins, list) or not plugins:
        raise ValueError("plugins is not a list with at least one entry")
    programs: list[str] = []
    capabilities: set[str] = set()
    for at, plugin in enumerate(plugins):
        kind = plugin.get("type") if isinstance(plugin, dict) else None
        if not isinstance(kind, str) or not kind or "/" in kind:
            raise ValueError(f"plugins[{at}].type is not a program's name")
        programs.append(kind)
        told = plugin.get("capabilities")
        capabilities |= {name for name, is_on in told.items() if is_on is True} if isinstance(told, dict) else set()
        if ipam := ipam_program(plugin):
            programs.append(ipam)
    return Network(name, tuple(dict.fromkeys(programs)), frozenset(capabilities))


def no_configuration(directory: str) -> Finding:
    return error(
        "CNI",
        f"no CNI configuration in {directory}: pods cannot have a network",
        "install the cluster's network add-on; on a node without kubelet, run virtshim setup, which configures a bridge",
    )


def bad_configuration(path: str, trouble: str) -> Finding:
    return error("CNI", f"{path}: {trouble}", "correct the file; only the first file by name is used")


def plugins(path: str, network: Network, missing: Sequence[str], directories: Sequence[str]) -> Finding:
    """`missing`: programs of the network that are not an executable file in any of the directories."""
    if missing:
        return error(
            "CNI",
            f"{path}: not found or not executable in {', '.join(directories)}: {', '.join(missing)}",
            "apt-get install containernetworking-plugins, or the network add-on; tapmanager.cni_bin_dir lists the directories",
        )
    return ok("CNI", f"network {network.name} from {path}: {', '.join(network.programs)}")


def kept_addresses(network: Network) -> Finding:
    """What the guests of VMs that outlive their pods (`virtshim.io/vm`) may expect."""
    if "ips" in network.capabilities:
        return ok(
            "lasting VMs", f"the next pod of a VM gets the same addresses if they are free (network {network.name})"
        )
    return ok(
        "lasting VMs",
        f"the next pod of a VM gets other addresses: no plugin of network {network.name} has the capability ips",
    )


def tapmanager(socket: str, silence: str, trouble: str) -> Finding:
    """`silence`: why tapmanager does not answer. `trouble`: why it cannot make pod networks, as it answers."""
    if silence:
        remedy = "systemctl enable --now tapmanager; journalctl -u tapmanager"
        return warning("tapmanager", f"{socket}: {silence}", remedy)
    if trouble:
        return warning("tapmanager", f"answers, but cannot make pod networks: {trouble}", "journalctl -u tapmanager")
    return ok("tapmanager", f"answers on {socket}")


_DAY = 86400.0
# cert-manager, kubelet and `virtshim agent` renew a certificate long before, when a third of its time is left.
_SOON = 7 * _DAY
_PART_LEFT = 0.25


def peers(node: str, expires_in: float, lasts: float, hostname: str, listen: str) -> Finding:
    """For a certificate that other nodes accept. `node`: its name in the certificate. `expires_in`, `lasts`: seconds until its
    end, and from its beginning to its end."""
    left = f"{expires_in / _DAY:.0f} more days" if expires_in >= 2 * _DAY else f"{expires_in / 3600:.0f} more hours"
    days = f"the certificate names node {node} and is valid for {left}"
    if expires_in < min(_SOON, _PART_LEFT * lasts):
        return warning("peers", days, "renew it: without a valid certificate no VM moves to this node or away from it")
    if node != hostname:
        return warning(
            "peers",
            f"{days}, but this machine's name is {hostname}",
            "use a certificate with this node's name in Kubernetes; if kubelet has --hostname-override with the name in the "
            "certificate, all is well",
        )
    serves = f"other nodes are served on {listen}" if listen else "other nodes are not served (peers.listen is not set)"
    return ok("peers", f"{serves}; {days}")
