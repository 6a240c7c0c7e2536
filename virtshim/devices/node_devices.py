"""The port `Devices` over this node's files and kubelet."""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from virtshim.config import Settings
from virtshim.devices.attachable import AttachChecker, AttachRules
from virtshim.devices.host_files import HostFiles
from virtshim.devices.memory_lock import lockable
from virtshim.devices.pci import PciBus
from virtshim.devices.resolve import Resolver
from virtshim.domain.devices.granted import DeviceRequest, GrantedDevices, Passthrough, PciAddress, PciFunction
from virtshim.domain.errors import WrongState

log = structlog.get_logger(__name__)


class NodeDevices:
    def __init__(self, files: HostFiles, resolver: Resolver, attachable: AttachChecker) -> None:
        self._files = files
        self._resolver = resolver
        self._attachable = attachable

    def resolve(self, request: DeviceRequest) -> GrantedDevices:
        """See `virtshim.ports.devices.Devices`."""
        return self._resolver.resolve(request)

    def own_containers(self, namespace: str, pod: str) -> tuple[str, ...] | None:
        """See `virtshim.ports.devices.Devices`."""
        return self._resolver.own_containers(namespace, pod)

    def check(self, devices: Sequence[Passthrough], *, guest_memory: int = 0) -> None:
        """See `virtshim.ports.devices.Devices`."""
        faults = self._attachable.faults(devices, guest_memory)
        if faults:
            raise WrongState("; ".join(faults))
        for device in devices:
            facts = PciBus(self._files).function(device.address) if isinstance(device, PciFunction) else None
            if facts is not None and not facts.has_reset:
                # It works, but the next VM finds the device as this one leaves it.
                log.warning("devices.no_reset", device=str(facts.address))


def device_rules(settings: Settings, files: HostFiles) -> AttachRules:
    keep = frozenset(PciAddress.parse(address) for address in settings.devices.keep)
    return AttachRules(settings.devices.bind, keep, lambda: lockable(files, settings.libvirt.uri))
