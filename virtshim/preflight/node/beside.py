"""Findings about the container runtime beside virtshim: its configuration against ours. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from virtshim.neighbours.runtimes import RuntimeSetup
from virtshim.preflight.finding import Finding, error, ok, warning

_SUBJECT = "containers"


def findings(found: Sequence[RuntimeSetup], driver: str, cni_conf_dir: str, *, behind_proxy: bool) -> list[Finding]:
    """`driver`, `cni_conf_dir`: ours. `behind_proxy`: whether this node's proxy sends pods to one of them."""
    if not found:
        return [ok(_SUBJECT, "neither containerd nor CRI-O here: all pods of this node are virtual machines")]
    return [finding for one in found for finding in _of(one, driver, cni_conf_dir, behind_proxy=behind_proxy)]


def unused() -> Finding:
    return ok(_SUBJECT, "kubelet asks virtshim itself: all pods of this node are virtual machines")


def _of(one: RuntimeSetup, driver: str, cni_conf_dir: str, *, behind_proxy: bool) -> list[Finding]:
    if one.trouble:
        return [warning(_SUBJECT, f"{one.name}: {one.trouble}", "correct the file, or run this as root")]
    if not one.serves_cri:
        text = f"{one.name} does not serve CRI: `cri` is in disabled_plugins of {one.file}"
        remedy = f"for containers beside VMs take it out, and run: systemctl restart {one.name}"
        return [warning(_SUBJECT, text, remedy)]
    told = [found for found in (_driver(one, driver, behind_proxy=behind_proxy), _network(one, cni_conf_dir)) if found]
    runs = "is there" if one.is_running else "is installed and does not run"
    return told or [ok(_SUBJECT, f"{one.name} {runs}, with virtshim's cgroup driver and network ({one.file})")]


def _driver(one: RuntimeSetup, driver: str, *, behind_proxy: bool) -> Finding | None:
    if one.cgroup_driver == driver or (not one.cgroup_driver and driver == "cgroupfs"):
        return None
    says = f"uses {one.cgroup_driver}" if one.cgroup_driver else "says nothing of SystemdCgroup, by default false"
    text = f"{one.name} {says}, virtshim uses {driver}: one kubelet cannot have both"
    sure = behind_proxy and one.cgroup_driver
    return (error if sure else warning)(_SUBJECT, text, f"{one.remedy(driver)}; or set cri.cgroup_driver here")


def _network(one: RuntimeSetup, cni_conf_dir: str) -> Finding | None:
    if one.cni_conf_dir.rstrip("/") == cni_conf_dir.rstrip("/"):
        return None
    text = f"{one.name}'s CNI configuration is in {one.cni_conf_dir}, virtshim's in {cni_conf_dir}: two pod networks"
    return warning(_SUBJECT, text, f'set tapmanager.cni_conf_dir = "{one.cni_conf_dir}"')
