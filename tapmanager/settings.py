"""tapmanager's settings: the `[tapmanager]` table of a TOML file and its drop-ins. Flags take precedence. One field per
setting."""

from __future__ import annotations

import argparse
import dataclasses
import grp
import pwd
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tapmanager import toml_files
from tapmanager.errors import invalid
from tapmanager.pod import FILTERS, WITH_IP
from tapmanager.toml_files import Layers

_QEMU_USERS = ("libvirt-qemu", "qemu")
_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True)
class Settings:
    """Timeouts are in seconds. Each field is a key of the file and a flag."""

    socket: str = field(default="/run/virtshim/tapmanager.sock", metadata={"help": "socket to serve"})
    state_dir: str = field(default="/var/lib/virtshim/tapmanager", metadata={"help": "records of attached pods"})
    netns_dir: str = field(default="/run/netns", metadata={"help": "directory of the names of network namespaces"})
    cni_conf_dir: str = field(
        default="/etc/cni/net.d",
        metadata={"help": "directory of the CNI configuration; the first file by name is used"},
    )
    cni_bin_dir: tuple[str, ...] = field(
        default=("/opt/cni/bin", "/usr/lib/cni", "/usr/libexec/cni"),
        metadata={"help": "directory of CNI plugins, may be repeated; the first match wins"},
    )
    qemu_user: str = field(
        default="", metadata={"help": f"user or uid that QEMU runs as; default: {' or '.join(_QEMU_USERS)}"}
    )
    qemu_group: str = field(
        default="", metadata={"help": "group of the VMs' users, who may connect; default: the group of qemu_user"}
    )
    cni_timeout: float = field(default=90.0, metadata={"help": "longest run time of one CNI plugin, seconds"})
    undo_timeout: float = field(
        default=30.0, metadata={"help": "longest time for the clean-up after a failed attach, seconds"}
    )
    filter: str = field(
        default=WITH_IP,
        metadata={"help": "which sender addresses VMs cannot forge: off, mac or mac+ip", "choices": FILTERS},
    )
    filter_by_pod: bool = field(
        default=False, metadata={"help": "whether a pod's annotation may weaken the filter, true or false"}
    )
    vhost_net: bool = field(
        default=True,
        metadata={"help": "whether the kernel transfers guests' frames if /dev/vhost-net works, true or false"},
    )
    cni_gc: bool = field(
        default=False,
        metadata={"help": "at start, free CNI resources of unknown pods; only if the node has no other runtime"},
    )
    log_level: str = field(default="info", metadata={"help": "debug, info, warning or error", "choices": _LEVELS})


@dataclass(frozen=True, slots=True)
class QemuUser:
    """`uid`: None if this machine has no QEMU user; then only root is served."""

    uid: int | None
    gid: int


# The settings that SIGHUP changes in a running tapmanager. All others need a restart.
RELOADED = ("cni_timeout", "undo_timeout", "filter", "filter_by_pod", "vhost_net", "log_level")


def load(argv: Sequence[str]) -> Settings:
    """Raises TapmanagerError (invalid) with all problems at once; argparse ends the process for --help and unknown flags."""
    given = vars(_parser().parse_args(argv))
    config = given.pop("config")
    layers = toml_files.read(config, must_be_there=config != toml_files.DEFAULT_FILE) if config else Layers()
    values, problems = toml_files.table_of(layers, "tapmanager", [one.name for one in dataclasses.fields(Settings)])
    flags = {name: value for name, value in given.items() if value is not None}
    checked = {}
    for name, value in (values | flags).items():
        found: list[str] = []
        checked[name] = _checked(name, value, found)
        place = "--" + name.replace("_", "-") if name in flags else layers.place(("tapmanager", name))
        problems += [f"{place}: tapmanager.{problem}" for problem in found]
    if problems:
        raise toml_files.bad_configuration(problems)
    return Settings(**checked)  # type: ignore[arg-type]  # _checked has looked at each


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "tapmanager", description="Manages the network of every pod: namespaces, CNI, taps, DHCP."
    )
    parser.add_argument(
        "--config", metavar="FILE", help="TOML file with a [tapmanager] table; FILE.d/*.toml are its drop-ins"
    )
    for one in dataclasses.fields(Settings):
        flag = "--" + one.name.replace("_", "-")
        text = f"{one.metadata['help']} (default: {one.default})"
        kind: Callable[[str], object] = str
        if isinstance(one.default, bool | float):
            kind = _switch if isinstance(one.default, bool) else float
        action = "append" if isinstance(one.default, tuple) else "store"
        parser.add_argument(flag, dest=one.name, type=kind, action=action, help=text, metavar="VALUE")
    return parser


def _switch(text: str) -> bool:
    if text not in ("true", "false"):
        raise argparse.ArgumentTypeError("must be true or false")
    return text == "true"


def _checked(name: str, value: object, problems: list[str]) -> object:
    one = next(one for one in dataclasses.fields(Settings) if one.name == name)
    try:
        return _as(one, value)
    except ValueError as exc:
        problems.append(f"{name}: must be {exc}")
    return None


def _as(one: dataclasses.Field[Any], value: object) -> object:
    """Raises ValueError, which says what the value must be."""
    if choices := one.metadata.get("choices"):
        return _required(value in choices, value, f"{', '.join(choices[:-1])} or {choices[-1]}")
    if isinstance(one.default, tuple):
        items = [value] if isinstance(value, str) else value
        paths = isinstance(items, list) and all(isinstance(item, str) and item.startswith("/") for item in items)
        return tuple(_required(bool(items) and paths, items, "absolute paths"))
    if isinstance(one.default, bool):
        return _required(isinstance(value, bool), value, "true or false")
    if isinstance(one.default, float):
        in_range = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 3600
        return float(_required(in_range, value, "seconds, more than 0 and at most 3600"))
    if one.name in ("qemu_user", "qemu_group"):
        return str(_required(isinstance(value, str | int), value, "a name or number"))
    return _required(isinstance(value, str) and value.startswith("/"), value, "an absolute path")


def _required(is_so: bool, value: Any, what: str) -> Any:
    if not is_so:
        raise ValueError(what)
    return value


def qemu_user(name: str, group: str = "") -> QemuUser:
    """Looks up the user by name or uid; "" tries the usual names. `group`: name or gid to use instead of the user's own group.
    Raises TapmanagerError for an unknown name."""
    found = _user(name)
    return QemuUser(found.uid, _gid(group)) if group else found


def _user(name: str) -> QemuUser:
    if not name:
        found = [entry for entry in map(_lookup, _QEMU_USERS) if entry is not None]
        return QemuUser(found[0].pw_uid, found[0].pw_gid) if found else QemuUser(None, 0)
    entry = _lookup(name)
    if entry is not None:
        return QemuUser(entry.pw_uid, entry.pw_gid)
    if name.isdecimal():
        return QemuUser(int(name), 0)
    raise invalid(f"qemu_user: the user {name!r} does not exist; install libvirt, or set the user of its qemu.conf")


def _gid(name: str) -> int:
    try:
        return int(name) if name.isdecimal() else grp.getgrnam(name).gr_gid
    except KeyError as exc:
        raise invalid(
            f"qemu_group: the group {name!r} does not exist; set the same group as libvirt.qemu_group"
        ) from exc


def _lookup(name: str) -> pwd.struct_passwd | None:
    try:
        return pwd.getpwuid(int(name)) if name.isdecimal() else pwd.getpwnam(name)
    except (KeyError, OverflowError):
        return None
