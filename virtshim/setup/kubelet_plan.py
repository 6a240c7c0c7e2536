"""Plans the changes of kubelet's configuration that make kubelet call virtshim, or its proxy. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from virtshim.neighbours.kubelet import CONFIG_FILE, ENVIRONMENTS, EXTRA_FLAGS, KubeletSetup
from virtshim.setup import texts
from virtshim.setup.changes import FilePlan, PlannedFile
from virtshim.setup.facts import AS_BYTES

CONFIG_DIR: Final = "/etc/kubernetes/kubelet.conf.d"
TAINT: Final = "virtshim.io/vms"
LABEL: Final = "virtshim.io/vms=true"
# An older kubelet does not know the flag for drop-ins.
_DROP_INS: Final = (1, 30)
_UNIT_DROP_INS: Final = "/etc/systemd/system/kubelet.service.d"
_ALONE, _WITH_RUNTIME = "90-virtshim.conf", "91-virtshim-proxy.conf"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What kubelet's configuration must say. `why`: the reason for the cgroup driver. `with_runtime`: containers run beside VMs.
    `version`: kubelet's version, None if unknown."""

    socket: str
    driver: str
    why: str
    with_runtime: bool
    version: tuple[int, int] | None = None

    @property
    def reads_drop_ins(self) -> bool:
        return self.version is None or self.version >= _DROP_INS


def plan(kubelet: KubeletSetup, wanted: Wanted, file_texts: Mapping[str, str]) -> FilePlan:
    """The plan; empty if there is no kubelet. `file_texts`: texts of the files that may hold kubelet's extra flags."""
    if not kubelet.is_there:
        return FilePlan()
    name = _WITH_RUNTIME if wanted.with_runtime else _ALONE
    why = f"{wanted.why[:1].upper()}{wanted.why[1:]}."
    text = texts.kubelet_drop_in(
        wanted.socket,
        wanted.driver,
        why,
        taint=not wanted.with_runtime,
        pulls=not _is_said(kubelet, texts.PULLS),
        eviction=not _is_said(kubelet, texts.EVICTION),
    )
    directory = kubelet.config_dir or CONFIG_DIR
    files, problems = [], []
    if wanted.reads_drop_ins:
        files.append(PlannedFile(f"{directory.rstrip('/')}/{name}", text.encode(), "kubelet calls this socket"))
    elif wanted.version and (missing := _unsaid(kubelet, wanted)):
        release = ".".join(str(part) for part in wanted.version)
        problems.append(f"kubelet {release} does not read drop-ins; write {', '.join(missing)} into {CONFIG_FILE}")
    unit = "virtshim-proxy" if wanted.with_runtime else "virtshim"
    if kubelet.has_unit:
        order = f"{_UNIT_DROP_INS}/{unit}.conf"
        files.append(
            PlannedFile(order, texts.kubelet_order(f"{unit}.service").encode(), "kubelet starts after this service")
        )
    flags = _flags(kubelet, wanted)
    if flags and kubelet.takes_extra_flags:
        files.append(_flags_file(kubelet, flags, file_texts))
    elif flags:
        problems.append(
            f"kubelet's unit does not use {EXTRA_FLAGS}; start kubelet with {' '.join(flags)}, or it will not call virtshim"
        )
    return FilePlan(tuple(files), tuple(problems))


def of_vms_only(paths: Collection[str]) -> bool:
    """Whether setup wrote these files for a node that runs only VMs, and so has the taint."""
    return any(path.endswith(f"/{_ALONE}") or path == f"{_UNIT_DROP_INS}/virtshim.conf" for path in paths)


def _is_said(kubelet: KubeletSetup, text: str) -> bool:
    """Whether the operator has set one of these fields. Drop-ins that setup wrote do not count."""
    given = [kubelet.given(re.sub("([A-Z])", r"-\1", name).lower(), name) for name in texts.fields_of(text)]
    return any(one is not None and not one.source.endswith((f"/{_ALONE}", f"/{_WITH_RUNTIME}")) for one in given)


def _unsaid(kubelet: KubeletSetup, wanted: Wanted) -> list[str]:
    """Required settings that exist only as fields, not as flags."""
    fields = {"shutdownGracePeriod": "2m", "shutdownGracePeriodCriticalPods": "30s"}
    missing = [f"{name}: {value}" for name, value in fields.items() if name not in kubelet.fields]
    taints = kubelet.given("register-with-taints", "registerWithTaints")
    if not wanted.with_runtime and (taints is None or TAINT not in str(taints.value)):
        missing.append(f"the taint {TAINT}=true:NoSchedule (registerWithTaints)")
    return missing


def _flags(kubelet: KubeletSetup, wanted: Wanted) -> list[str]:
    """The flags that kubelet needs in addition to the drop-in, or instead of it. Flags take precedence over files."""
    flags = [] if kubelet.config_dir or not wanted.reads_drop_ins else [f"--config-dir={CONFIG_DIR}"]
    if "container-runtime-endpoint" in kubelet.flags or not wanted.reads_drop_ins:
        flags.append(f"--container-runtime-endpoint=unix://{wanted.socket}")
    said = kubelet.flags.get("cgroup-driver")
    if (said and said.value != wanted.driver) or (not wanted.reads_drop_ins and kubelet.cgroup_driver is None):
        flags.append(f"--cgroup-driver={wanted.driver}")
    if not wanted.reads_drop_ins:
        flags.append("--runtime-request-timeout=4m")
    if flags:
        labels = str(kubelet.flags["node-labels"].value) if "node-labels" in kubelet.flags else ""
        flags.append(f"--node-labels={','.join(part for part in (labels, LABEL) if part)}")
    return flags


def _flags_file(kubelet: KubeletSetup, flags: list[str], file_texts: Mapping[str, str]) -> PlannedFile:
    """The file that holds the extra flags, or a new drop-in of kubelet's unit if no file does."""
    given = kubelet.variables.get(EXTRA_FLAGS)
    words = " ".join([*([str(given.value)] if given and given.value else []), *flags])
    if given and given.source in ENVIRONMENTS:
        # A value may continue on the next line.
        lines = file_texts.get(given.source, "").replace("\\\n", " ").split("\n")
        others = [line for line in lines if line.partition("=")[0].strip() != EXTRA_FLAGS]
        text = "\n".join([*others, texts.MARK.rstrip(), f'{EXTRA_FLAGS}="{_quoted(words)}"', ""])
        return PlannedFile(given.source, text.encode(errors=AS_BYTES), "kubelet's flags, with virtshim's at the end")
    text = f'{texts.MARK}[Service]\nEnvironment="{EXTRA_FLAGS}={_quoted(words)}"\n'
    return PlannedFile(f"{_UNIT_DROP_INS}/zz-virtshim-flags.conf", text.encode(), "kubelet reads its drop-ins")


def _quoted(words: str) -> str:
    """Escapes the words for use within double quotes in a unit or environment file."""
    return words.replace("\\", "\\\\").replace('"', '\\"')
