"""Settings of host devices in VMs, and of `virtshim device-plugin`, which offers them to kubelet."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from virtshim.config.texts import HexId, PathText, PciText, ResourceName, Section, setting
from virtshim.devices.pools import socket_of, variable_of
from virtshim.model.layout import LONGEST_SOCKET_PATH

_PCI = "PCI addresses such as 0000:3b:00.0"


class Devices(Section):
    """[devices]: host devices that device plugins granted to pods."""

    bind: bool = setting(
        True,
        "while a VM has a granted PCI function, bind it to vfio-pci; false: refuse a function that is bound to another driver",
        why="a pod gets the device that it was granted; afterwards the device goes back to its former driver",
    )
    unplug: float = setting(
        2.0,
        "time that a guest has to release its devices before its VM is killed; 0: the guest is not asked",
        unit="s",
        ge=0,
        le=30,
        why="a running guest needs a fraction of this time; a hanging guest must not delay the removal",
    )
    reset: bool = setting(
        True,
        "reset a PCI function when its VM has ended, and do not reuse a function whose reset failed; false: rely on the kernel, "
        "which resets the function when QEMU releases it, but reports no failure",
        why="the next VM must not find data of the previous VM in the device",
    )
    pod_resources_socket: str = setting(
        "/var/lib/kubelet/pod-resources/kubelet.sock",
        "socket on which kubelet lists the containers of each pod and their devices; empty: kubelet is not asked",
        allowed="absolute path, or empty",
        pattern="^(/|$)",
        why="kubelet's default path",
    )
    cdi_dirs: tuple[PathText, ...] = setting(
        ("/etc/cdi", "/var/run/cdi"),
        "directories of CDI specifications; later directories win",
        allowed="absolute paths",
        why="the directories that the CDI specification names",
    )
    keep: tuple[PciText, ...] = setting(
        (),
        "devices that no VM gets, in addition to the node's own network card and disks",
        allowed=_PCI,
        why="virtshim detects the devices that the node itself uses",
    )


class OfferedResource(Section):
    """[[device_plugin.resources]]: one extended resource. It consists of the PCI functions that meet all criteria set here."""

    name: Annotated[ResourceName, Field(max_length=128, description="name of the resource, domain/name, as in pods")]
    vendor: HexId = setting(
        "", "PCI vendor id", allowed="four hex digits", why="empty: any vendor; then set pfs or addresses"
    )
    devices: tuple[HexId, ...] = setting(
        (), "PCI device ids of that vendor", allowed="four hex digits each", why="empty: all devices of the vendor"
    )
    drivers: tuple[str, ...] = setting(
        (),
        "a function is healthy if it is bound to one of these drivers; default: vfio-pci and its variants",
        allowed="names",
        why="a VM can use functions of these drivers at once",
    )
    pfs: tuple[PciText, ...] = setting(
        (), "physical functions whose virtual functions are offered", allowed=_PCI, why="empty: any"
    )
    addresses: tuple[PciText, ...] = setting((), "the functions themselves", allowed=_PCI, why="empty: any")
    functions: Literal["any", "virtual", "physical"] = setting(
        "any", "offer any functions, only virtual ones, or only physical ones", why="the other criteria select"
    )

    @model_validator(mode="after")
    def _chosen(self) -> Self:
        if not (self.vendor or self.pfs or self.addresses):
            raise ValueError("this would offer every PCI function of the node; set vendor, pfs or addresses")
        if self.devices and not self.vendor:
            raise ValueError("devices are device ids of a vendor; set vendor too")
        return self


class DevicePluginSettings(Section):
    """[device_plugin]: what `virtshim device-plugin` offers to kubelet."""

    directory: PathText = setting(
        "/var/lib/kubelet/device-plugins", "directory of kubelet's kubelet.sock", why="kubelet's default path"
    )
    resources: tuple[OfferedResource, ...] = setting(
        (),
        "the resources to offer; a function belongs to at most one",
        allowed="tables, below",
        why="only devices that the operator names are given to pods",
    )
    deliver: Literal["nodes", "cdi"] = setting(
        "nodes",
        "what containers get: device nodes, or CDI names",
        why="every kubelet and runtime supports device nodes",
    )
    cdi_dir: PathText = setting(
        "/var/run/cdi", "directory to write CDI specifications to", why="a reboot clears it, as it should"
    )
    interval: float = setting(
        5.0,
        "time between two checks of the devices",
        unit="s",
        gt=0,
        le=3600,
        why="kubelet soon learns of a broken device, and a check costs only a millisecond",
    )

    @field_validator("resources")
    @classmethod
    def _once(cls, resources: tuple[OfferedResource, ...]) -> tuple[OfferedResource, ...]:
        names = [resource.name for resource in resources]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"{', '.join(twice)} is listed twice; list each resource once")
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
                    f"the name {resource.name} is too long: its socket {path} would have {len(path.encode())} bytes, and "
                    f"a socket's path may have {LONGEST_SOCKET_PATH}; shorten the name"
                )
        return self
