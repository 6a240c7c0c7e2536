"""Plans what setup writes on a node with given facts, and the steps that remain for the operator. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from virtshim.config.settings import DEFAULT_FILE, Settings
from virtshim.model.layout import share_dir
from virtshim.neighbours.kubelet import ENVIRONMENTS
from virtshim.neighbours.runtimes import CONTAINERD_FILE, RuntimeSetup
from virtshim.preflight.overhead import RUNTIME_CLASS
from virtshim.preflight.virtualization import rules_of_daemon, rules_of_guests
from virtshim.setup import kubelet_plan, next_steps, runtime_plan, texts
from virtshim.setup.changes import PlannedFile
from virtshim.setup.facts import AS_BYTES, NodeFacts
from virtshim.setup.units import APPARMOR, GUESTS_UNIT, LIBVIRTD, LOGIND, QEMU, VIRTQEMUD

GUESTS: Final = ("/etc/default/libvirt-guests", "/etc/sysconfig/libvirt-guests")
_DAEMON, _GUESTS_PROFILE = "usr.sbin.libvirtd", "abstractions/libvirt-qemu"
_PROFILES: Final = tuple(f"{APPARMOR}/{part}{name}" for part in ("", "local/") for name in (_DAEMON, _GUESTS_PROFILE))
# Files that setup may extend, or that decide whether another file is extended.
EDITED: Final = (LIBVIRTD, VIRTQEMUD, QEMU, CONTAINERD_FILE, *GUESTS, *ENVIRONMENTS, *_PROFILES)
# containerd's default.
_UNSAID: Final = "cgroupfs"
_PROXY_FILE: Final = f"{DEFAULT_FILE}.d/proxy.toml"


@dataclass(frozen=True, slots=True)
class Choice:
    """A setting that differs from its default, and the reason. `key`: `table.key`."""

    key: str
    value: Any
    why: str


@dataclass(frozen=True, slots=True)
class Plan:
    """`enable`: units that start with the node. `mask`: sockets to close. `seen`: facts that matter to VMs, by subject.
    `problems`: what prevents the node from working. `refusal`: the first problem if it must be solved before anything is
    written, else "". `steps`: the remaining steps, in order."""

    files: tuple[PlannedFile, ...]
    choices: tuple[Choice, ...]
    enable: tuple[str, ...]
    mask: tuple[str, ...]
    seen: Mapping[str, str]
    problems: tuple[str, ...]
    steps: tuple[str, ...]
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class OwnSettings:
    """The operator's settings: the values in force, and `said`, the keys that the files set. `has_file`: the main file sets
    something; systemd-tmpfiles may have created it without settings."""

    settings: Settings
    said: frozenset[str] = frozenset()
    has_file: bool = False


def plan(facts: NodeFacts, own: OwnSettings, *, name: str = "NODE", had_taint: bool = False) -> Plan:
    """`name`: the node's name in the cluster. `had_taint`: the previous setup made a node that runs only VMs."""
    runtime = facts.runtime
    driver, driver_why = _driver(facts, own)
    socket = own.settings.proxy_socket if runtime else own.settings.cri_socket
    choices = [one for one in _choices(facts, driver, driver_why) if one.key not in own.said]
    files = [
        PlannedFile(
            DEFAULT_FILE, _toml(choices).encode(), "settings that differ from the defaults", keeps=own.has_file
        ),
        PlannedFile(RUNTIME_CLASS, texts.RUNTIME_CLASS.encode(), "for kubectl apply, once per cluster"),
        PlannedFile("/etc/crictl.yaml", texts.crictl(socket).encode(), "crictl calls the same socket as kubelet"),
    ]
    # Settings of the operator about runtimes take precedence.
    if runtime and not {"proxy.primary", "proxy.others"} & _tables(own.said):
        files.append(PlannedFile(_PROXY_FILE, _proxy(runtime).encode(), "containers beside VMs"))
    wanted = kubelet_plan.Wanted(socket, driver, driver_why, runtime is not None, facts.kubelet_version)
    wiring = kubelet_plan.plan(facts.kubelet, wanted, facts.texts)
    files += wiring.files
    beside = runtime_plan.plan(runtime, sorted(own.settings.proxy.pod_handlers), facts.texts)
    files += beside.files
    files += _of_libvirt(facts, driver)
    files += _of_apparmor(facts, own.settings)
    if not facts.cni_configuration and not facts.kubelet.is_there:
        path = f"{facts.cni_conf_dir}/10-virtshim.conflist"
        files.append(
            PlannedFile(path, texts.CNI.encode(), "a bridge for this node, because the cluster provides no network")
        )
    units = ["tapmanager.service", "virtshim-shares.service", "virtshim.service", "virtshim-guests.service"]
    units += ["virtshim-proxy.service"] if runtime else []
    units += [f"{runtime.name.replace('cri-o', 'crio')}.service"] if runtime else []
    units += [GUESTS_UNIT]
    conflict = _driver_conflict(facts, driver, driver_why)
    # If the container runtime has another cgroup driver than the one reported to kubelet, kubelet would lose its containers at
    # its next start.
    refusal = conflict if facts.kubelet.is_there else ""
    forbids = "images.forbidden_networks" in own.said
    steps = next_steps.after_set_up(facts, name, socket, had_taint=had_taint, forbids=forbids)
    return Plan(
        files=tuple(files),
        choices=tuple(choices),
        enable=tuple(unit for unit in units if unit in facts.units),
        mask=tuple(unit for unit in (f"{facts.libvirt}-ro.socket",) if unit in facts.units),
        seen=_seen(facts, driver, driver_why),
        problems=(
            *([conflict] if conflict else []),
            *_problems(facts, units),
            *wiring.problems,
            *beside.problems,
            *_guests_conflicts(facts),
            *(_unsaid(choices) if own.has_file else ()),
        ),
        steps=() if refusal else tuple(steps),
        refusal=refusal,
    )


def _tables(keys: Collection[str]) -> set[str]:
    """The tables of the keys, such as `proxy.primary` of `proxy.primary.name`."""
    return {".".join(key.replace("[", ".").split(".")[:2]) for key in keys}


def _unsaid(choices: Sequence[Choice]) -> list[str]:
    """Problems: settings that are missing in a file that belongs to the operator."""
    return [
        f"{DEFAULT_FILE} is your own file; add {one.key} = {json.dumps(one.value)} to it ({one.why})" for one in choices
    ]


def _driver(facts: NodeFacts, own: OwnSettings) -> tuple[str, str]:
    """The cgroup driver of the node, and the reason."""
    if (mine := own.settings.cri.cgroup_driver) != "auto":
        return mine, "as cri.cgroup_driver says"
    if said := facts.kubelet.cgroup_driver:
        return str(said.value), f"as kubelet's configuration says in {said.source}"
    if facts.runtime and facts.runtime.cgroup_driver:
        return facts.runtime.cgroup_driver, f"as {facts.runtime.name} uses it according to {facts.runtime.file}"
    if facts.systemd_runs:
        return "systemd", "systemd runs this machine"
    return "cgroupfs", "systemd does not run this machine"


def _drivers_of(runtime: RuntimeSetup) -> str:
    if runtime.trouble:
        return "cgroup driver not known"
    return f"cgroup driver {runtime.cgroup_driver or f'{_UNSAID}, its default'}"


def _driver_conflict(facts: NodeFacts, driver: str, why: str) -> str:
    """A problem if the container runtime has another cgroup driver than the node; "" if not, or if the runtime's file cannot be
    read."""
    runtime = facts.runtime
    if runtime is None or runtime.trouble or (runtime.cgroup_driver or _UNSAID) == driver:
        return ""
    has = _drivers_of(runtime)
    return f"{runtime.name} has {has}, but this node uses {driver} ({why}); {runtime.remedy(driver)}"


def _choices(facts: NodeFacts, driver: str, why: str) -> list[Choice]:
    found = [Choice("vm.require_overhead", True, "kubelet's eviction does not see a VM outside its pod's cgroup")]
    if driver != ("systemd" if facts.systemd_runs else "cgroupfs"):
        found.append(Choice("cri.cgroup_driver", driver, why))
    defaults = Settings.model_construct()
    if facts.emulator and facts.emulator != defaults.libvirt.emulator:
        found.append(Choice("libvirt.emulator", facts.emulator, "QEMU's path in this distribution"))
    if facts.vmwrapper and facts.vmwrapper != defaults.libvirt.vmwrapper:
        found.append(Choice("libvirt.vmwrapper", facts.vmwrapper, "the installed path"))
    if beside := facts.runtime:
        taps = defaults.tapmanager
        if beside.cni_conf_dir.rstrip("/") != taps.cni_conf_dir:
            found.append(
                Choice("tapmanager.cni_conf_dir", beside.cni_conf_dir.rstrip("/"), f"the directory of {beside.name}")
            )
        if more := [one.rstrip("/") for one in beside.cni_bin_dirs if one.rstrip("/") not in taps.cni_bin_dir]:
            found.append(
                Choice("tapmanager.cni_bin_dir", [*more, *taps.cni_bin_dir], f"the directories of {beside.name} first")
            )
        hosts = beside.registry_hosts_dir
        if hosts and hosts != defaults.images.registry_hosts_dir:
            found.append(
                Choice("images.registry_hosts_dir", hosts, f"the mirrors of registries that {beside.name} uses")
            )
    if (home := facts.kubelet.root_dir.rstrip("/")) != "/var/lib/kubelet":
        found.append(
            Choice("devices.pod_resources_socket", f"{home}/pod-resources/kubelet.sock", "kubelet's --root-dir")
        )
        found.append(Choice("device_plugin.directory", f"{home}/device-plugins", "kubelet's --root-dir"))
    return found


def _toml(choices: Sequence[Choice]) -> str:
    lines = [
        texts.MARK.rstrip(),
        "# Settings that differ from the defaults on this node. `virtshim config schema` lists all settings.",
    ]
    table = ""
    for choice in sorted(choices, key=lambda one: one.key.partition(".")[0]):
        mine, _, key = choice.key.partition(".")
        if mine != table:
            lines += ["", f"[{mine}]"]
            table = mine
        # JSON strings, and lists of them, are valid TOML.
        lines += [f"# {choice.why}", f"{key} = {json.dumps(choice.value)}"]
    return "\n".join(lines) + "\n"


def _proxy(runtime: RuntimeSetup) -> str:
    beside = "It also makes" if runtime.tells_handlers else "It cannot make"
    return f"""{texts.MARK}# Pods of RuntimeClass virtshim become VMs, all others go to {runtime.name}. {beside}
# pods of RuntimeClass virtshim-pod, which have containers beside their VM: docs/proxy.md
[proxy.primary]
name = "{runtime.name}"
# The socket that exists on this node.
socket = "{runtime.socket}"

[[proxy.others]]
name = "virtlet.cloud"               # the runtime's name in annotations
handlers = ["virtshim"]              # RuntimeClass handlers
pod_handlers = ["virtshim-pod"]      # and those of pods with containers beside the VM
image_prefixes = ["virtlet.cloud/"]
when_down = "degraded"               # or "fail"
"""


def _of_libvirt(facts: NodeFacts, driver: str) -> list[PlannedFile]:
    found = []
    daemon = VIRTQEMUD if facts.libvirt == "virtqemud" else LIBVIRTD
    if daemon in facts.texts:
        why = "local users must not read VMs' definitions"
        found += _added(facts, daemon, "unix_sock_ro_perms", '"0700"', why)
    if driver == "cgroupfs" and QEMU in facts.texts:
        found += _added(facts, QEMU, "cgroup_controllers", "[ ]", "tapmanager puts each VM below its pod's cgroup")
    if GUESTS_UNIT in facts.units:
        guests = _guests_file(facts)
        before = facts.texts.get(guests, "")
        text = texts.libvirt_guests(before, _shell_values(before))
        why = "a reboot shuts down guests that kubelet has not stopped"
        found.append(PlannedFile(guests, text.encode(errors=AS_BYTES), why))
    if facts.kubelet.is_there and facts.systemd_runs:
        path = f"{LOGIND}/virtshim.conf"
        found.append(PlannedFile(path, texts.LOGIND.encode(), "a reboot waits for kubelet to stop its pods"))
    return found


def _guests_file(facts: NodeFacts) -> str:
    return next((path for path in GUESTS if path in facts.texts), GUESTS[0])


def _shell_values(text: str) -> dict[str, str]:
    """The variables that a shell would set."""
    found = re.findall(r"^[ \t]*(?:export[ \t]+)?(\w+)=(.*)$", text, re.MULTILINE)
    return {name: value.partition(" #")[0].strip().strip("\"'") for name, value in found}


def _guests_conflicts(facts: NodeFacts) -> list[str]:
    """Problems: the operator's own settings of libvirt-guests that would harm virtshim's VMs. Setup keeps them, because the
    machine may have other VMs."""
    path = _guests_file(facts)
    said = _shell_values(facts.texts.get(path, "")) if GUESTS_UNIT in facts.units else {}
    # For root, libvirt's default is the URI that virtshim uses.
    said = {key: value.replace("default", "qemu:///system") if key == "URIS" else value for key, value in said.items()}
    return [
        f"{path} has {key}={said[key]}, which setup keeps; virtshim's VMs need {key}={wanted} ({why})"
        for key, (wanted, why) in texts.GUESTS_AT_REBOOT.items()
        if key in ("URIS", "ON_BOOT", "ON_SHUTDOWN") and wanted not in said.get(key, wanted).split()
    ]


def _of_apparmor(facts: NodeFacts, settings: Settings) -> list[PlannedFile]:
    """Rules for vmwrapper in libvirt's AppArmor profiles, if the profiles exist without them."""
    wrapper = facts.vmwrapper or settings.libvirt.vmwrapper
    sockets = (settings.tapmanager.socket, f"{share_dir(settings.layout())}/*/fs.sock")
    wanted = {_DAEMON: rules_of_daemon(wrapper), _GUESTS_PROFILE: rules_of_guests(wrapper, *sockets)}
    found = []
    for name, rules in wanted.items():
        profile, path = facts.texts.get(f"{APPARMOR}/{name}", ""), f"{APPARMOR}/local/{name}"
        local = facts.texts.get(path, "")
        missing = [rule for rule in rules if rule.split()[0] not in f"{profile}\n{local}"]
        if profile and missing:
            text = "\n".join([*([local] if local else []), texts.MARK.rstrip(), *missing, ""])
            found.append(
                PlannedFile(path, text.encode(errors=AS_BYTES), "libvirt may start vmwrapper in place of QEMU")
            )
    return found


def _added(facts: NodeFacts, path: str, key: str, value: str, why: str) -> list[PlannedFile]:
    """The file with the setting; [] if the file has it already."""
    text = facts.texts[path]
    lines = text.split("\n")
    said = [line.partition("#")[0].replace(" ", "") for line in lines]
    if f"{key}={value}".replace(" ", "") in said:
        return []
    kept = "\n".join(_without(key, lines)).rstrip()
    return [PlannedFile(path, f"{kept}\n# virtshim setup: {why}\n{key} = {value}\n".encode(errors=AS_BYTES), why)]


def _without(key: str, lines: Sequence[str]) -> Iterator[str]:
    """The lines that do not belong to the setting. Its value may be a list over several lines."""
    is_list = False
    for line in lines:
        name, _, value = line.partition("#")[0].partition("=")
        if is_list:
            is_list = "]" not in line
        elif name.strip() == key:
            is_list = "[" in value and "]" not in value
        else:
            yield line


def _seen(facts: NodeFacts, driver: str, driver_why: str) -> dict[str, str]:
    huge = ", ".join(f"{count} of {size >> 10} MiB" for size, count in sorted(facts.huge_pages.items()) if size >= 1024)
    runtime, drop_ins = facts.runtime, facts.kubelet.config_dir
    none = "not looked for: --vms-only" if facts.vms_only else "no runtime that serves CRI"
    kubelet = f"configured, {f'with drop-ins in {drop_ins}' if drop_ins else 'without drop-ins'}"
    return {
        "kubelet": kubelet if facts.kubelet.is_there else "none",
        "cgroup driver": f"{driver}: {driver_why}",
        "containers": f"{runtime.name}, {runtime.socket}, {_drivers_of(runtime)}" if runtime else none,
        "network": facts.cni_configuration or "no CNI configuration",
        "QEMU": facts.emulator or "none",
        "libvirt": facts.libvirt or "none",
        "KVM": "/dev/kvm" if facts.has_kvm else "none: VMs run in software, ten times slower",
        "huge pages": huge or "none: pods that need them are not scheduled here",
        "IOMMU": f"{facts.iommu_groups} groups" if facts.iommu_groups else "off: VMs cannot use PCI devices",
        "systemd": "runs" if facts.systemd_runs else "does not run",
    }


def _problems(facts: NodeFacts, units: Sequence[str]) -> list[str]:
    found = [*facts.kubelet.unreadable]
    for one in facts.runtimes:
        if one.trouble:
            found.append(one.trouble)
        elif not one.serves_cri and facts.runtime is None:
            found.append(
                f"{one.name} does not serve CRI (disabled_plugins in {one.file}), so all pods here will be VMs"
            )
    if not facts.emulator:
        found.append("QEMU is missing; run apt-get install qemu-system-x86 qemu-utils")
    if not facts.libvirt:
        found.append("libvirt is missing; run apt-get install libvirt-daemon-system")
    if not facts.vmwrapper:
        wrapper = "/usr/libexec/virtshim/vmwrapper"
        found.append(f"vmwrapper is missing; install virtshim's package, or run python -m vmwrapper.bundle {wrapper}")
    missing = [unit for unit in units if unit.startswith(("virtshim", "tapmanager")) and unit not in facts.units]
    if missing:
        found.append(
            f"units are missing: {', '.join(missing)}; install virtshim's package, or systemd/*.service from its sources"
        )
    return found
