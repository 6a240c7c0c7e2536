"""Turns libvirt's command line and this VM's NICs into QEMU's command line. Pure; imports only json."""

from __future__ import annotations

import itertools
import json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# The first slot for NICs on the root bus. libvirt assigns slots from the low end (root ports from 0x01 or 0x02, eight per
# slot), and chipset devices at the high end (0x1a to 0x1f). It would reach this slot only with more than a hundred PCIe
# devices. The guest sees a stable name: enp0s16.
_FIRST_SLOT = 0x10
_LAST_SLOT = 0x19

# Machine type -> its root bus. A root port for each NIC would need one more slot.
_ROOT_BUSES = (("q35", "pcie.0"), ("virt", "pcie.0"), ("i440fx", "pci.0"), ("pc", "pci.0"))

_MOST_QUEUES = 8

# Models that a pod may ask for -> QEMU's device.
_MODELS = {"virtio": "virtio-net-pci", "e1000e": "e1000e", "e1000": "e1000", "rtl8139": "rtl8139"}

# Where a process finds its open files by their descriptors.
OPEN_FILES = "/proc/self/fd/"

# Without this, each serial port has two queues with a descriptor each, which QEMU's loop checks for every frame.
QUIET_PORTS = ("-global", "virtio-serial-pci.ioeventfd=off")


class PlanError(Exception):
    """The message says what is wrong, for people."""


def nic_arguments(
    argv: Sequence[str],
    nics: Sequence[Mapping[str, object]],
    fds: Sequence[int],
    numbers: Sequence[int] = (),
    model: str = "virtio",
) -> list[str]:
    """The arguments that give QEMU one NIC for each of `nics`: {"mac", "mtu"}, "queues" if there are several, "vhost" if the
    kernel moves its frames, and "stream" if passt does. `fds`: for each NIC in turn, a tap descriptor per queue, and then as
    many of vhost-net; or one connection to passt. `numbers`: the numbers of the NICs' slots; (): in order. `model`: the
    NICs' model. Raises PlanError."""
    needed = sum(_descriptors(nic) for nic in nics)
    if needed != len(fds):
        raise PlanError(f"tapmanager sent {len(nics)} interfaces and {len(fds)} descriptors, not {needed}")
    if model not in _MODELS:
        raise PlanError(f"there is no NIC model {model!r} here; virtshim and vmwrapper must be of the same version")
    bus = root_bus(argv)
    slots = _free_slots(argv, bus)
    if numbers:
        slots = [_FIRST_SLOT + number for number in numbers if _FIRST_SLOT + number in slots]
    added: list[str] = []
    if len(slots) < len(nics):
        raise PlanError(f"{len(nics)} network interfaces, but only {len(slots)} free PCI slots on {bus}")
    rest = list(fds)
    for index, (nic, slot) in enumerate(zip(nics, slots, strict=False)):
        queues = _queues(nic)
        own, rest = rest[: _descriptors(nic)], rest[_descriptors(nic) :]
        added += ["-netdev", _netdev(f"virtshimnet{index}", nic, own)]
        # An empty romfile avoids booting from the network, and reading an option ROM at each start.
        device = f"{_MODELS[model]},netdev=virtshimnet{index},id=virtshimnic{index},mac={_mac(nic)}"
        if model == "virtio":
            device += f",host_mtu={_mtu(nic)}"
        elif queues > 1:
            raise PlanError(f"a NIC of model {model} has one queue, and tapmanager sent {queues}")
        if queues > 1:  # an interrupt for each direction of each queue, for changes, and for the control queue
            device += f",mq=on,vectors={2 * queues + 2}"
        added += ["-device", f"{device},bus={bus},addr={slot:#x},romfile="]
    return added


def _netdev(name: str, nic: Mapping[str, object], fds: Sequence[int]) -> str:
    if nic.get("stream") is True:
        if len(fds) != 1:
            raise PlanError(f"a NIC has one connection to passt, and tapmanager sent {len(fds)}")
        return f"stream,id={name},server=off,addr.type=fd,addr.str={fds[0]}"
    queues = _queues(nic)
    return f"tap,id={name},{_on(fds[:queues], fds[queues:])}"


def _on(tap: Sequence[int], vhost: Sequence[int]) -> str:
    several = "s" if len(tap) > 1 else ""
    kernel = f"vhost=on,vhostfd{several}={_joined(vhost)}" if vhost else "vhost=off"
    return f"fd{several}={_joined(tap)},{kernel}"


def _joined(fds: Sequence[int]) -> str:
    return ":".join(str(fd) for fd in fds)


def _descriptors(nic: Mapping[str, object]) -> int:
    return _queues(nic) * (2 if nic.get("vhost") is True else 1)


def _queues(nic: Mapping[str, object]) -> int:
    queues = nic.get("queues", 1)
    if not isinstance(queues, int) or not 1 <= queues <= _MOST_QUEUES:
        raise PlanError("tapmanager sent an interface without a number of queues")
    return queues


def _mac(nic: Mapping[str, object]) -> str:
    mac = nic.get("mac")
    if not isinstance(mac, str) or len(mac) != 17 or not set(mac) <= set("0123456789abcdef:"):
        raise PlanError("tapmanager sent an interface without a MAC address")
    return mac


def _mtu(nic: Mapping[str, object]) -> int:
    mtu = nic.get("mtu")
    if not isinstance(mtu, int) or not 68 <= mtu <= 65535:
        raise PlanError("tapmanager sent an interface without an MTU")
    return mtu


def memory_arguments(argv: Sequence[str], descriptor: int, *, shared: bool) -> list[str]:
    """`argv` with the descriptor's file as the guest's memory. `shared`: the guest writes into the file; otherwise what it writes
    is its own. Raises PlanError for memory of more than one part, or with a file already."""
    backends = [at for at, value in enumerate(argv) if at and argv[at - 1] == "-object" and '"memory-backend-' in value]
    own = json.loads(argv[backends[0]]) if len(backends) == 1 else {}
    if own.get("qom-type") != "memory-backend-ram":
        raise PlanError("the virtual machine's memory is not one plain part; start it without virtshim.io/warm-start")
    # QEMU opens it once more, by a name that only this process has for it.
    file = {"qom-type": "memory-backend-file", "mem-path": f"{OPEN_FILES}{descriptor}", "share": shared}
    changed = list(argv)
    changed[backends[0]] = json.dumps({**own, **file})
    return changed


def root_bus(argv: Sequence[str]) -> str:
    """The name of the machine's root PCI bus. Raises PlanError for an unknown machine."""
    machine = _machine(argv)
    for part, bus in _ROOT_BUSES:
        if machine == part or machine.startswith(part + "-") or f"-{part}-" in f"{machine}-":
            return bus
    raise PlanError(f"machine type {machine!r} has no PCI root bus known here; use a q35 machine")


def _machine(argv: Sequence[str]) -> str:
    for option, value in itertools.pairwise(argv):
        if option in ("-machine", "--machine", "-M"):
            fields = value.split(",")
            named = [field.removeprefix("type=") for field in fields if field.startswith("type=")]
            return named[0] if named else fields[0]
    return "pc"


def _free_slots(argv: Sequence[str], bus: str) -> list[int]:
    taken = _taken_slots(argv, bus)
    return [slot for slot in range(_FIRST_SLOT, _LAST_SLOT + 1) if slot not in taken]


def _taken_slots(argv: Sequence[str], bus: str) -> set[int]:
    taken = set()
    for option, value in itertools.pairwise(argv):
        if option in ("-device", "--device"):
            device = _properties(value)
            if device.get("bus") == bus and device.get("addr"):
                taken.add(_slot(device["addr"]))
    return taken


def _properties(value: str) -> dict[str, str]:
    """Reads a device, which libvirt writes as a JSON object or, before version 7.10, as a key=value list."""
    if value.startswith("{"):
        try:
            return {key: str(item) for key, item in json.loads(value).items()}
        except ValueError:
            return {}
    return dict(field.split("=", 1) for field in value.split(",") if "=" in field)


def _slot(address: str) -> int:
    """The slot of `0x2.0x1`, `2.1` or `0x2`, in hexadecimal with or without 0x, as QEMU reads it; -1 for anything else."""
    try:
        return int(address.partition(".")[0], 16)
    except ValueError:
        return -1
