"""Which of a container's mounts its guest has: a pod's volumes are told from what kubelet adds to every pod. No I/O."""

from __future__ import annotations

import enum
import posixpath
import re
from collections.abc import Iterable, Mapping
from typing import Final, Protocol, TypeVar

from virtshim.domain.container import Mount
from virtshim.domain.guest.termination_message import termination_file
from virtshim.domain.volumes.shares import SharedVolume

SERVICE_ACCOUNT: Final = "/var/run/secrets/kubernetes.io/serviceaccount"
HOSTS: Final = "/etc/hosts"
_BLOCKS: Final = (
    "ask for a raw block volume (volumeDevices), or keep the data on the VM's own disk (virtshim.io/root-disk)"
)
_TEXTS: Final = "write the files into VirtletCloudInitUserData (write_files), or give a command its values as env"

# What kubelet keeps below the directory of a pod.
_HOSTS_FILE: Final = re.compile(r"/pods/[^/]+/etc-hosts")
_VOLUME: Final = re.compile(r"/pods/[^/]+/(?:volumes|volume-subpaths)/([^/]+)/[^/]+")
_MESSAGE_FILE: Final = re.compile(r"/pods/[^/]+/containers/[^/]+/[^/]+")
_TOKEN: Final = re.compile(r"/pods/[^/]+/volumes/kubernetes\.io~(?:projected|secret)/[^/]+")
# The kinds whose files kubelet writes itself -> what a pod's author calls them.
_WRITTEN_BY_KUBELET: Final[Mapping[str, str]] = {
    "kubernetes.io~configmap": "a configMap volume",
    "kubernetes.io~secret": "a secret volume",
    "kubernetes.io~downward-api": "a downwardAPI volume",
    "kubernetes.io~projected": "a projected volume",
}


class Mounted(Protocol):
    """What is read of a mount: CRI's, or the domain's."""

    @property
    def container_path(self) -> str: ...
    @property
    def host_path(self) -> str: ...
    @property
    def readonly(self) -> bool: ...


M = TypeVar("M", bound=Mounted)


class Origin(enum.Enum):
    # Asked for by the pod's author: a directory or a file of the node.
    VOLUME = "volume"
    # Asked for by the pod's author, and kubelet writes what is in it; or an image. The guest cannot have it yet.
    NOT_YET = "not yet"
    # kubelet adds them to every pod. The guest does not have them.
    KUBELETS = "kubelet's"
    # The file whose text is carried over from the guest when the container ends.
    TERMINATION = "termination"


def origins(mounts: Iterable[M], annotations: Mapping[str, str]) -> list[tuple[M, Origin]]:
    """`annotations`: the container's, in which kubelet names the termination message's path. A volume at one of kubelet's own
    paths is a volume all the same: what kubelet adds is told by where it is on the node, too."""
    mounts = list(mounts)
    file = termination_file(annotations, mounts)
    at_its_path = [at for at, mount in enumerate(mounts) if file and _normal(mount.container_path) == file.guest]
    message = at_its_path[-1] if at_its_path else -1
    return [(mount, Origin.TERMINATION if at == message else _origin(mount)) for at, mount in enumerate(mounts)]


def _origin(mount: Mounted) -> Origin:
    inside, host = _normal(mount.container_path), mount.host_path
    is_token = inside == SERVICE_ACCOUNT and mount.readonly and _is_kubelets(_TOKEN, host)
    is_hosts = inside == HOSTS and _is_kubelets(_HOSTS_FILE, host)
    is_message = _is_kubelets(_MESSAGE_FILE, host)
    if is_token or is_hosts or is_message:
        return Origin.KUBELETS
    return Origin.VOLUME if host and not _kubelet_writes(host) else Origin.NOT_YET


def _normal(path: str) -> str:
    """Two slashes at the beginning mean one here."""
    return "/" + posixpath.normpath(path).lstrip("/") if path.startswith("/") else posixpath.normpath(path)


def _is_kubelets(form: re.Pattern[str], path: str) -> bool:
    """kubelet's own directory may be anywhere (--root-dir)."""
    at = path.rfind("/pods/")
    return at >= 0 and form.fullmatch(path, at) is not None


def volumes_of(mounts: Iterable[Mount], annotations: Mapping[str, str]) -> tuple[SharedVolume, ...]:
    """Those that the guest gets, as they are numbered and mounted there: what is below another one comes after it."""
    volumes = [
        SharedVolume(_normal(mount.container_path), mount.host_path, mount.readonly, mount.follows)
        for mount, origin in origins(mounts, annotations)
        if origin is Origin.VOLUME
    ]
    return tuple(sorted(volumes, key=lambda volume: volume.guest.count("/")))


def hosts_file(mounts: Iterable[M], annotations: Mapping[str, str]) -> str:
    """The path of the hosts file that kubelet wrote for the pod; "" if there is none."""
    kubelets = (mount for mount, origin in origins(mounts, annotations) if origin is Origin.KUBELETS)
    return next((mount.host_path for mount in kubelets if _normal(mount.container_path) == HOSTS), "")


def there(mounts: Iterable[Mount], annotations: Mapping[str, str], volumes: Iterable[SharedVolume]) -> list[Mount]:
    """What the guest really has. `volumes`: those that its VM was made with."""
    has = {(volume.guest, volume.host) for volume in volumes}
    return [
        mount
        for mount, origin in origins(mounts, annotations)
        if origin is Origin.TERMINATION or (_normal(mount.container_path), mount.host_path) in has
    ]


def why_not_yet(mount: Mounted) -> str:
    """Why the guest cannot have such a volume, and what to do instead."""
    return f"{_kubelet_writes(mount.host_path)} is not passed to virtual machines yet; {_TEXTS}"


def _kubelet_writes(host: str) -> str:
    """The kind of a volume whose files kubelet writes; "" for others."""
    found = _VOLUME.search(host)
    return _WRITTEN_BY_KUBELET.get(found[1], "") if found else ""
