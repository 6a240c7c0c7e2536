"""`virtshim vms` lists the VMs that outlive their pods; `virtshim vms rm` removes one of them, and `virtshim vms take` lets one
run here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from virtshim.cli.tables import age, print_json, print_table, size_text
from virtshim.cri.operator_client import LastingVm, OperatorClient, operating_beside
from virtshim.model.errors import InvalidRequest, NotFound
from virtshim.model.text import printable_text

HEAD: Final = ("VM", "CONTAINER", "DISK", "POD", "SAVED", "SAVED AGE", "LAPSES IN")


def vms(socket: str, admin: str, template: str = "", *, as_json: bool) -> None:
    """`template`: see `row_format`."""
    with operating_beside(socket, admin) as operator:
        found = operator.lasting_vms()
    if as_json:
        print_json([_as_json(vm) for vm in found])
    else:
        print_table(HEAD, rows(found, time.time()), template)


def remove(socket: str, admin: str, wanted: str, *, as_json: bool) -> None:
    _act("rm", socket, admin, wanted, OperatorClient.remove_vm, as_json=as_json)


def take(socket: str, admin: str, wanted: str, *, as_json: bool) -> None:
    _act("take", socket, admin, wanted, OperatorClient.take_vm, as_json=as_json)


def _act(
    action: str,
    socket: str,
    admin: str,
    wanted: str,
    act: Callable[[OperatorClient, LastingVm], str],
    *,
    as_json: bool,
) -> None:
    with operating_beside(socket, admin) as operator:
        vm = named(wanted, operator.lasting_vms())
        message = act(operator, vm)
    if as_json:
        found = {"namespace": vm.namespace, "name": vm.name, "container": vm.container}
        print_json({**found, "action": action, "changed": True, "message": message})
    else:
        print(printable_text(f"{vm.full_name}: {message}"))


def named(wanted: str, found: Sequence[LastingVm]) -> LastingVm:
    """The VM of that name, namespace/name, or namespace/name/container. Raises NotFound, InvalidRequest if several match.
    Pure."""
    if not wanted:
        raise InvalidRequest("the name is empty; write a VM's name, namespace/name, or namespace/name/container")
    names = [(vm, {vm.name, f"{vm.namespace}/{vm.name}", vm.full_name}) for vm in found]
    matching = [vm for vm, own in names if wanted in own]
    if not matching:
        raise NotFound(f"no virtual machine {wanted!r} is kept on this node; `virtshim vms` lists those that are")
    if len(matching) > 1:
        every = ", ".join(vm.full_name for vm in matching)
        raise InvalidRequest(f"{wanted!r} matches more than one: {every}; be more specific")
    return matching[0]


def rows(found: Sequence[LastingVm], now: float) -> Iterator[tuple[str, ...]]:
    """`now`: seconds since 1970. Pure."""
    for vm in found:
        disk = size_text(vm.disk) if vm.disk else "-"
        yield f"{vm.namespace}/{vm.name}", vm.container, disk, vm.pod or "-", *_state(vm, now)


def _state(vm: LastingVm, now: float) -> tuple[str, str, str]:
    if vm.moved_to:
        return f"moved to {vm.moved_to}", "-", "-"
    if vm.comes_from:
        return f"waits for {vm.comes_from}" if vm.undecided else f"comes from {vm.comes_from}", "-", "-"
    if (saved := vm.saved) is None:
        return "-", "-", "-"
    since = age(now - saved.saved_at)
    if saved.taken:
        return "taken", since, "-"
    return size_text(saved.bytes), since, age(saved.lapses_at - now)


def _as_json(vm: LastingVm) -> dict[str, Any]:
    saved = vm.saved
    return {
        "namespace": vm.namespace,
        "name": vm.name,
        "container": vm.container,
        "createdAt": vm.created,
        "disk": vm.disk,
        "pod": vm.pod,
        "podId": vm.pod_id,
        "vmId": vm.vm_id,
        "saved": saved
        and {"size": saved.bytes, "savedAt": saved.saved_at, "lapsesAt": saved.lapses_at, "taken": saved.taken},
        "movedTo": vm.moved_to,
        "comesFrom": vm.comes_from,
        "undecided": vm.undecided,
    }
