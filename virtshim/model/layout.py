"""Where everything of this node lives. Every path is computed from an id alone, so any clean-up can be repeated. No I/O.

state_dir/                       survives a reboot, root only
  state.db                       SQLite; state.db.corrupt-<time>: a damaged one, state.db.new: what replaces it
  node.id                        a copy of the node's id
  images/                        disks by digest; searchable by the QEMU user
  containers/<id>/               root.qcow2  root.nvram  seed.iso  sysprep.iso  ignition.json  console.log (raw bytes)
                                 console.pos  command.pos  kernel-<path>
                                 record.json: a copy of its pod's records, in case the database is lost
  pods/<pod>/                    <disk>.qcow2: root disks that stay for the pod's life (see virtshim.model.sandbox)
                                 <disk>.nvram  <disk>.firmware  <disk>.tpm  <disk>.places
                                 <disk>.kernel-<path>
  vms/<vm>/                      vm.json  root.qcow2 and what is beside it, as in pods/: a VM that outlives its pods
                                 memory.save: its guest's memory, saved at a stop
  templates/<id>/                root.qcow2  console.log, while a template boots (virtshim.templates)
  peers/node.pem                 key, certificate and CA for other nodes, of virtshim agent (virtshim.cluster.node_certificate)
run_dir/                         gone after a reboot
  virtshim.sock  virtshim.lock   the CRI socket, and the lock of the process that serves it
  admin.sock                     the operators' socket, for root alone
  tapmanager.sock
  vm/<short id>/                 console.sock  agent.sock  exec-<n>.sock
  vnc/<short id>/                vnc.sock, if the pod asks for a screen
  shares/<short id>/             fs.sock of the share program, if the pod has volumes
                                 net/sock of passt, if it has containers beside the VM
  memory/<short id>.sock         while a VM starts from a template
"""

from __future__ import annotations

import hashlib
import os.path
from dataclasses import dataclass

from virtshim.model.container import Container
from virtshim.model.hardware import Firmware
from virtshim.model.ids import ContainerId
from virtshim.model.sandbox import VMS

# UEFI's variables of a container whose root disk does not outlive it.
NVRAM = "root.nvram"
# The record of a VM that outlives its pods, beside its root disk.
VM_RECORD = "vm.json"
# Kernels that the firmware starts, and their RAM disks: files of the image.
KERNELS = "kernel-"
LONGEST_SOCKET_PATH = 107  # bytes: sun_path, less its closing zero byte


@dataclass(frozen=True, slots=True)
class Layout:
    state_dir: str
    run_dir: str

    @property
    def database(self) -> str:
        return f"{self.state_dir}/state.db"

    @property
    def images(self) -> str:
        return f"{self.state_dir}/images"

    @property
    def containers(self) -> str:
        return f"{self.state_dir}/containers"

    @property
    def sockets(self) -> str:
        return f"{self.run_dir}/vm"

    def container_dir(self, container: ContainerId) -> str:
        return f"{self.containers}/{container}"

    def root_disk(self, container: ContainerId) -> str:
        return f"{self.container_dir(container)}/root.qcow2"

    @property
    def pod_disks(self) -> str:
        return f"{self.state_dir}/pods"

    def pod_disk(self, name: str) -> str:
        """`name` as `virtshim.model.sandbox.disk_name` or `vm_disk_name` gives it."""
        return f"{self.kept(name)}.qcow2"

    def kept(self, disk: str) -> str:
        """The path of a disk that outlives its containers, without the ending. The files beside it begin with it."""
        return f"{self.state_dir if disk.startswith(f'{VMS}/') else self.pod_disks}/{disk}"

    @property
    def vms(self) -> str:
        return f"{self.state_dir}/{VMS}"

    @property
    def templates(self) -> str:
        return f"{self.state_dir}/templates"

    def template_dir(self, template: ContainerId) -> str:
        return f"{self.templates}/{template}"

    def memory_socket(self, container: ContainerId) -> str:
        """Where vmwrapper gets the memory of a guest that has a template."""
        return f"{self.run_dir}/memory/{container.short}.sock"

    def seed_iso(self, container: ContainerId) -> str:
        return f"{self.container_dir(container)}/seed.iso"

    def console_log(self, container: ContainerId) -> str:
        return f"{self.container_dir(container)}/console.log"

    def console_position(self, container: ContainerId) -> str:
        return f"{self.container_dir(container)}/console.pos"

    def socket_dir(self, container: ContainerId) -> str:
        return f"{self.sockets}/{container.short}"

    @property
    def vnc_sockets(self) -> str:
        """The directory of VNC sockets. Each VM has a directory in it, apart from its other sockets, because QEMU makes
        its VNC socket itself and libvirt makes the others."""
        return f"{self.run_dir}/vnc"

    def console_socket(self, container: ContainerId) -> str:
        return f"{self.socket_dir(container)}/console.sock"

    def agent_socket(self, container: ContainerId) -> str:
        return f"{self.socket_dir(container)}/agent.sock"

    def exec_socket(self, container: ContainerId, number: int) -> str:
        return f"{self.socket_dir(container)}/exec-{number}.sock"


def empty_disk_name(name: str) -> str:
    """The name does not tell the disk's format; only the VM's definition does."""
    return f"disk-{name}"


def ignition_file(layout: Layout, container: ContainerId) -> str:
    """The Ignition configuration, which QEMU passes to the guest through the firmware."""
    return f"{layout.container_dir(container)}/ignition.json"


def sysprep_iso(layout: Layout, container: ContainerId) -> str:
    return f"{layout.container_dir(container)}/sysprep.iso"


def share_dir(layout: Layout) -> str:
    """The directory of the share sockets: one subdirectory for each VM with volumes, by the short id."""
    return f"{layout.run_dir}/shares"


def passt_socket(directory: str, container: ContainerId) -> str:
    """The socket through which tapmanager reaches the VM's passt. `directory`: `share_dir`."""
    return f"{directory}/{container.short}/net/sock"


def share_socket(layout: Layout, container: ContainerId) -> str:
    """The socket through which QEMU reaches the VM's virtiofsd."""
    return f"{share_dir(layout)}/{container.short}/fs.sock"


def vnc_socket(layout: Layout, container: ContainerId) -> str:
    """The socket of the VNC server. Nothing else is in its directory."""
    return f"{layout.vnc_sockets}/{container.short}/vnc.sock"


def record_copy(layout: Layout, container: ContainerId) -> str:
    return f"{layout.container_dir(container)}/record.json"


def admin_socket(layout: Layout) -> str:
    """The socket for the node's operators."""
    return f"{layout.run_dir}/admin.sock"


def nvram_of(layout: Layout, container: Container, firmware: Firmware) -> str:
    """The file of UEFI's variables, which is beside the root disk and removed with it. Each kind of firmware has its
    own file, because the keys of Secure Boot are variables too: with a file that lacks the keys, a secure firmware
    would start any loader."""
    if container.spec.pod_disk:
        return kept_variables(layout, container.spec.pod_disk, firmware)
    return f"{layout.container_dir(container.id)}/{NVRAM}"


def kept_firmware(layout: Layout, disk: str, firmware: Firmware) -> str:
    """Names the firmware files of the disk's first start, to which the variables belong. `disk`: the name of a pod's
    disk."""
    return f"{_beside_pod_disk(layout, disk, firmware)}.firmware"


def kept_variables(layout: Layout, disk: str, firmware: Firmware) -> str:
    """UEFI's variables of a pod's disk. The file is made at the first start, whole or not at all."""
    return f"{_beside_pod_disk(layout, disk, firmware)}.nvram"


def _beside_pod_disk(layout: Layout, disk: str, firmware: Firmware) -> str:
    return f"{layout.kept(disk)}{'.secure' if firmware is Firmware.SECURE else ''}"


def kernel_of(layout: Layout, container: Container, path: str) -> str:
    """The copy of a kernel or RAM disk, which is beside the root disk and removed with it. `path`: of the file in the
    image."""
    name = f"{KERNELS}{hashlib.sha256(path.encode()).hexdigest()[:20]}"
    if container.spec.pod_disk:
        return f"{layout.kept(container.spec.pod_disk)}.{name}"
    return f"{layout.container_dir(container.id)}/{name}"


def directories_of(layout: Layout, container: ContainerId, disk: str) -> tuple[str, ...]:
    """The directories that appear in the definition of a VM that outlives its pods: the container's and the VM's
    own."""
    own = layout.container_dir(container), layout.socket_dir(container), os.path.dirname(vnc_socket(layout, container))
    return (*own, os.path.dirname(layout.kept(disk)))


def root_disk_of(layout: Layout, container: Container) -> str:
    """The path of its root disk: a volume's, the pod's, or its own."""
    if (volume := container.granted.root_volume) is not None:
        return volume.host_path
    return layout.pod_disk(container.spec.pod_disk) if container.spec.pod_disk else layout.root_disk(container.id)
