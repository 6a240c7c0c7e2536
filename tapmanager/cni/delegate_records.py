"""Reads the records of a meta plugin about the networks that it attached to a pod.

Multus runs the plugins of several networks in one namespace, but returns only the first network's result. It runs them through
libcni, which keeps the file `<cniDir>/results/<network>-<container id>-<interface>` from ADD to DEL. The file holds the
result and the configuration, in which Multus has stored the device that kubelet granted (`deviceID`).

Only root can write the files. A pod's author may have chosen some values: the interface's name, which is checked, and addresses.
They affect only the author's own pod. `capabilityArgs`, which may hold a `deviceID` from an annotation, are not read.
"""

from __future__ import annotations

import base64
import binascii
import json
import logging
import os
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tapmanager.cni.conf import NetworkConf
from tapmanager.cni.result import CniResult, parse_result
from tapmanager.fields import BadField, Json, as_object, objects, text
from tapmanager.network_values import link_name

log = logging.getLogger(__name__)

# Multus's default. The client of its daemon (multus-shim) gets no `cniDir`, and the daemon uses this path on the host.
_MULTUS_DIR = "/var/lib/cni/multus"
_KIND = "cniCacheV1"
# Most bytes of a record. A result and a configuration have a few thousand.
_MAX_BYTES = 1 << 20
# Most records of one pod: more networks than a machine has slots for cards.
_MAX_RECORDS = 64


@dataclass(frozen=True, slots=True)
class Delegate:
    """One network of a pod. `interface`: the name that its plugin got. `device`: the device in its configuration, under the
    device plugin's name (mostly a PCI address), "" for none. `kinds`: its chain of plugins."""

    network: str
    interface: str
    result: CniResult
    device: str = ""
    kinds: tuple[str, ...] = ()


def read(conf: NetworkConf, sandbox: str) -> tuple[Delegate, ...]:
    """The records of the plugins of `conf` about the sandbox (a checked id), by interface. An unusable record is logged and
    skipped, because the kernel knows most of its content too, and other pods' networks must not depend on one file."""
    found: dict[str, Delegate] = {}
    for folder in dict.fromkeys(filter(None, map(_directory, conf.plugins))):
        for name in _names(folder, sandbox):
            try:
                delegate = parse(_content(os.path.join(folder, name)), name, sandbox)
            except (OSError, BadField) as exc:
                log.warning("record.not_used sandbox=%s file=%s error=%s", sandbox, os.path.join(folder, name), exc)
                continue
            first = found.setdefault(delegate.interface, delegate)
            if first.network != delegate.network:
                log.warning(
                    "record.not_used sandbox=%s file=%s error=interface %s also belongs to network %s",
                    *(sandbox, os.path.join(folder, name), delegate.interface, first.network),
                )
    return tuple(found.values())


def kinds(conf: NetworkConf, sandbox: str) -> frozenset[str]:
    """The plugins that work in the sandbox's namespace: the plugins of `conf`, and the plugins that a meta plugin runs
    for it."""
    delegates = read(conf, sandbox)
    if not delegates:
        return frozenset(conf.types())
    own = {str(plugin["type"]) for plugin in conf.plugins if not _directory(plugin)}
    return frozenset(own | {kind for delegate in delegates for kind in delegate.kinds})


def _directory(plugin: Json) -> str:
    """The directory of the plugin's records; "" if it keeps none."""
    folder = plugin.get("cniDir")
    if isinstance(folder, str) and folder.startswith("/") and "\0" not in folder:
        return os.path.join(folder, "results")
    return os.path.join(_MULTUS_DIR, "results") if str(plugin["type"]).startswith("multus") else ""


def _names(folder: str, sandbox: str) -> Sequence[str]:
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if f"-{sandbox}-" in entry.name]
    except FileNotFoundError:
        return []
    except OSError as exc:
        log.warning("records.not_read sandbox=%s directory=%s error=%s", sandbox, folder, exc)
        return []
    if len(names) > _MAX_RECORDS:
        log.warning("records.too_many sandbox=%s directory=%s count=%d", sandbox, folder, len(names))
    return sorted(names)[:_MAX_RECORDS]


def _content(path: str) -> bytes:
    """The content of a regular file that only root can write; not a link. Raises OSError, BadField."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise BadField("not a regular file")
        if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise BadField("writable by users other than root")
        data = file.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise BadField(f"more than {_MAX_BYTES} bytes")
    return data


def parse(data: bytes, name: str, sandbox: str) -> Delegate:
    """`name`: the file's name, which must match the content. Raises BadField."""
    raw = as_object(_json(data, "record"), "record")
    kind = text(raw, "kind", "record", "")
    if kind != _KIND:
        raise BadField(f"record.kind: {kind[:40]!r}, must be {_KIND}")
    network, interface = text(raw, "networkName", "record"), link_name(text(raw, "ifName", "record"), "record.ifName")
    if text(raw, "containerId", "record") != sandbox or name != f"{network}-{sandbox}-{interface}":
        raise BadField("record: the attachment does not match the file's name")
    plugins = _plugins(text(raw, "config", "record", ""))
    result = {} if raw.get("result") is None else as_object(raw["result"], "record.result")
    return Delegate(
        network=network,
        interface=interface,
        result=parse_result(_whole(result)),
        device=next((device for device in map(_device, plugins) if device), ""),
        kinds=tuple(text(plugin, "type", "record.config", "") for plugin in plugins),
    )


def _whole(result: Json) -> Json:
    """Completes the result of the plugin host-device. For a device at VFIO the result names no interface, but its
    addresses refer to the first interface."""
    if result.get("interfaces") or not result.get("ips"):
        return result
    ips = [{key: value for key, value in ip.items() if key != "interface"} for ip in objects(result, "ips", "result")]
    return {**result, "ips": ips}


def _plugins(config: str) -> Sequence[Json]:
    """The plugins in the delegate's configuration, which is one plugin or a chain. Go encodes bytes as base64."""
    try:
        decoded = base64.b64decode(config, validate=True)
    except (binascii.Error, ValueError) as exc:
        raise BadField("record.config: not base64") from exc
    if not decoded:
        return ()
    conf = as_object(_json(decoded, "record.config"), "record.config")
    return objects(conf, "plugins", "record.config") if "plugins" in conf else (conf,)


def _device(plugin: Json) -> str:
    """`deviceID` is the key that Multus and the device plugin specification use; `pciBusID` is the older key."""
    names: Iterable[str] = (text(plugin, name, "record.config", "") for name in ("deviceID", "pciBusID"))
    return next((name.lower() for name in names if name), "")


def _json(data: bytes, where: str) -> object:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as exc:
        raise BadField(f"{where}: not JSON: {exc}") from exc
