"""Findings about the sockets of virtshim's own daemons. Pure."""

from __future__ import annotations

import re
import stat
from collections.abc import Mapping

from virtshim.neighbours.kubelet import Given, KubeletSetup
from virtshim.preflight.access import FileStatus
from virtshim.preflight.finding import Finding, error, ok, warning
from virtshim.preflight.virtualization import ProgramOutput

# Findings about the node's kubelet: its configuration against ours. Pure: facts in, findings out.

_DRIVER, _ENDPOINT, _SWAP = "kubelet's cgroups", "kubelet's runtime", "swap"
_VERSION = re.compile(r"v(\d+)\.(\d+)")
# Since then kubelet asks the runtime for its cgroup driver, and takes the answer.
_ASKS_THE_RUNTIME = (1, 31)
_DEFAULT_ENDPOINT = Given("unix:///run/containerd/containerd.sock", "kubelet's default")


def kubelet_configuration(setup: KubeletSetup) -> Finding:
    if setup.unreadable:
        remedy = "correct the file, or run this as root: what it says could not be compared"
        return warning("kubelet", "; ".join(setup.unreadable), remedy)
    if not setup.is_there:
        return ok("kubelet", "none is installed here: nothing to compare")
    files = sorted({one.source for one in (*setup.flags.values(), *setup.fields.values())})
    return ok("kubelet", f"configured by {', '.join(files) or 'its defaults'}")


def kubelet_cgroup_driver(setup: KubeletSetup, ours: str, version: ProgramOutput) -> Finding:
    """`ours`: what virtshim tells it. `version`: what kubelet says of its own."""
    found = setup.cgroup_driver or Given("cgroupfs", "kubelet's default")
    told = f"{found.value} ({found.source})"
    if found.value == ours:
        return ok(_DRIVER, f"{told}, as virtshim's")
    known = _VERSION.search(version.text)
    if known is not None and (int(known[1]), int(known[2])) >= _ASKS_THE_RUNTIME:
        return ok(_DRIVER, f"{told}; virtshim's is {ours}, which kubelet {known[1]}.{known[2]} takes over")
    text = f"{told}, virtshim's is {ours}: pods' limits would not hold their VMs"
    remedy = f"set cgroupDriver: {ours} in kubelet's configuration, or cri.cgroup_driver here to kubelet's"
    if known is None:
        return warning(_DRIVER, f"{text}, with a kubelet older than 1.31, and this one's version is not known", remedy)
    return error(_DRIVER, text, remedy)


def kubelet_asks(setup: KubeletSetup, socket: str) -> bool:
    """Whether its endpoint is this socket."""
    return setup.endpoint is not None and str(setup.endpoint.value).removeprefix("unix://") == socket


def kubelet_endpoint(setup: KubeletSetup, served: Mapping[str, str], missing: frozenset[str]) -> Finding:
    """`served`: our sockets with the unit that serves each; `missing`: those that are not there."""
    found = setup.endpoint or _DEFAULT_ENDPOINT
    socket = str(found.value).removeprefix("unix://")
    if socket not in served:
        wanted = " or ".join(f"unix://{one}" for one in served)
        text = f"{found.value} ({found.source}): pods of this node do not reach virtshim"
        return warning(_ENDPOINT, text, f"virtshim setup; or set containerRuntimeEndpoint to {wanted}")
    if socket in missing:
        remedy = f"systemctl enable --now {served[socket]}; journalctl -u {served[socket]}"
        return warning(_ENDPOINT, f"{socket} ({found.source}) is not there: kubelet has no runtime", remedy)
    return ok(_ENDPOINT, f"{socket} ({found.source})")


def kubelet_swap(setup: KubeletSetup, swaps: str) -> Finding:
    """`swaps`: /proc/swaps, "" if it cannot be read."""
    if not swaps:
        return warning(_SWAP, "/proc/swaps cannot be read: whether swap is on is not known", "run this as root")
    used = [line.split()[0] for line in swaps.splitlines()[1:] if line.strip()]
    if not used:
        return ok(_SWAP, "off")
    told = f"on ({', '.join(used)})"
    if not setup.is_there:
        return ok(_SWAP, f"{told}; kubelet's defaults would refuse it")
    fails = setup.given("fail-swap-on", "failSwapOn")
    if fails is None or str(fails.value).lower() != "false":
        source = f" ({fails.source})" if fails else ""
        remedy = "swapoff -a, and take it out of /etc/fstab; or set failSwapOn: false in kubelet's configuration"
        return error(_SWAP, f"{told}, and failSwapOn is true{source}: kubelet does not start", remedy)
    behaviour = setup.fields.get("memorySwap")
    word = behaviour.value.get("swapBehavior") if behaviour and isinstance(behaviour.value, dict) else None
    return ok(_SWAP, f"{told}; kubelet allows it (swapBehavior {word or 'NoSwap'})")


def listeners_listener(unit: str, path: str, file: FileStatus | None, silence: str) -> Finding:
    """A socket that is root's alone. `file`: None if it is not there; `silence`: why nobody answers, "" if somebody does."""
    start = f"systemctl enable --now {unit}; journalctl -u {unit}"
    if file is None:
        return warning(unit, f"{path} is not there: {unit} does not run", start)
    if not stat.S_ISSOCK(file.mode):
        return error(unit, f"{path} is no socket", f"move it away, then: systemctl restart {unit}")
    of_others = file.mode & (0o007 if file.gid == 0 else 0o077)
    if file.uid != 0 or of_others:
        text = f"{path} has mode {file.permissions} and user {file.uid}: whoever reaches it rules this node's VMs"
        return error(unit, text, f"chown root: {path} && chmod 0600 {path}; see who changed it")
    if silence:
        return warning(unit, f"{path}: {silence}", start)
    return ok(unit, f"answers on {path}")
