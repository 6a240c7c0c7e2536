"""Settings -> how this node judges granted devices."""

from __future__ import annotations

import contextlib

from virtshim.config import Settings
from virtshim.devices.attachable import Attachable, Rules
from virtshim.devices.cdi_directories import CdiDirectories
from virtshim.devices.host_files import HostFiles
from virtshim.devices.memory_lock import lockable
from virtshim.devices.node_devices import NodeDevices
from virtshim.devices.resolve import Resolver
from virtshim.domain.devices.granted import PciAddress
from virtshim.kubelet.pod_resources import PodResourcesClient


def node_devices(settings: Settings, stack: contextlib.ExitStack) -> NodeDevices:
    """kubelet is not looked for before it is asked; its connection ends with `stack`."""
    files, socket = HostFiles(), settings.devices.pod_resources_socket
    kubelet = PodResourcesClient(socket) if socket else None
    if kubelet is not None:
        stack.callback(kubelet.close)
    resolver = Resolver(files, CdiDirectories(settings.devices.cdi_dirs, files), kubelet)
    return NodeDevices(files, resolver, Attachable(files, device_rules(settings, files)))


def device_rules(settings: Settings, files: HostFiles) -> Rules:
    keep = frozenset(PciAddress.parse(address) for address in settings.devices.keep)
    return Rules(settings.devices.bind, keep, lambda: lockable(files, settings.libvirt.uri))
