"""Settings: the `[tapmanager]` table of a TOML file, with drop-ins, and flags over it. One record a setting."""

from __future__ import annotations

import argparse
import dataclasses
import glob
import grp
import pwd
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tapmanager.errors import invalid

_QEMU_USERS = ("libvirt-qemu", "qemu")


@dataclass(frozen=True, slots=True)
class Settings:
    """Timeouts are in seconds. Each field is a key of the file and a flag."""

    socket: str = field(default="/run/virtshim/tapmanager.sock", metadata={"help": "socket to serve"})
    state_dir: str = field(default="/var/lib/virtshim/tapmanager", metadata={"help": "records of attached pods"})
    netns_dir: str = field(default="/run/netns", metadata={"help": "where network namespaces get their names"})
    cni_conf_dir: str = field(default="/etc/cni/net.d", metadata={"help": "CNI configs; the first by name is used"})
    cni_bin_dir: tuple[str, ...] = field(
        default=("/opt/cni/bin", "/usr/lib/cni", "/usr/libexec/cni"),
        metadata={"help": "CNI plugins, first match wins; may be given more than once"},
    )
    qemu_user: str = field(
        default="", metadata={"help": f"user or uid that QEMU runs as; default: {' or '.join(_QEMU_USERS)}"}
    )
    qemu_group: str = field(
        default="", metadata={"help": "group of VMs' users, which may ask; default: that of qemu_user"}
    )
    cni_timeout: float = field(default=90.0, metadata={"help": "longest run of one CNI plugin, seconds"})
    undo_timeout: float = field(default=30.0, metadata={"help": "longest clean-up after a failed attach, seconds"})
    log_level: str = field(default="info", metadata={"help": "debug, info, warning or error"})


@dataclass(frozen=True, slots=True)
class QemuUser:
    """`uid` None: this machine has no QEMU user, only root will be served."""

    uid: int | None
    gid: int


def load(argv: Sequence[str]) -> Settings:
    """Raises TapmanagerError (invalid) with all problems at once; argparse ends the process for --help and unknown flags."""
    given = vars(_parser().parse_args(argv))
    values: dict[str, object] = {}
    problems: list[str] = []
    config = given.pop("config")
    for path in [config, *sorted(glob.glob(f"{glob.escape(config)}.d/*.toml"))] if config else []:
        _merge(path, values, problems)
    values |= {name: value for name, value in given.items() if value is not None}
    checked = {name: _checked(name, value, problems) for name, value in values.items()}
    if problems:
        raise invalid("; ".join(problems))
    return Settings(**checked)  # type: ignore[arg-type]  # _checked has looked at each


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "tapmanager", description="Owns the network of every pod: namespaces, CNI, taps, DHCP."
    )
    parser.add_argument(
        "--config", metavar="FILE", help="TOML file; its [tapmanager] table is read, then FILE.d/*.toml"
    )
    for one in dataclasses.fields(Settings):
        flag = "--" + one.name.replace("_", "-")
        text = f"{one.metadata['help']} (default: {one.default})"
        kind = float if isinstance(one.default, float) else str
        action = "append" if isinstance(one.default, tuple) else "store"
        parser.add_argument(flag, dest=one.name, type=kind, action=action, help=text, metavar="VALUE")
    return parser


def _merge(path: str, values: dict[str, object], problems: list[str]) -> None:
    try:
        with open(path, "rb") as file:
            table = tomllib.load(file).get("tapmanager", {})
    except (OSError, ValueError) as exc:
        problems.append(f"{path}: {exc}")
        return
    if not isinstance(table, Mapping):
        problems.append(f"{path}: tapmanager must be a table")
        return
    names = {one.name for one in dataclasses.fields(Settings)}
    known = ", ".join(sorted(names))
    problems += [f"{path}: unknown setting tapmanager.{key}; known are {known}" for key in table if key not in names]
    values |= {key: value for key, value in table.items() if key in names}


def _checked(name: str, value: object, problems: list[str]) -> object:
    default = next(one.default for one in dataclasses.fields(Settings) if one.name == name)
    if isinstance(default, tuple):
        items = [value] if isinstance(value, str) else value
        if isinstance(items, list) and items and all(isinstance(item, str) and item.startswith("/") for item in items):
            return tuple(items)
        problems.append(f"{name}: must be absolute paths")
    elif isinstance(default, float):
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 3600:
            return float(value)
        problems.append(f"{name}: must be seconds, more than 0 and at most 3600")
    elif name == "log_level":
        if value in ("debug", "info", "warning", "error"):
            return value
        problems.append("log_level: must be debug, info, warning or error")
    elif name in ("qemu_user", "qemu_group"):
        if isinstance(value, str | int):
            return str(value)
        problems.append(f"{name}: must be a name or number")
    elif isinstance(value, str) and value.startswith("/"):
        return value
    else:
        problems.append(f"{name}: must be an absolute path")
    return None


def qemu_user(name: str, group: str = "") -> QemuUser:
    """By name or uid; "" looks for the usual ones. `group`: not the user's own, but this one, by name or gid. Raises
    TapmanagerError for a name that is not there."""
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
    raise invalid(f"qemu_user: there is no user {name!r}; install libvirt, or name the user of its qemu.conf")


def _gid(name: str) -> int:
    try:
        return int(name) if name.isdecimal() else grp.getgrnam(name).gr_gid
    except KeyError as exc:
        raise invalid(f"qemu_group: there is no group {name!r}; name that of libvirt.qemu_group") from exc


def _lookup(name: str) -> pwd.struct_passwd | None:
    try:
        return pwd.getpwuid(int(name)) if name.isdecimal() else pwd.getpwnam(name)
    except (KeyError, OverflowError):
        return None
