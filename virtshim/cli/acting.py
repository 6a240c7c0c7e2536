"""Commands that use the admin socket: pause, resume, reset, reboot, freeze, thaw, save, renew, inspect, dumpxml, screenshot."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, Final

from virtshim.cli.tables import print_json, print_table
from virtshim.cli.vm_lookup import running_vm, vm_of
from virtshim.cri.client import connected
from virtshim.cri.operator_client import operating
from virtshim.guest.operation import Action
from virtshim.model.errors import InternalError, InvalidRequest, WrongState
from virtshim.model.text import printable_text
from virtshim.system.files import replace_bytes

_SHORT: Final = 12


def act(socket: str, admin: str, action: Action, wanted: str, *, seconds: int = 0, as_json: bool = False) -> None:
    with connected(socket) as node:
        vm = running_vm(wanted, node.pods(), node.vms())
    with operating(admin) as operator:
        changed, message = operator.act(action, vm.id, seconds)
    if as_json:
        print_json({"id": vm.id, "vm": vm.name, "action": action.value, "changed": changed, "message": message})
    else:
        print(printable_text(f"{vm.name} ({vm.id[:_SHORT]}): {message}"))


def save_all(admin: str, seconds: int, *, as_json: bool = False) -> None:
    """Raises InternalError if a guest runs on."""
    with operating(admin) as operator:
        results = operator.save_all(seconds)
    if as_json:
        print_json([{"vm": vm, "saved": not error, "error": error} for vm, error in results.items()])
    else:
        for vm, error in results.items():
            print(printable_text(f"{vm}: {f'not saved: {error}' if error else 'saved'}"))
    if failed := sum(bool(error) for error in results.values()):
        raise InternalError(f"{failed} of {len(results)} VMs are not saved and run on")


def dumpxml(socket: str, admin: str, wanted: str) -> None:
    with connected(socket) as node:
        vm = vm_of(wanted, node.pods(), node.vms())
    with operating(admin) as operator:
        print(operator.definition(vm.id), end="")


def screenshot(socket: str, admin: str, wanted: str, file: str) -> None:
    """`file` is a path, or "-" for standard output."""
    with connected(socket) as node:
        pods = node.pods()
        vm = running_vm(wanted, pods, node.vms())
    if file == "-" and sys.stdout.isatty():
        raise InvalidRequest("a PNG cannot be shown on a terminal; name a file, or redirect the output")

    def take() -> bytes:
        with operating(admin) as operator:
            return operator.screenshot(vm.id)

    if file == "-":
        sys.stdout.buffer.write(take())
        return
    # Its runtime may have given a pod any name.
    name = next((pod.name for pod in pods if pod.id == vm.pod and "/" not in pod.name), vm.id[:_SHORT])
    path = os.path.abspath(file or f"{name}.png")
    keep_picture(take, path)
    print(path)


def keep_picture(take: Callable[[], bytes], path: str) -> None:
    """Writes the picture to `path`, which must be new or a regular file. Checks that before it takes the picture.
    Raises InvalidRequest."""
    if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
        raise InvalidRequest(f"{path} is not a regular file and was left unchanged; `-o -` writes to standard output")
    picture = take()
    try:
        replace_bytes(path, picture, mode=0o600)
    except OSError as exc:
        raise InvalidRequest(f"{path} cannot be written: {exc.strerror}") from exc


def inspect(socket: str, admin: str, wanted: str, *, as_json: bool) -> None:
    with connected(socket) as node:
        pods = node.pods()
        try:
            found = vm_of(wanted, pods, node.vms()).id
        except WrongState:  # a pod without a VM
            found = next((pod.id for pod in pods if wanted in (pod.name, f"{pod.namespace}/{pod.name}")), wanted)
    with operating(admin) as operator:
        facts = operator.inspect(found)
    if as_json:
        print_json(facts)
        return
    print_table(("WHAT", ""), [(name, value) for name, value in summary(facts) if value])
    print()
    print_table(("PHASE", "BEGAN", "SECONDS", ""), map(_phase, facts["phases"]))


def summary(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The facts that people look for first, as (name, text). --json has all of them. Pure."""
    pod, container, vm = facts["pod"], facts["container"] or {}, facts["vm"] or {}
    status = container.get("status", {})
    size, by = status.get("size", {}), container.get("sizedBy", {})
    power = vm.get("power", "") + (f" ({vm['pauseReason']})" if vm.get("pauseReason") else "")
    return [
        ("pod", f"{pod['namespace']}/{pod['name']} ({pod['id'][:_SHORT]}), {pod['phase']}"),
        ("not ready because", pod.get("reason", "")),
        ("addresses", ", ".join(facts["addresses"])),
        ("network namespace", pod.get("netns", "")),
        ("container", f"{container['name']} ({container['id'][:_SHORT]}), {container['phase']}" if container else ""),
        ("trouble", container.get("trouble", "")),
        ("image", container.get("record", {}).get("image_ref", "")),
        ("VM", f"{vm.get('domain', '')}, {power or vm.get('error', '')}" if vm else ""),
        ("vCPUs", f"{size['vcpus']} ({by.get('vcpus', '')})" if size.get("vcpus") else ""),
        ("memory", f"{size['memory_bytes'] >> 20} MiB ({by.get('memory', '')})" if size.get("memory_bytes") else ""),
        ("root disk", container.get("rootDisk", "")),
        ("console", container.get("consoleLog", "")),
        ("cgroup below", container.get("cgroupParent", "")),
        ("devices", ", ".join(map(str, container.get("devices") or []))),
    ]


def _phase(phase: Mapping[str, Any]) -> tuple[str, ...]:
    began = datetime.fromtimestamp(phase["beganAt"] / 1e9).astimezone().strftime("%H:%M:%S.%f")[:-3]
    going = "" if phase["isOver"] else "continues"
    return phase["name"], began, f"{phase['seconds']:.3f}", phase["error"] or going
