"""A machine's sysfs, procfs and /dev below a directory: the parts that device code reads, linked as by a kernel."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from virtshim.devices.host_files import HostFiles, NodeKind, NodeStat, node_stat

NIC, NVME, BRIDGE, HOST_BRIDGE, GPU, QAT = 0x020000, 0x010802, 0x060400, 0x060000, 0x030200, 0x0B4000


class FakeSysfs:
    """Device nodes are empty files here; `files()` returns what they represent."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._nodes: dict[str, NodeStat] = {}
        for directory in ("sys/bus/pci/devices", "sys/kernel/iommu_groups", "sys/bus/mdev/devices", "dev", "proc"):
            (root / directory).mkdir(parents=True, exist_ok=True)

    def files(self) -> HostFiles:
        return HostFiles(str(self.root), self._stat)

    def _stat(self, path: str) -> NodeStat:
        return self._nodes.get(os.path.realpath(path)) or node_stat(path)

    # --- plain files

    def path(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    def write(self, path: str, text: str) -> None:
        self.path(path).parent.mkdir(parents=True, exist_ok=True)
        self.path(path).write_text(text)

    def link(self, path: str, target: str) -> None:
        """Makes a relative link, which stays below the root."""
        where = self.path(path)
        where.parent.mkdir(parents=True, exist_ok=True)
        where.unlink(missing_ok=True)
        where.symlink_to(os.path.relpath(self.path(target).resolve(), where.parent.resolve()))

    # --- device nodes

    def node(self, path: str, kind: NodeKind = NodeKind.CHARACTER, major: int = 0, minor: int = 0) -> str:
        self.write(path, "")
        self._nodes[os.path.realpath(self.path(path))] = NodeStat(kind, major, minor)
        return path

    def vfio(self, *groups: int) -> None:
        """Adds the VFIO container node and the groups' nodes."""
        for path in ("/dev/vfio/vfio", *(f"/dev/vfio/{group}" for group in groups)):
            self.node(path)

    # --- PCI

    def pci(
        self,
        address: str,
        group: int | None = None,
        *,
        driver: str = "",
        vendor: int = 0x8086,
        device: int = 0x1572,
        class_code: int = NIC,
        behind: Sequence[str] = (),
        vf_of: str = "",
        node: int = -1,
        total_vfs: int = 0,
        reset: bool = True,
        vfio_node: bool = True,
    ) -> str:
        """Adds a PCI function. With a VFIO driver its group's node is created too, unless `vfio_node` says otherwise."""
        home = "/".join(("/sys/devices", f"pci{address[: address.index(':')]}:00", *behind, address))
        for name, text in (
            ("vendor", f"0x{vendor:04x}"),
            ("device", f"0x{device:04x}"),
            ("class", f"0x{class_code:06x}"),
            ("numa_node", str(node)),
        ):
            self.write(f"{home}/{name}", f"{text}\n")
        if total_vfs:
            self.write(f"{home}/sriov_totalvfs", f"{total_vfs}\n")
        if reset:
            self.write(f"{home}/reset", "")
        self.link(f"/sys/bus/pci/devices/{address}", home)
        if group is not None:
            self.in_group(group, address, home)
        if driver:
            self.bind(address, driver)
        if driver == "vfio-pci" and group is not None and vfio_node:
            self.vfio(group)
        if vf_of:
            self._virtual(home, vf_of)
        return home

    def registers(self, address: str, head: bytes) -> None:
        """The contents of its configuration space."""
        self.path(f"/sys/bus/pci/devices/{address}/config").write_bytes(head)

    def bind(self, address: str, driver: str) -> None:
        self.path(f"/sys/bus/pci/drivers/{driver}").mkdir(parents=True, exist_ok=True)
        self.link(f"/sys/bus/pci/devices/{address}/driver", f"/sys/bus/pci/drivers/{driver}")

    def in_group(self, group: int, name: str, home: str) -> None:
        self.link(f"/sys/kernel/iommu_groups/{group}/devices/{name}", home)
        self.link(f"{home}/iommu_group", f"/sys/kernel/iommu_groups/{group}")

    def _virtual(self, home: str, physical: str) -> None:
        above = f"/sys/bus/pci/devices/{physical}"
        self.link(f"{home}/physfn", above)
        number = sum(1 for name in os.listdir(self.path(above)) if name.startswith("virtfn"))
        self.link(f"{above}/virtfn{number}", home)

    def cdev(self, name: str, home: str, major: int = 511, minor: int = 0, *, by_class: bool = True) -> str:
        """Adds /dev/vfio/devices/NAME of a function or mdev at `home`; without `by_class` it can be found by number
        only."""
        device = f"{home}/vfio-dev/{name}"
        self.path(device).mkdir(parents=True)
        self.link(f"{device}/device", home)
        self.link(f"/sys/dev/char/{major}:{minor}", device)
        if by_class:
            self.link(f"/sys/class/vfio-dev/{name}", device)
        return self.node(f"/dev/vfio/devices/{name}", major=major, minor=minor)

    def mdev(self, uuid: str, group: int, parent: str) -> str:
        home = f"{parent}/{uuid}"
        self.path(home).mkdir(parents=True)
        self.link(f"/sys/bus/mdev/devices/{uuid}", home)
        self.in_group(group, uuid, home)
        return home

    # --- what the node itself uses

    def interface(self, name: str, home: str = "", lower: Sequence[str] = ()) -> None:
        """Adds a network card at `home`, or an interface on top of others."""
        where = f"{home}/net/{name}" if home else f"/sys/devices/virtual/net/{name}"
        self.path(where).mkdir(parents=True, exist_ok=True)
        if home:
            self.link(f"{where}/device", home)
        self.link(f"/sys/class/net/{name}", where)
        for below in lower:
            self.link(f"{where}/lower_{below}", f"/sys/class/net/{below}")

    def default_route(self, interface: str) -> None:
        head = "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT"
        self.write(
            "/proc/net/route",
            f"{head}\nlo 0000007F 0 1 0 0 0 000000FF 0 0 0\n{interface} 00000000 01 3 0 0 0 00000000 0 0 0\n",
        )

    def block(self, name: str, where: str, number: str, slaves: Sequence[str] = ()) -> None:
        """Adds a block device whose directory in sysfs is `where`."""
        self.path(where).mkdir(parents=True, exist_ok=True)
        self.link(f"/sys/dev/block/{number}", where)
        self.link(f"/sys/class/block/{name}", where)
        for below in slaves:
            self.link(f"{where}/slaves/{below}", f"/sys/class/block/{below}")

    def mounted(self, *mounts: tuple[str, str, str]) -> None:
        """Mounts as (number, mount point, source)."""
        lines = [
            f"{36 + n} 35 {number} / {point} rw shared:1 - ext4 {source} rw"
            for n, (number, point, source) in enumerate(mounts)
        ]
        self.write("/proc/self/mountinfo", "\n".join(lines) + "\n")
