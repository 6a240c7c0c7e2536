"""`virtshim diag DIR` collects diagnostic data of a node into one file, without secrets."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Final

from rich.console import Console

from virtshim.cli.diag import daemons, machine, records, vms
from virtshim.cli.diag.gather import LIMIT, Collector, Gathered, Node, Room, gather, write_archive
from virtshim.cli.diag.machine import network, network_namespaces
from virtshim.cli.diag.secrets import Secrets
from virtshim.config import settings as settings_table
from virtshim.model.errors import InvalidRequest, PermissionRefused, ShimError

COLLECTORS: Final[Mapping[str, Collector]] = {
    "versions": machine.versions,
    "settings": records.settings,
    "check": daemons.check,
    "cri": daemons.cri,
    "store": records.store,
    "domains": vms.domains,
    "libvirt": vms.libvirt,
    "cni": records.cni,
    "network": network,
    "namespaces": network_namespaces,
    "threads": daemons.threads,
    "logs": daemons.logs,
    "processes": machine.processes,
    "cgroups": machine.cgroups,
    "mounts": machine.mounts,
    "disks": machine.disks,
    "devices": machine.devices,
}


@dataclass(frozen=True, slots=True)
class Part:
    """One collector in the summary. `trouble`: why its files are incomplete; "" if they are complete."""

    files: int
    bytes: int
    seconds: float
    trouble: str


@dataclass(frozen=True, slots=True)
class Summary:
    """`secrets`: why the archive may still hold secrets; "" if there is no known reason."""

    version: str
    host: str
    taken_at: str
    secrets: str
    parts: Mapping[str, Part]


def diag_command(
    directory: str,
    config: str | None,
    node_directory: str | None,
    *,
    as_json: bool,
    collectors: Mapping[str, Collector] = COLLECTORS,
    limit: float = LIMIT,
    room: Room = Room(),
) -> int:
    """Returns 0 even if some parts could not be collected; their files say why. Raises ShimError if no archive could be
    written."""
    if os.geteuid() != 0:
        raise PermissionRefused("only root can read the data of a node; run this command with sudo")
    if not directory:
        raise InvalidRequest("DIR is empty; name a directory for the archive")
    console = Console(stderr=True, highlight=False, soft_wrap=True, quiet=as_json)
    node = look_at(config, node_directory)
    console.print(f"diag: collecting data of the node; this may take {limit:g} s")
    found = gather(collectors, node, limit, room)
    now = int(time.time())
    summary = _summary(found, now, node.secrets.trouble)
    files = {path: node.secrets.cleaned(text) for path, text in _files(found, summary).items()}
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now))
    path = write_archive(os.path.abspath(directory), f"virtshim-diag-{summary.host}-{stamp}", files, now)
    for name, part in summary.parts.items():
        if part.trouble:
            console.print(f"diag: {name}: {node.secrets.cleaned(part.trouble)}", markup=False)
    if summary.secrets:
        console.print(f"diag: {summary.secrets}")
    if as_json:
        print(
            node.secrets.cleaned(
                json.dumps({"archive": path, "bytes": os.path.getsize(path), **asdict(summary)}, indent=2)
            )
        )
    else:
        console.print("diag: all secrets that could be recognized were removed; read the archive before you share it")
        print(path)
    return 0


def look_at(config: str | None, node_directory: str | None) -> Node:
    """The node to examine. If its settings cannot be read, the defaults are used and the fault is reported. Raises
    InvalidRequest."""
    if config is not None and node_directory is not None:
        raise InvalidRequest("--dir and --config exclude each other; --dir reads the settings from DIR/config.toml")
    directory = os.path.realpath(node_directory) if node_directory else ""
    if directory and not os.path.isdir(directory):
        raise InvalidRequest(f"--dir: {directory} does not exist; name the directory of `up --dir`")
    if not directory and config is None:
        directory = _directory_of(os.environ.get("CONTAINER_RUNTIME_ENDPOINT", ""))
    file = f"{directory}/config.toml" if directory else config and os.path.abspath(config)
    trouble = ""
    try:
        settings = settings_table.load_settings(file)
    except ShimError as exc:
        settings, trouble = _defaults(directory), str(exc)
    return Node(settings, file or settings_table.DEFAULT_FILE, Secrets(), directory, trouble)


def _directory_of(endpoint: str) -> str:
    """The directory of `up --dir` whose CRI socket that is, "" for the node of the default settings. Raises InvalidRequest for
    another node's: its settings are not known."""
    socket = endpoint.removeprefix("unix://")
    directory = os.path.dirname(os.path.dirname(socket))
    if not socket:
        return ""
    if os.path.isfile(f"{directory}/config.toml"):
        return os.path.realpath(directory)
    try:
        own = settings_table.load_settings(None).cri_socket
    except ShimError:  # the archive says so
        return ""
    if socket != own:
        raise InvalidRequest(
            f"CONTAINER_RUNTIME_ENDPOINT names {socket[:200]}, which is not the socket in this node's settings; name that "
            "node's settings by --config or --dir, or unset the variable"
        )
    return ""


def _defaults(directory: str) -> settings_table.Settings:
    """The default settings of a node in `directory`."""
    if not directory:
        return settings_table.Settings.model_construct()
    return settings_table.Settings.model_construct(
        paths=settings_table.Paths(state_dir=f"{directory}/state", run_dir=f"{directory}/run"),
        libvirt=settings_table.Libvirt(uri=f"qemu:///embed?root={directory}/libvirt"),
        tapmanager=settings_table.Tapmanager(
            socket=f"{directory}/run/tapmanager.sock",
            state_dir=f"{directory}/state/tapmanager",
            cni_conf_dir=f"{directory}/cni/net.d",
        ),
        shares=settings_table.Shares(socket=f"{directory}/run/shares.sock"),
    )


def _summary(found: Sequence[Gathered], now: int, secrets: str) -> Summary:
    parts = {
        one.name: Part(len(one.files), sum(map(len, one.files.values())), round(one.seconds, 2), one.trouble)
        for one in found
    }
    host = re.sub(r"[^A-Za-z0-9.-]", "-", os.uname().nodename) or "node"
    return Summary(
        metadata.version("virtshim"), host, time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now)), secrets, parts
    )


def _files(found: Sequence[Gathered], summary: Summary) -> dict[str, str]:
    files = {"summary.json": json.dumps(asdict(summary), indent=2) + "\n"}
    for one in found:
        if one.trouble:
            files[f"{one.name}/error.txt"] = f"{one.trouble}\n"
        files |= {f"{one.name}/{path.lstrip('/')}": text for path, text in one.files.items()}
    return files
