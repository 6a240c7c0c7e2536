"""A host's devices in memory."""

from __future__ import annotations

from collections.abc import Sequence

from virtshim.devices.values import (
    BlockDevice,
    CardFunction,
    DeviceErrors,
    DeviceRequest,
    GrantedDevices,
    Passthrough,
    PciAddress,
    PciFunction,
    UsbDevice,
)
from virtshim.model.errors import InternalError, InvalidRequest, NotFound, Unavailable, WrongState


class FakeDevices:
    """Implements `virtshim.devices.ports.Devices`. `nodes`: what is behind a device node or a CDI name; a node below /dev/block
    is a block device. `PCIDEVICE_...` in the environment must name what is granted. `unfit` devices do not pass the check."""

    def __init__(self) -> None:
        self.nodes: dict[str, tuple[Passthrough, ...]] = {}
        self.unfit: set[str] = set()
        # Namespace, pod and container of those that kubelet lists.
        self.listed: set[tuple[str, str, str]] = set()

    def add_function(self, node: str, address: str) -> PciFunction:
        function = PciFunction(PciAddress.parse(address), "example.com/vf")
        self.nodes[node] = (*self.nodes.get(node, ()), function)
        return function

    def resolve(self, request: DeviceRequest) -> GrantedDevices:
        blocks = [
            BlockDevice(d.host_path, d.container_path, readonly="w" not in d.permissions)
            for d in request.devices
            if d.host_path.startswith("/dev/block/")
        ]
        names = [d.host_path for d in request.devices if not d.host_path.startswith("/dev/block/")]
        found: list[Passthrough] = []
        for name in (*names, *request.cdi):
            if name not in self.nodes:
                raise InvalidRequest(f"config.devices: {name} is nothing that a virtual machine can have")
            found += self.nodes[name]
        granted = {d.claim for d in found}
        for key, value in request.envs.items():
            if key.startswith("PCIDEVICE_") and not key.endswith("_INFO"):
                for hint in value.split(","):
                    if hint and f"pci:{hint}" not in granted:
                        raise InvalidRequest(f"variable {key}: {hint} was not granted to this container")
        return GrantedDevices(tuple(dict.fromkeys(found)), tuple(blocks))

    def own_containers(self, namespace: str, pod: str) -> tuple[str, ...] | None:
        return tuple(name for *names, name in sorted(self.listed) if names == [namespace, pod]) or None

    def check(self, devices: Sequence[Passthrough], *, guest_memory: int = 0) -> None:
        assert guest_memory > 0
        if bad := sorted(self.unfit.intersection(d.claim for d in devices)):
            raise WrongState(f"{', '.join(bad)} is not bound to vfio-pci")


class FakeDeviceDrivers:
    """Implements `virtshim.devices.ports.DeviceDrivers`. `drivers`: what functions have, by address; vfio-pci if it is not said.
    `broken` drivers take none, `gone` functions were unplugged, `no_reset` ones cannot be reset. `cards`: network cards' VFs, by
    address. `why_not`: tapmanager is away. `asked`: how often it was asked about functions.
    `driverless`: interfaces of USB devices, by claim, that a driver wants."""

    def __init__(self) -> None:
        self.drivers: dict[str, str] = {}
        self.broken: set[str] = set()
        self.gone: set[str] = set()
        self.no_reset: set[str] = set()
        self.resets: list[str] = []
        self.cards: dict[str, CardFunction] = {}
        self.why_not = ""
        self.asked = 0
        self.driverless: dict[str, list[str]] = {}

    def driver(self, address: PciAddress, timeout: float) -> str:
        if str(address) in self.gone:
            raise NotFound(f"there is no PCI device {address} on this node")
        return self.drivers.get(str(address), "vfio-pci")

    def function(self, address: PciAddress, timeout: float) -> CardFunction:
        self.asked += 1
        if self.why_not:
            raise Unavailable(self.why_not)
        return self.cards.get(str(address)) or CardFunction(self.driver(address, timeout))

    def bind(self, address: PciAddress, driver: str, timeout: float) -> None:
        self.driver(address, timeout)
        if driver in self.broken:
            raise InternalError(f"{driver} did not take {address}")
        self.drivers[str(address)] = driver

    def half_bind(self, address: PciAddress, driver: str, timeout: float) -> None:
        self.drivers[str(address)] = ""

    def reset(self, address: PciAddress, timeout: float) -> bool:
        self.driver(address, timeout)
        self.resets.append(str(address))
        return str(address) not in self.no_reset

    def probe_usb(self, device: UsbDevice, timeout: float) -> Sequence[str]:
        if device.claim not in self.driverless:
            raise NotFound(f"there is no USB device {device.bus:03}/{device.device:03} on this node")
        found, self.driverless[device.claim] = self.driverless[device.claim], []
        return found


class FakeDeviceErrors:
    """Implements `virtshim.devices.ports.DeviceErrorCounts`. `counts` by address."""

    def __init__(self) -> None:
        self.counts: dict[str, DeviceErrors] = {}

    def errors(self, address: PciAddress) -> DeviceErrors | None:
        return self.counts.get(str(address))
