"""A VM's cgroup: its path, computed from the pod's cgroup_parent and the container's id, and its limits. No I/O.

Paths are relative to the root of each hierarchy (`/kubepods/pod1/virtshim-ID`). `virtshim.pods.cgroups` and tapmanager,
which makes and removes the groups, know where hierarchies are mounted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from virtshim.model.errors import InvalidRequest
from virtshim.model.ids import ContainerId, SandboxId

# The parent for VMs of pods without a cgroup_parent, so that limits and accounting work for them too.
DEFAULT_PARENT = "/virtshim"

_MAX_PATH = 2048
_MAX_NAME = 255  # bytes: the kernel's NAME_MAX
_SLICE = ".slice"
_SLICE_NAME = re.compile(r"[A-Za-z0-9:_.\\@]+(?:-[A-Za-z0-9:_.\\@]+)*\.slice")
_FIELD = "config.linux.cgroup_parent"
# The prefix of kubelet's names of pods' cgroups, before the pod's UID. kubelet takes any other group with this in its
# name, below a QoS class, for the cgroup of a pod that is gone, and kills what is in it.
_POD = "pod"


def parent_path(cgroup_parent: str) -> str:
    """The absolute path of a pod's `cgroup_parent`: a path as it is (`/kubepods/burstable/pod1`), or a systemd slice
    (`kubepods-pod1.slice`) below the slices that its name implies; "" for none. InvalidRequest names the field."""
    if not cgroup_parent:
        return ""
    if len(cgroup_parent) > _MAX_PATH or not cgroup_parent.isprintable():
        raise InvalidRequest(f"{_FIELD} is too long or has control characters: {cgroup_parent[:80]!r}")
    if not cgroup_parent.startswith("/"):
        return expanded_slice(cgroup_parent)
    parts = cgroup_parent.strip("/").split("/")
    if cgroup_parent.strip("/") == "":
        return "/"
    if any(part in ("", ".", "..") for part in parts):
        raise InvalidRequest(f"{_FIELD} {cgroup_parent[:200]!r} has a part that is empty, . or ..; write a plain path")
    if any(len(part.encode()) > _MAX_NAME for part in parts):
        raise InvalidRequest(f"{_FIELD} {cgroup_parent[:80]!r}... has a part longer than {_MAX_NAME} bytes; shorten it")
    # kubelet gives the whole path of a slice, others only its last part with a slash. Both mean the slice.
    return expanded_slice(parts[-1]) if parts[-1].endswith(_SLICE) else "/" + "/".join(parts)


def expanded_slice(name: str) -> str:
    """systemd.slice(5): `a-b.slice` is the group `/a.slice/a-b.slice`."""
    if name == "-.slice":
        return "/"
    if not _SLICE_NAME.fullmatch(name):
        raise InvalidRequest(f"{_FIELD} {name[:200]!r} is neither an absolute path nor the name of a systemd slice")
    words = name.removesuffix(_SLICE).split("-")
    return "".join(f"/{'-'.join(words[: count + 1])}{_SLICE}" for count in range(len(words)))


def libvirt_partition(cgroup_parent: str) -> str:
    """libvirt's `<partition>` for a slice, which libvirt turns back into a name by writing dashes for slashes and
    adding `.slice`. "" for none: libvirt then uses machine.slice. Raises InvalidRequest for a path that is not a slice,
    because systemd would not find it."""
    path = parent_path(cgroup_parent)
    if path in ("", "/"):
        return path
    last = path.rpartition("/")[2]
    if not last.endswith(_SLICE):
        raise InvalidRequest(
            f"{_FIELD} {cgroup_parent[:200]!r} is not a systemd slice, but this node's cgroup driver is systemd; "
            'let kubelet use the same driver, or set cri.cgroup_driver = "cgroupfs"'
        )
    return "/" + last.removesuffix(_SLICE).replace("-", "/")


def is_pods_own(cgroup_parent: str) -> bool:
    """Whether kubelet made this cgroup for one pod, with the pod's limits: `.../podUID`, or the slice
    `...-podUID.slice`. Any other is an operator's, who put VMs into it on purpose."""
    last = parent_path(cgroup_parent).rpartition("/")[2]
    name = last.removesuffix(_SLICE).rpartition("-")[2] if last.endswith(_SLICE) else last
    return name.startswith(_POD) and name != _POD


def beside(cgroup_parent: str) -> str:
    """The cgroup above a pod's own: that of its QoS class."""
    return parent_path(cgroup_parent).rpartition("/")[0] or "/"


def vm_cgroup_path(cgroup_parent: str, container: ContainerId) -> str:
    """The path of a container's own cgroup; `cgroup_parent` as the container's record holds it."""
    parent = parent_path(cgroup_parent) or DEFAULT_PARENT
    return f"{parent.rstrip('/')}/virtshim-{container}"


@dataclass(frozen=True, slots=True)
class CgroupLimits:
    """Limits of a VM's cgroup, in CRI units: shares as in cgroup v1; quota and period in microseconds (quota 0: none);
    cpusets as lists ("": the parent's); sizes in bytes. `memory`: 0 for no limit. `swap`: swap alone, None for no
    limit. `hugepages`: bytes by page size in bytes. `unified`: cgroup v2 files with checked values."""

    cpu_shares: int = 0
    cpu_quota: int = 0
    cpu_period: int = 0
    cpuset_cpus: str = ""
    cpuset_mems: str = ""
    memory: int = 0
    swap: int | None = None
    hugepages: Mapping[int, int] = field(default_factory=dict)
    unified: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class VmCgroup:
    """A container's cgroup (`vm_cgroup_path`). `cgroup_parent`: as in the container's record."""

    sandbox: SandboxId
    container: ContainerId
    cgroup_parent: str
    limits: CgroupLimits
    oom_score_adj: int
    # The user id of its QEMU, 0 for libvirt's single user.
    uid: int = 0
    # For each of the VM's NICs.
    nic_queues: int = 1
    # The path of its passt's socket, "" for a VM with taps.
    passt_socket: str = ""
