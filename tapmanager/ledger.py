"""The records of pods' networks: one JSON file per sandbox, written before anything changes and deleted last.

A file is replaced atomically (temporary file, fsync, rename, fsync of the directory), so it is always complete: either the old or
the new version. A file that cannot be read is kept and reported. It never counts as missing.

The placement of a sandbox's next VM has a file of its own, below /run and never synced, because a boot ends it anyway.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import errno
import json
import logging
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

from tapmanager.cni.conf import NO_CNI, NetworkConf, conf_from_json
from tapmanager.errors import TapmanagerError, internal
from tapmanager.fields import (
    MAX_UID,
    BadField,
    Json,
    as_object,
    each,
    each_text,
    inner,
    number,
    refuse_unknown,
    text,
    texts,
)
from tapmanager.network_values import Dns, address
from tapmanager.pod import MAX_QUEUES, Nic, NicFunction, Pod, SharedNic, sandbox_id

log = logging.getLogger(__name__)

_VERSION = 1
_SUFFIX = ".json"
_TEMPORARY = ".new-"


class Phase(enum.Enum):
    """ATTACHING and RELEASING: any part of the network may exist. ATTACHED: all parts exist."""

    ATTACHING = "attaching"
    ATTACHED = "attached"
    RELEASING = "releasing"


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the sandbox's next QEMU goes: the path of its cgroup below each hierarchy ("": it stays where it is) and its
    oom_score_adj (None: unchanged). The taps are handed out until `open_until` (seconds since boot, 0: never), to one process
    of the user `uid` (0: the common user of VMs). `taken_by` names that process. `queues`: how many queues it may have per NIC;
    0 for a virtshim of an earlier version, whose VMs support neither queues nor vhost-net. `stream`: passt's socket, in a pod
    whose namespace another runtime made."""

    group: str = ""
    oom_score_adj: int | None = None
    open_until: int = 0
    taken_by: str = ""
    uid: int = 0
    queues: int = 0
    stream: str = ""

    @classmethod
    def from_json(cls, obj: Json, where: str) -> Placement:
        refuse_unknown(obj, cls.__slots__, where)
        score = obj.get("oom_score_adj")
        return cls(
            text(obj, "group", where),
            None if score is None else number(obj, "oom_score_adj", where, -1000, 1000),
            number(obj, "open_until", where, 0, 1 << 62, 0),  # records of earlier versions lack this and the following
            text(obj, "taken_by", where, ""),
            number(obj, "uid", where, 0, MAX_UID, 0),
            number(obj, "queues", where, 0, MAX_QUEUES, 0),
            text(obj, "stream", where, ""),
        )


@dataclass(frozen=True, slots=True)
class Entry:
    """Everything that release needs, even if the configuration changes: the CNI configuration and plugin directories used, ADD's
    result (None: ADD may not have ended), the NICs, and the functions that are NICs themselves (both empty: links untouched).
    `shared`: the NIC in a namespace that another runtime made, for which no plugin ran (`conf`: NO_CNI).
    `fetch_key`: 64 hex digits. `placement` has a file of its own (`Ledger.place`). `boot`: the kernel's id of the boot in which
    the pod was attached ("": unknown)."""

    phase: Phase
    pod: Pod
    netns: str
    conf: NetworkConf
    bin_dirs: tuple[str, ...]
    fetch_key: str
    result: Json | None = None
    nics: tuple[Nic, ...] = ()
    functions: tuple[NicFunction, ...] = ()
    ips: tuple[str, ...] = ()
    dns: Dns = Dns()
    placement: Placement = Placement()
    boot: str = ""
    shared: SharedNic | None = None

    def __repr__(self) -> str:  # without the key, which must not reach logs
        return f"Entry({self.pod.sandbox}, {self.phase.value})"


def to_json(entry: Entry) -> Json:
    return {
        "version": _VERSION,
        "phase": entry.phase.value,
        "pod": entry.pod.to_json(),
        "netns": entry.netns,
        "conf": entry.conf.to_json(),
        "bin_dirs": list(entry.bin_dirs),
        "result": entry.result,
        "nics": [nic.to_json() for nic in entry.nics],
        "functions": [function.to_json() for function in entry.functions],
        "ips": list(entry.ips),
        "dns": {"servers": entry.dns.servers, "searches": entry.dns.searches, "options": entry.dns.options},
        "fetch_key": entry.fetch_key,
        "boot": entry.boot,
        **({"shared": entry.shared.to_json()} if entry.shared else {}),
    }


def from_json(raw: Json) -> Entry:
    """Raises BadField."""
    version = raw.get("version")
    if isinstance(version, int) and version > _VERSION:
        raise BadField(
            f"ledger.version: {version}, written by a newer tapmanager; this one supports {_VERSION}, so start the newer one"
        )
    if version != _VERSION:
        raise BadField(f"ledger.version: {str(version)[:20]!r}, but this program supports {_VERSION}")
    refuse_unknown(raw, ("version", *Entry.__slots__), "ledger")
    phase = text(raw, "phase", "ledger")
    if phase not in {one.value for one in Phase}:
        raise BadField(f"ledger.phase: {phase[:20]!r}")
    result, shared = raw.get("result"), raw.get("shared")
    return Entry(
        phase=Phase(phase),
        pod=Pod.from_json(as_object(raw.get("pod"), "ledger.pod"), "ledger.pod"),
        netns=text(raw, "netns", "ledger"),
        conf=NO_CNI if shared else conf_from_json(as_object(raw.get("conf"), "ledger.conf")),
        bin_dirs=texts(raw, "bin_dirs", "ledger"),
        fetch_key=text(raw, "fetch_key", "ledger"),
        result=None if result is None else as_object(result, "ledger.result"),
        nics=each(raw, "nics", "ledger", Nic.from_json),
        functions=each(raw, "functions", "ledger", NicFunction.from_json),  # missing in records of earlier versions
        ips=each_text(raw, "ips", "ledger", address),
        dns=Dns.from_json(as_object(raw.get("dns"), "ledger.dns"), "ledger.dns"),
        # Only records of earlier versions have it.
        placement=inner(raw, "placement", "ledger", Placement.from_json) if "placement" in raw else Placement(),
        boot=text(raw, "boot", "ledger", ""),
        shared=inner(raw, "shared", "ledger", SharedNic.from_json) if shared else None,
    )


class Ledger:
    """The files in `folder`, and the placements' in `placements`. Both are made with mode 0700 if missing. The caller holds the
    lock of the sandbox it uses."""

    def __init__(self, folder: str, placements: str) -> None:
        self._folder = folder
        self._placements = placements

    def prepare(self) -> None:
        """Makes the folders, and removes temporary files of a killed process. Raises OSError."""
        for folder in (self._folder, self._placements):
            os.makedirs(folder, mode=0o700, exist_ok=True)
            for name in os.listdir(folder):
                if name.startswith(_TEMPORARY):
                    os.unlink(os.path.join(folder, name))

    def path(self, sandbox: str) -> str:
        return os.path.join(self._folder, sandbox + _SUFFIX)

    def sandboxes(self) -> Sequence[str]:
        """All sandboxes that have a file, readable or not. Raises OSError."""
        found = []
        for name in os.listdir(self._folder):
            with contextlib.suppress(BadField):
                if name.endswith(_SUFFIX):
                    found.append(sandbox_id(name.removesuffix(_SUFFIX), "file name"))
        return sorted(found)

    def read(self, sandbox: str) -> Entry | None:
        """The record; None only if there is no file. Raises TapmanagerError (internal), which names a file that cannot be
        read."""
        path = self.path(sandbox)
        try:
            with open(path, "rb") as file:
                entry = from_json(as_object(json.loads(file.read()), "ledger"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as exc:
            raise _unreadable(path, exc) from exc
        if entry.pod.sandbox != sandbox:
            raise _unreadable(path, BadField("ledger.pod.sandbox: not the sandbox that the file's name says"))
        return dataclasses.replace(entry, placement=self._placement(sandbox) or entry.placement)

    def place(self, sandbox: str, placement: Placement) -> None:
        """Writes the placement of the sandbox's next VM. It outlives this process, but not a power cut, which also ends the VM.
        Raises TapmanagerError."""
        path = self._placement_path(sandbox)
        try:
            os.makedirs(self._placements, mode=0o700, exist_ok=True)
            told = dataclasses.asdict(placement)
            if not placement.stream:  # an earlier version does not know it
                del told["stream"]
            self._replace(path, json.dumps(told).encode(), synced=False)
        except OSError as exc:
            raise _cannot_write(path, exc) from exc

    def _placement(self, sandbox: str) -> Placement | None:
        """None if the sandbox has not been armed since the boot, or if a power cut has damaged the file. `fetch` then refuses
        until the next start arms the sandbox again."""
        path = self._placement_path(sandbox)
        try:
            with open(path, "rb") as file:
                return Placement.from_json(as_object(json.loads(file.read()), "placement"), "placement")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as exc:
            log.warning("placement.unreadable sandbox=%s path=%s error=%s", sandbox, path, exc)
            return None

    def _placement_path(self, sandbox: str) -> str:
        return os.path.join(self._placements, sandbox + _SUFFIX)

    def write(self, entry: Entry, *, survives_power_cuts: bool = True) -> None:
        """Writes the record. It is on disk when this returns; without `survives_power_cuts`, a power cut may restore the old one.
        Raises TapmanagerError (exhausted on a full disk, else internal)."""
        path = self.path(entry.pod.sandbox)
        plain = json.dumps(to_json(entry)).encode()  # on one line, because the C encoder does not support indentation
        data = _head(entry.phase) + plain[len(_head(entry.phase).rstrip()) :]
        try:
            self._replace(path, data, synced=True)
            if survives_power_cuts:
                self._sync_folder()
        except OSError as exc:
            raise _cannot_write(path, exc) from exc

    def _replace(self, path: str, data: bytes, *, synced: bool) -> None:
        fd, temporary = tempfile.mkstemp(prefix=_TEMPORARY, dir=os.path.dirname(path))  # 0600
        try:
            with open(fd, "wb") as file:
                file.write(data)
                if synced:
                    file.flush()
                    os.fsync(file.fileno())
            os.rename(temporary, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            raise

    def mark(self, entry: Entry, phase: Phase) -> Entry:
        """Changes the phase of the record, whose last written version is `entry`. A power cut may undo the change, which does not
        matter: nothing is attached after a power cut. Raises TapmanagerError."""
        marked = dataclasses.replace(entry, phase=phase)
        old, new = _head(entry.phase), _head(phase)
        path = self.path(entry.pod.sandbox)
        try:
            with open(path, "r+b", buffering=0) as file:
                if file.read(len(old)) == old:
                    os.pwrite(file.fileno(), new, 0)  # a few bytes within one page are written completely or not at all
                    return marked
        except OSError as exc:
            raise _cannot_write(path, exc) from exc
        self.write(marked)  # replaces a record of an earlier version
        return marked

    def sync(self) -> None:
        """Makes everything written so far survive power cuts. Raises TapmanagerError."""
        try:
            self._sync_folder()
        except OSError as exc:
            raise _cannot_write(self._folder, exc) from exc

    def delete(self, sandbox: str) -> None:
        """Deletes the record and the placement, if there are any; the record last. Raises TapmanagerError."""
        path = self.path(sandbox)
        try:
            for one in (self._placement_path(sandbox), path):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(one)
            self._sync_folder()
        except OSError as exc:
            raise _cannot_write(path, exc) from exc

    def _sync_folder(self) -> None:
        fd = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _head(phase: Phase) -> bytes:
    """The beginning of a record in that phase, in the order of `to_json`. It has the same length for all phases, by padding with
    white space."""
    longest = max(len(one.value) for one in Phase)
    padding = " " * (longest - len(phase.value))
    return json.dumps({"version": _VERSION, "phase": phase.value})[:-1].encode() + b"," + padding.encode()


def _unreadable(path: str, why: Exception) -> TapmanagerError:
    return internal(
        f"the network record {path} cannot be read ({why}), so the pod's network is left alone; restore the file, or remove "
        "the pod's network by hand (ip netns del, the CNI plugin's lease) and then the file"
    )


def _cannot_write(path: str, exc: OSError) -> TapmanagerError:
    kind = "exhausted" if exc.errno in (errno.ENOSPC, errno.EDQUOT) else "internal"
    return TapmanagerError(kind, f"the network record {path} cannot be written: {exc.strerror}")
