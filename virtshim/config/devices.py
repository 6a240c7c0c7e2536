"""Settings of the host's devices in VMs, and of `virtshim device-plugin`, which offers them."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from virtshim.config.texts import HexId, PathText, PciText, ResourceName, Section, setting
from virtshim.devices.pools import socket_of, variable_of
from virtshim.model.layout import LONGEST_SOCKET_PATH

_PCI = "PCI addresses such as 0000:3b:00.0"


class Devices(Section):
    """[devices]: what device plugins granted."""

    bind: bool = setting(
        True,
        "bind a granted PCI function of another driver to vfio-pci while a VM has it; false: refuse it",
        why="a pod that was granted a device gets it; its driver has it back afterwards",
    )
    unplug: float = setting(
        2.0,
        "time a guest gets to release its devices before its VM is ended by force; 0: it is not asked",
        unit="s",
        ge=0,
        le=30,
        why="a guest that runs answers in a fraction of it; one that hangs must not hold a removal up",
    )
    reset: bool = setting(
        True,
        "reset a PCI function when its VM has ended, and hand out none whose reset failed; false: leave it to the kernel, "
        "which does so when QEMU releases it, and reports no failure",
        why="the next VM must not find the last one's data in the device",
    )
    pod_resources_socket: str = setting(
        "/var/lib/kubelet/pod-resources/kubelet.sock",
        "where kubelet lists the containers of each pod, and their devices; empty: it is not asked",
        allowed="absolute path, or empty",
        pattern="^(/|$)",
        why="kubelet's own path",
    )
    cdi_dirs: tuple[PathText, ...] = setting(
        ("/etc/cdi", "/var/run/cdi"),
        "CDI specifications; later directories win",
        allowed="absolute paths",
        why="those that CDI's specification names",
    )
    keep: tuple[PciText, ...] = setting(
        (),
        "what no VM gets, beside the node's own network card and disks",
        allowed=_PCI,
        why="what the node itself uses is found by itself",
    )


class OfferedResource(Section):
    """[[device_plugin.resources]]: a function that meets all criteria which are set belongs to it."""

    name: Annotated[ResourceName, Field(max_length=128, description="domain/name, as pods ask for it")]
    vendor: HexId = setting("", "PCI vendor id", allowed="four hex digits", why="none: set this, pfs or addresses")
    devices: tuple[HexId, ...] = setting(
        (), "PCI device ids of that vendor", allowed="four hex digits each", why="all of it"
    )
    drivers: tuple[str, ...] = setting(
        (),
        "drivers a healthy one is bound to; default: vfio-pci, its variants",
        allowed="names",
        why="what a VM can have at once",
    )
    pfs: tuple[PciText, ...] = setting((), "their virtual functions", allowed=_PCI, why="all of the vendor's")
    addresses: tuple[PciText, ...] = setting((), "the functions themselves", allowed=_PCI, why="all of the vendor's")
    functions: Literal["any", "virtual", "physical"] = setting(
        "any", "VFs only, or none of them", why="the other criteria say which"
    )

    @model_validator(mode="after")
    def _chosen(self) -> Self:
        if not (self.vendor or self.pfs or self.addresses):
            raise ValueError("set vendor, pfs or addresses: this would offer every PCI function of the node")
        if self.devices and not self.vendor:
            raise ValueError("devices are ids of a vendor: set vendor too")
        return self


class DevicePluginSettings(Section):
    """[device_plugin]: what `virtshim device-plugin` offers to kubelet."""

    directory: PathText = setting(
        "/var/lib/kubelet/device-plugins", "where kubelet has kubelet.sock", why="kubelet's own path"
    )
    resources: tuple[OfferedResource, ...] = setting(
        (),
        "what is offered; a function belongs to one at most",
        allowed="tables, below",
        why="nothing is given away that nobody named",
    )
    deliver: Literal["nodes", "cdi"] = setting(
        "nodes", "what containers get: device nodes, or CDI names", why="every kubelet and runtime knows device nodes"
    )
    cdi_dir: PathText = setting(
        "/var/run/cdi", "where CDI specifications are written", why="gone after a reboot, as they should be"
    )
    interval: float = setting(
        5.0,
        "time between two checks of the devices",
        unit="s",
        gt=0,
        le=3600,
        why="a broken device is told soon, and a look costs a millisecond",
    )

    @field_validator("resources")
    @classmethod
    def _once(cls, resources: tuple[OfferedResource, ...]) -> tuple[OfferedResource, ...]:
        names = [resource.name for resource in resources]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"these are listed twice: {', '.join(twice)}")
        by_variable: dict[str, str] = {}
        for name in names:
            other = by_variable.setdefault(variable_of(name), name)
            if other != name:
                raise ValueError(
                    f"{other} and {name} would set the same variable, {variable_of(name)}, in a container; rename one"
                )
        return resources

    @model_validator(mode="after")
    def _room_for_sockets(self) -> Self:
        for resource in self.resources:
            path = f"{self.directory}/{socket_of(resource.name)}"
            if len(path.encode()) > LONGEST_SOCKET_PATH:
                raise ValueError(
                    f"{resource.name} is too long a name: its socket {path} would have {len(path.encode())} bytes, and "
                    f"{LONGEST_SOCKET_PATH} is the most for one"
                )
        return self
