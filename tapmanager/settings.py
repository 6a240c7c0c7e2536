"""tapmanager's settings: the `[tapmanager]` table of a TOML file and its drop-ins. Flags take precedence. One field per
setting. virtshim's table of all settings takes them from here (`virtshim.config.node.Tapmanager`)."""

from __future__ import annotations

import dataclasses
import grp
import pwd
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tapmanager import toml_files
from tapmanager.errors import invalid
from tapmanager.network_values import FILTERS, WITH_IP
from tapmanager.toml_files import Layers

if TYPE_CHECKING:
    import argparse

_QEMU_USERS = ("libvirt-qemu", "qemu")
_LEVELS = ("debug", "info", "warning", "error")
MOST_SECONDS = 3600


def _setting(
    default: Any,
    meaning: str,
    *,
    why: str,
    allowed: str = "",
    choices: tuple[str, ...] = (),
    unit: str = "",
    reload: bool = False,
) -> Any:
    """`why`: the reason for the default. `allowed`: the allowed values in words. `choices`: the allowed values, if there are few.
    `reload`: whether SIGHUP changes the setting in a running tapmanager; all others need a restart."""
    about = {"meaning": meaning, "why": why, "allowed": allowed, "unit": unit, "reload": reload}
    return field(default=default, metadata={"about": about, "choices": choices})


@dataclass(frozen=True, slots=True)
class Settings:
    """Each field is a key of the file and a flag."""

    socket: str = _setting(
        "/run/virtshim/tapmanager.sock", "tapmanager's socket", why="beside the other sockets, in paths.run_dir"
    )
    state_dir: str = _setting(
        "/var/lib/virtshim/tapmanager",
        "directory of the records of attached pods",
        why="must survive a reboot, because CNI's DEL needs the parameters of ADD",
    )
    netns_dir: str = _setting(
        "/run/netns",
        "directory of the names of network namespaces",
        why="`ip netns` looks in this directory, so people find the namespaces",
    )
    cni_conf_dir: str = _setting(
        "/etc/cni/net.d",
        "directory of the CNI configuration; the first file by name is used",
        why="network add-ons put it there",
    )
    cni_bin_dir: tuple[str, ...] = _setting(
        ("/opt/cni/bin", "/usr/lib/cni", "/usr/libexec/cni"),
        "directories of CNI plugins; the first match wins",
        allowed="absolute paths, at least one",
        why="add-ons, Debian and Fedora put them there",
    )
    qemu_user: str = _setting(
        "",
        "user or uid that QEMU runs as; default: the distribution's user for QEMU",
        allowed="name or number",
        why=f"{' or '.join(_QEMU_USERS)}, whichever exists",
    )
    qemu_group: str = _setting(
        "",
        "group or gid of the VMs' users, as in `libvirt.qemu_group`; default: the group of `qemu_user`",
        allowed="name or number",
        why="the group that /dev/kvm belongs to",
    )
    cni_timeout: float = _setting(
        90.0,
        "longest run time of one CNI plugin",
        unit="s",
        reload=True,
        why="below kubelet's limit of four minutes for RunPodSandbox",
    )
    undo_timeout: float = _setting(
        30.0,
        "longest time for the clean-up after a failed attach",
        unit="s",
        reload=True,
        why="the caller waits for the clean-up; the removal of the pod removes the rest",
    )
    filter: str = _setting(
        WITH_IP,
        "which sender addresses VMs cannot forge, if CNI assigned addresses",
        choices=FILTERS,
        reload=True,
        why="as for a container without NET_RAW; see [network.md](network.md#forged-senders). A change applies to new pods",
    )
    filter_by_pod: bool = _setting(
        False,
        "whether a pod's annotation may weaken the filter",
        reload=True,
        why="pods' authors are not trusted",
    )
    vhost_net: bool = _setting(
        True,
        "whether the kernel transfers guests' frames (vhost-net), if /dev/vhost-net works",
        reload=True,
        why="QEMU need not wake up for each frame; false keeps guests away from that part of the kernel. A change applies to "
        "VMs that start later",
    )
    cni_gc: bool = _setting(
        False,
        "at start, free CNI resources of pods that tapmanager does not know",
        why="true also frees the leases of other runtimes' pods on the network: [network.md](network.md#status-gc-and-check)",
    )
    log_level: str = _setting(
        "info",
        "lowest level that is logged",
        choices=_LEVELS,
        reload=True,
        why="one line for each pod that is attached or detached",
    )


RELOADED = tuple(one.name for one in dataclasses.fields(Settings) if one.metadata["about"]["reload"])


@dataclass(frozen=True, slots=True)
class QemuUser:
    """`uid`: None if this machine has no QEMU user; then only root is served."""

    uid: int | None
    gid: int


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
    import argparse  # loaded late, because virtshim's daemons load this module, and have no such flags

    parser = argparse.ArgumentParser(
        "tapmanager", description="Manages the network of every pod: namespaces, CNI, taps, DHCP."
    )
    parser.add_argument(
        "--config", metavar="FILE", help="TOML file with a [tapmanager] table; FILE.d/*.toml are its drop-ins"
    )
    kinds: dict[type, Callable[[str], object]] = {bool: _switch, float: float}
    for one in dataclasses.fields(Settings):
        flag = "--" + one.name.replace("_", "-")
        kind = kinds.get(type(one.default), str)
        action = "append" if isinstance(one.default, tuple) else "store"
        parser.add_argument(flag, dest=one.name, type=kind, action=action, help=_help(one), metavar="VALUE")
    return parser


def _help(one: dataclasses.Field[Any]) -> str:
    text, unit = one.metadata["about"]["meaning"], one.metadata["about"]["unit"]
    if choices := one.metadata["choices"] or (("true", "false") if isinstance(one.default, bool) else ()):
        text += f": {_listed(choices)}"
    if isinstance(one.default, tuple):
        text += "; the flag may be repeated"
    return text if one.default == "" else f"{text} (default: {f'{one.default} {unit}'.rstrip()})"


def _listed(choices: Sequence[str]) -> str:
    return f"{', '.join(choices[:-1])} or {choices[-1]}"


def _switch(text: str) -> bool:
    import argparse

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
    if choices := one.metadata["choices"]:
        return _required(value in choices, value, _listed(choices))
    if isinstance(one.default, tuple):
        items = [value] if isinstance(value, str) else value
        paths = isinstance(items, list) and all(isinstance(item, str) and item.startswith("/") for item in items)
        return tuple(_required(bool(items) and paths, items, "absolute paths"))
    if isinstance(one.default, bool):
        return _required(isinstance(value, bool), value, "true or false")
    if isinstance(one.default, float):
        in_range = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= MOST_SECONDS
        return float(_required(in_range, value, f"seconds, more than 0 and at most {MOST_SECONDS}"))
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
