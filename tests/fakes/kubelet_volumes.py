"""kubelet's volumes, scripted by a test."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from virtshim.model.errors import InvalidRequest, NotFound, WrongState
from virtshim.volumes.copies import CopiedVolume, Entry, EntryKind
from virtshim.volumes.memory_volumes import Tmpfs


class FakeKubeletVolumes:
    """Implements `virtshim.volumes.ports.KubeletVolumes`. `volumes`: where each is on the node -> what is in it. `parts`:
    paths of
    parts of volumes. `tmpfs`: of emptyDirs with medium Memory; `filled`: those in which something is. `pods`: the log directories
    of kubelet's pods."""

    def __init__(self) -> None:
        self.volumes: dict[str, tuple[Entry, ...]] = {}
        self.parts: set[str] = set()
        self.tmpfs: dict[str, Tmpfs] = {}
        self.filled: set[str] = set()
        self.pods: set[str] = set()
        self.asked: frozenset[str] = frozenset()
        self._changed: set[str] = set()

    def write(self, host: str, files: Mapping[str, bytes], version: str = "1") -> None:
        """Writes as kubelet does: a new directory, then the swap of `..data`."""
        data = f"..2026_11_22_{version}"
        entries = [Entry("", EntryKind.DIRECTORY, 0o1777, 0, 0), Entry(data, EntryKind.DIRECTORY, 0o755, 0, 0)]
        entries.append(Entry("..data", EntryKind.LINK, 0o777, 0, 0, target=data))
        for name, content in files.items():
            entries.append(Entry(f"{data}/{name}", EntryKind.FILE, 0o644, 0, 0, content=content))
            entries.append(Entry(name, EntryKind.LINK, 0o777, 0, 0, target=f"..data/{name}"))
        self.volumes[host] = tuple(entries)
        self._changed.add(host)

    def put(self, host: str, content: bytes) -> None:
        """Writes a file in place, as kubelet writes /etc/hosts."""
        self.volumes[host] = (Entry("", EntryKind.FILE, 0o644, 0, 0, content=content),)
        self._changed.add(host)

    def is_part(self, host_path: str, pod_uid: str) -> bool:
        return host_path in self.parts

    def has_pod(self, log_directory: str) -> bool:
        return log_directory in self.pods

    def read(self, volume: CopiedVolume) -> tuple[Entry, ...]:
        if volume.host not in self.volumes:
            raise NotFound(f"the volume at {volume.host} does not exist, or not any more")
        return self.volumes[volume.host]

    def empty_tmpfs(self, host_path: str) -> Tmpfs:
        if host_path in self.filled:
            raise WrongState(f"{host_path} already has files (from an init container?)")
        if host_path not in self.tmpfs:
            raise InvalidRequest("the emptyDir does not have medium: Memory; remove the path from the annotation")
        return self.tmpfs[host_path]

    def changed(self, hosts: Collection[str], timeout: float) -> Collection[str]:
        wanted = frozenset(hosts)
        found = (self._changed & wanted) | (wanted - self.asked)
        self.asked = wanted
        self._changed -= found
        return found
