"""Reads the configuration of the node's kubelet: flags, file and drop-ins, in the same way as kubelet. Changes nothing."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import yaml

from virtshim.devices.host_files import HostFiles
from virtshim.model.errors import InvalidRequest

CONFIG_FILE: Final = "/var/lib/kubelet/config.yaml"
KUBEADM_FLAGS: Final = "/var/lib/kubelet/kubeadm-flags.env"
ENVIRONMENTS: Final = (KUBEADM_FLAGS, "/etc/default/kubelet", "/etc/sysconfig/kubelet")
EXTRA_FLAGS: Final = "KUBELET_EXTRA_ARGS"
_UNITS: Final = ("/usr/lib/systemd/system", "/etc/systemd/system")
_RUNNING: Final = "its command line"
_MAX_BYTES: Final = 1 << 20
# In the order of the command line in kubeadm's unit. If a flag occurs twice, kubelet uses the last one.
_LAST: Final = ("KUBELET_KUBEADM_ARGS", EXTRA_FLAGS)


@dataclass(frozen=True, slots=True)
class Given:
    """A value and its file."""

    value: Any
    source: str


@dataclass(frozen=True, slots=True)
class KubeletSetup:
    """kubelet's configuration. `flags`: by name without dashes. `fields`: of KubeletConfiguration, after the drop-ins.
    `unreadable`: path and reason for each file that could not be read. `variables`: environment variables of the unit.
    `takes_extra_flags`: whether the unit passes on KUBELET_EXTRA_ARGS. `is_in_cluster`: the kubeconfig that the flags name
    exists; kubelet gets it when the node joins."""

    flags: Mapping[str, Given] = field(default_factory=dict)
    fields: Mapping[str, Given] = field(default_factory=dict)
    unreadable: tuple[str, ...] = ()
    has_unit: bool = False
    variables: Mapping[str, Given] = field(default_factory=dict)
    takes_extra_flags: bool = False
    is_in_cluster: bool = False

    @property
    def is_there(self) -> bool:
        return bool(self.flags or self.fields or self.unreadable or self.has_unit)

    def given(self, flag: str, name: str) -> Given | None:
        """The value of the flag, which takes precedence, or of the field; None if kubelet's default applies."""
        return self.flags.get(flag) or self.fields.get(name)

    @property
    def cgroup_driver(self) -> Given | None:
        return self.given("cgroup-driver", "cgroupDriver")

    @property
    def endpoint(self) -> Given | None:
        return self.given("container-runtime-endpoint", "containerRuntimeEndpoint")

    @property
    def config_dir(self) -> str:
        """kubelet's directory of drop-ins; "" if it reads none."""
        return str(self.flags["config-dir"].value) if "config-dir" in self.flags else ""

    @property
    def root_dir(self) -> str:
        return str(self.flags["root-dir"].value) if "root-dir" in self.flags else "/var/lib/kubelet"


def read(files: HostFiles, *, running: bool = True) -> KubeletSetup:
    """`running`: use the flags that a running kubelet was started with, instead of those for its next start."""
    variables, words, trouble = _of_unit(files)
    flags = _flags(words)
    if running or not (flags or words):
        flags = _flags([(word, _RUNNING) for word in _command_line(files)]) or flags
    fields: dict[str, Given] = {}
    for path in _documents(files, flags):
        try:
            _lay_over(fields, _document(files, path), path)
        except InvalidRequest as exc:
            trouble.append(f"{path}: {exc}")
    extra = any(word in (f"${EXTRA_FLAGS}", f"${{{EXTRA_FLAGS}}}") for word, _ in words)
    joined = "kubeconfig" in flags and files.exists(str(flags["kubeconfig"].value))
    return KubeletSetup(flags, fields, tuple(trouble), bool(words), variables, extra, joined)


def _documents(files: HostFiles, flags: Mapping[str, Given]) -> Iterator[str]:
    named = str(flags["config"].value) if "config" in flags else ""
    if named or files.exists(CONFIG_FILE):
        yield named or CONFIG_FILE
    if "config-dir" in flags:
        directory = str(flags["config-dir"].value).rstrip("/")
        yield from (f"{directory}/{name}" for name in files.names(directory) if name.endswith(".conf"))


def _document(files: HostFiles, path: str) -> Mapping[str, Any]:
    """Raises InvalidRequest."""
    try:
        found = yaml.safe_load(files.content(path, _MAX_BYTES))
    except (yaml.YAMLError, ValueError, RecursionError) as exc:  # ValueError: not UTF-8, or a date that does not exist
        raise InvalidRequest(f"not YAML: {' '.join(str(exc).split())[:200]}") from exc
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise InvalidRequest("not a KubeletConfiguration")
    return found


def _lay_over(fields: dict[str, Given], document: Mapping[str, Any], path: str) -> None:
    """Merges a drop-in: lists are replaced, mappings are merged one level deep."""
    for name, value in document.items():
        if value is None or name in ("apiVersion", "kind"):
            continue
        below = fields[name].value if name in fields else None
        if isinstance(below, dict) and isinstance(value, dict):
            value = {**below, **value}  # noqa: PLW2901  the merged value
        fields[name] = Given(value, path)


def _of_unit(files: HostFiles) -> tuple[dict[str, Given], list[tuple[str, str]], list[str]]:
    """The unit's variables, the words of its command line with their files, and the files that could not be read."""
    variables: dict[str, Given] = {}
    command: list[tuple[str, str]] = []
    trouble: list[str] = []
    for path in (*_unit_files(files), *ENVIRONMENTS):
        if not files.exists(path):
            continue
        try:
            lines = files.content(path, _MAX_BYTES).decode(errors="replace").replace("\\\n", " ").splitlines()
        except InvalidRequest as exc:
            trouble.append(f"{path}: {exc}")
            continue
        for key, text in (line.partition("=")[::2] for line in lines):
            if path in ENVIRONMENTS and key.strip().startswith("KUBELET_"):
                variables[key.strip()] = Given(" ".join(_words(text)), path)
            elif key.strip() == "Environment":
                variables.update((name, Given(value, path)) for name, value in _assignments(text))
            elif key.strip() == "ExecStart":  # an empty ExecStart= removes the earlier ones
                command = [(word, path) for word in _words(text)]
    last = [name for name in _LAST if name in variables]
    for name in (*(name for name in variables if name not in _LAST), *last):
        command += [(word, variables[name].source) for word in _words(str(variables[name].value))]
    return variables, command, trouble


def _unit_files(files: HostFiles) -> Iterator[str]:
    yield from (f"{directory}/kubelet.service" for directory in _UNITS)
    drop_ins = {
        name: f"{directory}/kubelet.service.d/{name}"
        for directory in _UNITS
        for name in files.names(f"{directory}/kubelet.service.d")
        if name.endswith(".conf")
    }
    yield from (drop_ins[name] for name in sorted(drop_ins))


def _assignments(text: str) -> Iterator[tuple[str, str]]:
    for word in _words(text):
        name, _, value = word.partition("=")
        if name.startswith("KUBELET_"):
            yield name, value


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:  # an unclosed quote
        return text.split()


def _flags(words: list[tuple[str, str]]) -> dict[str, Given]:
    flags: dict[str, Given] = {}
    texts = [word for word, _ in words]
    for at, (word, source) in enumerate(words):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            follows = texts[at + 1] if at + 1 < len(texts) and not texts[at + 1].startswith(("-", "$")) else "true"
            flags[name] = Given(value if equals else follows, source)
    return flags


def _command_line(files: HostFiles) -> list[str]:
    """The command line of the running kubelet; [] if none runs."""
    for pid in files.names("/proc"):
        if pid.isdigit():
            words = files.text(f"/proc/{pid}/cmdline").split("\0")
            if words[0].rpartition("/")[2] == "kubelet":
                return [word for word in words[1:] if word]
    return []
