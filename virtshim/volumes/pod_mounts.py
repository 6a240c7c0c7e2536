"""Sorts a container's mounts: which volumes the guest shares, copies or does without, and which it is known to have.
Pure."""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final

from virtshim.annotations.names import STATE_VOLUME_ANNOTATION
from virtshim.annotations.options import VmOptions
from virtshim.devices.guest_view import normal_path
from virtshim.guest.command import termination_file
from virtshim.model.container import Container, ContainerConfig, Mount
from virtshim.model.errors import InvalidRequest
from virtshim.model.text import escaped
from virtshim.volumes.copies import CopiedVolume
from virtshim.volumes.disk_images import DRIVER
from virtshim.volumes.memory_volumes import MemoryVolume
from virtshim.volumes.shares import SharedVolume

# In the guest this is kubelet's file, unless the pod's user-data or files say what it should be.
HOSTS: Final = "/etc/hosts"


def says_hosts(options: VmOptions) -> bool:
    asked = options.user_data
    return "manage_etc_hosts" in asked or HOSTS in written_paths(asked) or HOSTS in options.files


def written_paths(user_data: Mapping[str, Any]) -> list[Any]:
    """The paths of `write_files`; none from a document that cloud-init would refuse."""
    files = user_data.get("write_files")
    return [file.get("path") for file in files if isinstance(file, Mapping)] if isinstance(files, list) else []


# Which of a container's mounts become volumes of the guest: kubelet adds mounts to every pod, which are recognized
# here.

# Files that kubelet keeps below a pod's directory.
_HOSTS_FILE: Final = re.compile(r"/pods/([^/]+)/etc-hosts")
_MESSAGE_FILE: Final = re.compile(r"/pods/[^/]+/containers/[^/]+/[^/]+")
# The kinds of volumes whose files kubelet writes.
WRITTEN_BY_KUBELET: Final = tuple(
    f"kubernetes.io~{kind}" for kind in ("configmap", "secret", "downward-api", "projected")
)
_WRITTEN: Final = re.compile(rf"/pods/([^/]+)/volumes/(?:{'|'.join(WRITTEN_BY_KUBELET)})/[^/]+")
_FLEX: Final = re.compile(rf"/pods/([^/]+)/volumes/{DRIVER}/[^/]+")
_EMPTY_DIR: Final = re.compile(r"/pods/([^/]+)/volumes/kubernetes\.io~empty-dir/[^/]+")
# A part of a volume (subPath). It has the pod's name of the volume.
_SUBPATH: Final = re.compile(r"(/pods/([^/]+))/volume-subpaths/([^/]+)/[^/]+/[^/]+")

NO_IMAGES: Final[Mapping[str, SharedVolume]] = {}


class Origin(enum.Enum):
    # The pod's author asks for it: a directory or a file of the node.
    VOLUME = "volume"
    # kubelet writes the files. The guest has a copy.
    COPY = "copy"
    # A flexVolume of Virtlet. The guest has an empty disk instead.
    FLEX = "flexVolume"
    # The files of an image.
    IMAGE = "image"
    # kubelet adds it to every pod. The guest's own hosts file gets its content.
    HOSTS = "hosts"
    # kubelet adds these to every pod. The guest has none of them.
    KUBELETS = "kubelet's"
    # The termination message, which virtshim reads from the guest when the container ends.
    TERMINATION = "termination"


def origins(mounts: Iterable[Mount], annotations: Mapping[str, str], pod_uid: str = "") -> list[tuple[Mount, Origin]]:
    """`annotations`: the container's, in which kubelet names the path of the termination message. A pod's own volume
    may be at a path that kubelet uses, so a mount of kubelet is also recognized by its place on the node. `pod_uid`: a
    directory of another pod counts as a plain directory of the node; "" accepts any pod."""
    mounts = list(mounts)
    file = termination_file(annotations, mounts)
    at_its_path = [at for at, mount in enumerate(mounts) if file and normal_path(mount.container_path) == file.guest]
    message = at_its_path[-1] if at_its_path else -1
    return [
        (mount, Origin.TERMINATION if at == message else _origin(mount, pod_uid)) for at, mount in enumerate(mounts)
    ]


def _origin(mount: Mount, pod_uid: str) -> Origin:
    host = mount.host_path
    hosts = _kubelets(_HOSTS_FILE, host)
    if hosts and normal_path(mount.container_path) == HOSTS:
        return Origin.HOSTS if pod_uid in ("", hosts[1]) else Origin.KUBELETS
    if _kubelets(_MESSAGE_FILE, host):
        return Origin.KUBELETS
    if not host:
        return Origin.IMAGE
    for form, origin in ((_WRITTEN, Origin.COPY), (_FLEX, Origin.FLEX)):
        if (found := _kubelets(form, host)) and pod_uid in ("", found[1]):
            return origin
    return Origin.VOLUME


def _kubelets(form: re.Pattern[str], path: str) -> re.Match[str] | None:
    """Matches `form` below kubelet's directory, which may be anywhere (--root-dir)."""
    at = path.rfind("/pods/")
    return form.fullmatch(path, at) if at >= 0 else None


def subpath_sources(host_path: str, pod_uid: str) -> tuple[str, ...]:
    """If `host_path` is a part of a volume of that pod: the paths where the whole volume is if kubelet writes it. A
    pod's volume names are unique."""
    found = _kubelets(_SUBPATH, host_path)
    if found is None or found[2] != pod_uid:
        return ()
    pod = host_path[: found.end(1)]
    return tuple(f"{pod}/volumes/{kind}/{found[3]}" for kind in WRITTEN_BY_KUBELET)


def volumes_of(
    mounts: Iterable[Mount],
    annotations: Mapping[str, str],
    pod_uid: str = "",
    parts: Callable[[str], bool] = lambda _: False,
    *,
    share: bool = False,
    images: Collection[str] = (),
    left_out: str = "",
    image_volumes: Mapping[str, SharedVolume] = NO_IMAGES,
) -> tuple[tuple[SharedVolume, ...], tuple[CopiedVolume, ...]]:
    """The volumes of the guest: the shared ones in the order of their numbers and mounts, so that a volume below
    another one comes after it; and the copied ones, kubelet's hosts file included. `parts`: whether the host path of a
    subPath belongs to a volume that kubelet writes. `share`: copy no volume. `images`: mount paths of volumes that are
    disks. `left_out`: the mount path of a volume that the guest gets in another way. `image_volumes`: images, by mount
    path."""
    shared, copied = [], []
    for mount, origin in origins(mounts, annotations, pod_uid):
        guest = normal_path(mount.container_path)
        if origin is Origin.HOSTS:
            copied.append(CopiedVolume(guest, mount.host_path, mount.readonly, written=True))
            continue
        if origin is Origin.IMAGE and guest in image_volumes:
            shared.append(image_volumes[guest])
        if origin not in (Origin.COPY, Origin.VOLUME) or guest in (*images, left_out):
            continue
        is_whole = origin is Origin.COPY
        if not share and (is_whole or parts(mount.host_path)):
            copied.append(CopiedVolume(guest, mount.host_path, mount.readonly, renewed=is_whole))
        else:
            shared.append(SharedVolume(guest, mount.host_path, mount.readonly, mount.follows))
    shared.sort(key=lambda volume: volume.guest.count("/"))
    return tuple(shared), tuple(copied)


def flex_mounts(mounts: Iterable[Mount], annotations: Mapping[str, str], pod_uid: str) -> list[tuple[str, str]]:
    """The guest path and the host path of each flexVolume of Virtlet in that pod."""
    found = origins(mounts, annotations, pod_uid)
    return [(normal_path(mount.container_path), mount.host_path) for mount, origin in found if origin is Origin.FLEX]


def image_mounts(
    mounts: Iterable[Mount], annotations: Mapping[str, str], pod_uid: str, images: Collection[str]
) -> list[tuple[Mount, bool]]:
    """The mounts at `images`, with normalized paths, and whether each is a volume that can hold a disk image."""
    return [
        (dataclasses.replace(mount, container_path=guest), origin is Origin.VOLUME)
        for mount, origin in origins(mounts, annotations, pod_uid)
        if (guest := normal_path(mount.container_path)) in images
    ]


def mount_path(text: str) -> str:
    """A mount path in normal form, "" for none. Raises InvalidRequest."""
    path = text.strip()
    if path and (
        not path.startswith("/") or ".." in path.split("/") or normal_path(path) == "/" or not path.isprintable()
    ):
        raise InvalidRequest(
            f"{escaped(path, 80)!r} is not a mountPath of the pod; write an absolute path without '..'"
        )
    return normal_path(path) if path else ""


def is_empty_dir(host_path: str, pod_uid: str) -> bool:
    """Whether the path is a whole emptyDir of that pod."""
    found = _kubelets(_EMPTY_DIR, host_path)
    return found is not None and found[1] == pod_uid


def without_state_volume(config: ContainerConfig, pod_uid: str, path: str) -> tuple[str, ContainerConfig]:
    """The node's path of the state volume that is mounted at `path`, and the config without this mount, because the
    guest does not see it. For an empty `path`: "" and the config itself. Raises InvalidRequest if the mount is not a
    volume that can follow the pod to other nodes."""
    if not path:
        return "", config
    field = f"annotation {STATE_VOLUME_ANNOTATION}: {escaped(path, 200)}"
    found = origins(config.mounts, config.annotations, pod_uid)
    mount, origin = next((one for one in found if normal_path(one[0].container_path) == path), (None, None))
    if mount is None:
        raise InvalidRequest(f"{field} is not a mountPath of the container; mount a PersistentVolumeClaim there")
    if origin is not Origin.VOLUME or is_empty_dir(mount.host_path, pod_uid):
        raise InvalidRequest(
            f"{field} is no PersistentVolumeClaim, so it cannot follow the pod to another node; mount one there"
        )
    if _kubelets(_SUBPATH, mount.host_path):
        raise InvalidRequest(f"{field} is a part of a volume (subPath); mount a whole PersistentVolumeClaim there")
    if mount.readonly:
        raise InvalidRequest(f"{field} is mounted read-only; mount it writable")
    return mount.host_path, dataclasses.replace(config, mounts=tuple(one for one in config.mounts if one is not mount))


def hosts_file(mounts: Iterable[Mount], annotations: Mapping[str, str]) -> str:
    """The path of the hosts file that kubelet wrote for the pod, "" if there is none."""
    return next((mount.host_path for mount, origin in origins(mounts, annotations) if origin is Origin.HOSTS), "")


def there(
    mounts: Iterable[Mount],
    annotations: Mapping[str, str],
    volumes: Iterable[SharedVolume | CopiedVolume | MemoryVolume],
) -> list[Mount]:
    """The mounts that the guest really has. `volumes`: those that its VM was made with."""
    volumes = list(volumes)
    has = {(volume.guest, volume.host) for volume in volumes}
    of_images = {volume.guest for volume in volumes if isinstance(volume, SharedVolume) and volume.image is not None}
    return [
        mount
        for mount, origin in origins(mounts, annotations)
        if origin in (Origin.TERMINATION, Origin.FLEX)
        or (normal_path(mount.container_path), mount.host_path) in has
        or (origin is Origin.IMAGE and normal_path(mount.container_path) in of_images)
    ]


def known_volumes(container: Container) -> tuple[SharedVolume | CopiedVolume | MemoryVolume, ...]:
    """Shared volumes and volumes in guest memory, except those that failed to mount, and the copies that the guest has
    reported."""
    spec, status = container.spec, container.status
    copied = tuple(volume for volume in spec.copies if volume.guest in status.copied)
    return copied if status.unmounted else (*spec.volumes, *spec.memory_volumes, *copied)


def with_told(container: Container, copied: tuple[str, ...], *, unmounted: bool, confirmed: bool) -> Container:
    """`confirmed`: the guest has just reported that everything is mounted. Once reported, this stays."""
    confirmed |= container.status.mounts_confirmed
    status = dataclasses.replace(container.status, copied=copied, unmounted=unmounted, mounts_confirmed=confirmed)
    return dataclasses.replace(container, status=status)


def has_writable(container: Container) -> bool:
    """Whether the guest's writes may end up on its root disk if a mount fails unnoticed."""
    spec = container.spec
    readonly = [volume.readonly for volume in spec.volumes] + [volume.readonly for volume in spec.memory_volumes]
    return not all(readonly) or any(disk.guest for disk in spec.empty_disks)
