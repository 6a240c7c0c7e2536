"""Which of a container's mounts its guest has: a pod's volumes are told from what kubelet adds to every pod. No I/O."""

from __future__ import annotations

import enum
import posixpath
import re
from collections.abc import Iterable, Mapping
from typing import Final, Protocol, TypeVar

from virtshim.domain.guest.termination_message import termination_file

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
    # Asked for by the pod's author.
    VOLUME = "volume"
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
    return Origin.KUBELETS if is_token or is_hosts or is_message else Origin.VOLUME


def _normal(path: str) -> str:
    return posixpath.normpath(path)


def _is_kubelets(form: re.Pattern[str], path: str) -> bool:
    """kubelet's own directory may be anywhere (--root-dir)."""
    at = path.rfind("/pods/")
    return at >= 0 and form.fullmatch(path, at) is not None


def there(mounts: Iterable[M], annotations: Mapping[str, str]) -> list[M]:
    """What the guest really has."""
    return [mount for mount, origin in origins(mounts, annotations) if origin is Origin.TERMINATION]


def hosts_file(mounts: Iterable[M], annotations: Mapping[str, str]) -> str:
    """The path of the hosts file that kubelet wrote for the pod; "" if there is none."""
    kubelets = (mount for mount, origin in origins(mounts, annotations) if origin is Origin.KUBELETS)
    return next((mount.host_path for mount in kubelets if _normal(mount.container_path) == HOSTS), "")


def why_not(mount: Mounted) -> str:
    """Why the guest cannot have a volume, and what to do instead."""
    found = _VOLUME.search(mount.host_path)
    written = _WRITTEN_BY_KUBELET.get(found[1]) if found else None
    if written:
        return f"{written} is not passed to virtual machines yet; {_TEXTS}"
    return f"directories and files of the node are not passed to virtual machines yet; {_BLOCKS}"
