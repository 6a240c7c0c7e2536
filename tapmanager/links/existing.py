"""Network namespaces that another runtime made and keeps. Only looks at them: nothing here changes a namespace or its links."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
from collections.abc import Iterator, Mapping, Sequence

from tapmanager.errors import TapmanagerError, invalid, wrong_state
from tapmanager.links import netns, pod_links
from tapmanager.links.nic_plan import KernelLink
from tapmanager.network_values import Existing
from tapmanager.pod import SharedNic

# linux/nsfs.h, linux/sched.h
_NS_GET_NSTYPE = 0xB703
_CLONE_NEWNET = 0x40000000
# The first process's namespace, and tapmanager's, which differ in a container.
_NODES = ("/proc/1/ns/net", "/proc/self/ns/net")


def nic_in(existing: Existing, descriptor: int, macs: Mapping[str, str]) -> SharedNic:
    """The guest's NIC in this namespace. `descriptor`: from `opened`. `macs`: those that the VM keeps, by interface. Raises
    TapmanagerError if the namespace cannot be used for a VM, and OSError."""
    inode = os.fstat(descriptor).st_ino
    if inode in _nodes():
        raise invalid(f"{existing.path} is the node's own network namespace; a VM cannot share it")
    # The descriptor's path, because another namespace may have got the name meanwhile.
    there = netns.run_inside(f"/proc/self/fd/{descriptor}", pod_links.read)
    link = _only(existing.path, there)
    addresses = _pods(existing, link)
    return SharedNic(link.name, macs.get(link.name) or pod_links.random_mac(), inode, addresses)


def _nodes() -> Iterator[int]:
    for path in _NODES:
        with contextlib.suppress(PermissionError):  # a security module may hide the first process
            yield os.stat(path).st_ino


def inode_at(path: str) -> int | None:
    """What identifies the network namespace at the path; None if there is none. Raises OSError."""
    try:
        with opened(path) as descriptor:
            return os.fstat(descriptor).st_ino
    except TapmanagerError:
        return None


@contextlib.contextmanager
def opened(path: str) -> Iterator[int]:
    """A descriptor of the network namespace at the path. Opens nothing else, because opening a device or a FIFO has effects.
    Raises TapmanagerError."""
    try:
        found = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError) as exc:
        raise wrong_state(f"the network namespace {path} is gone; the pod needs a new sandbox") from exc
    try:
        if os.fstat(found).st_dev != os.stat(_NODES[-1]).st_dev:
            raise _no_namespace(path)
        descriptor = os.open(f"/proc/self/fd/{found}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(found)
    try:
        if fcntl.ioctl(descriptor, _NS_GET_NSTYPE) != _CLONE_NEWNET:
            raise _no_namespace(path)
        yield descriptor
    finally:
        os.close(descriptor)


def _no_namespace(path: str) -> TapmanagerError:
    return invalid(f"{path} is not a network namespace")


def _only(path: str, there: Sequence[KernelLink]) -> KernelLink:
    """The one link with addresses. Links without addresses are the kernel's own for tunnels."""
    used = [link for link in there if link.addresses]
    if not used:
        raise wrong_state(
            f"no interface of {path} has an address: its sandbox was stopped, or its network failed; the pod needs a new sandbox"
        )
    if len(used) > 1:
        raise invalid(
            f"the pod has {len(used)} networks ({', '.join(link.name for link in used)}), but a pod with containers beside its "
            "VM has one; remove the others (k8s.v1.cni.cncf.io/networks), or use the RuntimeClass virtshim"
        )
    return used[0]


def _pods(existing: Existing, link: KernelLink) -> tuple[str, ...]:
    """The pod's addresses with their prefix lengths, one of each family, because passt supports no more."""
    there = {str(ipaddress.ip_interface(one).ip): one for one in link.addresses}
    if missing := [ip for ip in existing.addresses if ip not in there]:
        raise wrong_state(
            f"{link.name} in {existing.path} has {', '.join(there)}, but the pod has {', '.join(missing)}; the pod needs a new "
            "sandbox"
        )
    found: dict[int, str] = {}
    for ip in existing.addresses or there:
        found.setdefault(ipaddress.ip_address(ip).version, there[ip])
    return tuple(found.values())
