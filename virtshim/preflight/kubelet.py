"""Findings about the node's kubelet, whose configuration must match virtshim's, and about the sockets of virtshim's daemons.
Pure: takes facts, returns findings."""

from __future__ import annotations

import re
import stat
from collections.abc import Mapping

from virtshim.neighbours.kubelet import Given, KubeletSetup
from virtshim.preflight.access import FileStatus
from virtshim.preflight.finding import Finding, error, ok, warning
from virtshim.preflight.virtualization import ProgramOutput

# kubelet.

_DRIVER, _ENDPOINT, _SWAP = "kubelet's cgroups", "kubelet's runtime", "swap"
_VERSION = re.compile(r"v(\d+)\.(\d+)")
# From this version on, kubelet asks the runtime for its cgroup driver and adopts it.
_ASKS_THE_RUNTIME = (1, 31)
_DEFAULT_ENDPOINT = Given("unix:///run/containerd/containerd.sock", "kubelet's default")


def kubelet_configuration(setup: KubeletSetup) -> Finding:
    if setup.unreadable:
        remedy = "correct the file, or run this command as root; its content could not be compared"
        return warning("kubelet", "; ".join(setup.unreadable), remedy)
    if not setup.is_there:
        return ok("kubelet", "not installed on this machine, so there is nothing to compare")
    files = sorted({one.source for one in (*setup.flags.values(), *setup.fields.values())})
    return ok("kubelet", f"configured by {', '.join(files) or 'its defaults'}")


def kubelet_cgroup_driver(setup: KubeletSetup, ours: str, version: ProgramOutput) -> Finding:
    """`ours`: the driver that virtshim reports to kubelet. `version`: the output of `kubelet --version`."""
    found = setup.cgroup_driver or Given("cgroupfs", "kubelet's default")
    shown = f"{found.value} ({found.source})"
    if found.value == ours:
        return ok(_DRIVER, f"{shown}, the same as virtshim's")
    known = _VERSION.search(version.text)
    if known is not None and (int(known[1]), int(known[2])) >= _ASKS_THE_RUNTIME:
        return ok(_DRIVER, f"{shown}; virtshim's is {ours}, and kubelet {known[1]}.{known[2]} adopts it")
    text = f"{shown}, virtshim's is {ours}: pods' limits would not apply to their VMs"
    remedy = f"set cgroupDriver: {ours} in kubelet's configuration, or set cri.cgroup_driver to kubelet's"
    if known is None:
        return warning(_DRIVER, f"{text} if kubelet is older than 1.31; its version is not known", remedy)
    return error(_DRIVER, text, remedy)


def kubelet_asks(setup: KubeletSetup, socket: str) -> bool:
    """Whether kubelet's endpoint is this socket."""
    return setup.endpoint is not None and str(setup.endpoint.value).removeprefix("unix://") == socket


def kubelet_endpoint(setup: KubeletSetup, served: Mapping[str, str], missing: frozenset[str]) -> Finding:
    """`served`: virtshim's sockets and the unit that serves each. `missing`: sockets that do not exist."""
    found = setup.endpoint or _DEFAULT_ENDPOINT
    socket = str(found.value).removeprefix("unix://")
    if socket not in served:
        wanted = " or ".join(f"unix://{one}" for one in served)
        text = f"{found.value} ({found.source}): kubelet does not send pods to virtshim"
        return warning(_ENDPOINT, text, f"run virtshim setup, or set containerRuntimeEndpoint to {wanted}")
    if socket in missing:
        remedy = f"systemctl enable --now {served[socket]}; journalctl -u {served[socket]}"
        return warning(_ENDPOINT, f"{socket} ({found.source}) does not exist: kubelet has no runtime", remedy)
    return ok(_ENDPOINT, f"{socket} ({found.source})")


def kubelet_swap(setup: KubeletSetup, swaps: str) -> Finding:
    """`swaps`: the text of /proc/swaps, "" if it cannot be read."""
    if not swaps:
        return warning(
            _SWAP, "/proc/swaps cannot be read, so it is not known whether swap is on", "run this command as root"
        )
    used = [line.split()[0] for line in swaps.splitlines()[1:] if line.strip()]
    if not used:
        return ok(_SWAP, "off")
    shown = f"on ({', '.join(used)})"
    if not setup.is_there:
        return ok(_SWAP, f"{shown}; kubelet's defaults would refuse it")
    fails = setup.given("fail-swap-on", "failSwapOn")
    if fails is None or str(fails.value).lower() != "false":
        source = f" ({fails.source})" if fails else ""
        remedy = "run swapoff -a and remove swap from /etc/fstab; or set failSwapOn: false in kubelet's configuration"
        return error(_SWAP, f"{shown}, and failSwapOn is true{source}: kubelet does not start", remedy)
    behaviour = setup.fields.get("memorySwap")
    word = behaviour.value.get("swapBehavior") if behaviour and isinstance(behaviour.value, dict) else None
    return ok(_SWAP, f"{shown}; kubelet allows it (swapBehavior {word or 'NoSwap'})")


def root_socket(unit: str, path: str, file: FileStatus | None, silence: str) -> Finding:
    """A socket that only root may open. `file`: None if the socket does not exist. `silence`: why nothing answers, "" if the
    daemon answers."""
    start = f"systemctl enable --now {unit}; journalctl -u {unit}"
    if file is None:
        return warning(unit, f"{path} does not exist: {unit} does not run", start)
    if not stat.S_ISSOCK(file.mode):
        return error(unit, f"{path} is not a socket", f"move it away, then run: systemctl restart {unit}")
    of_others = file.mode & (0o007 if file.gid == 0 else 0o077)
    if file.uid != 0 or of_others:
        text = f"{path} has mode {file.permissions} and user {file.uid}: whoever can open it controls this node's VMs"
        return error(unit, text, f"chown root: {path} && chmod 0600 {path}; find out who changed it")
    if silence:
        return warning(unit, f"{path}: {silence}", start)
    return ok(unit, f"answers on {path}")
