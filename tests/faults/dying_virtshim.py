"""`virtshim serve`, which dies on order (VIRTSHIM_TEST_ORDER), searches programs in VIRTSHIM_TEST_PROGRAMS first, and
may believe that the machine rebooted (VIRTSHIM_TEST_BOOT)."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from collections.abc import Sequence
from typing import Any

os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

from dying import Stepping, Steps

from virtshim.app import adapters, assembly
from virtshim.cli.serve import serve_command
from virtshim.disks.root_disks import RootDiskStore
from virtshim.images import confinement
from virtshim.system import process

_SILENT = {
    "vm.hypervisor": ("watching", "on_power_event", "trouble", "usage"),
    "vm.control": ("look_for_agent",),
    "vm.streams": ("state",),
    "vm.templates": ("qemu", "definition"),
    "guest.boot_output": ("piece",),
    "network.pods": ("trouble",),
    "network.streaming": ("refused",),
    "files.images": ("path", "filesystem_usage", "format_of"),
    "files.kernels": ("is_there",),
    "files.vms": ("all", "disk_bytes"),
    "files.containers_room": ("filesystem_usage",),
    "devices.errors": ("errors",),
}

# Calls to these adapters are no steps, because they only report.
_NO_STEPS = ("clock", "vm.node_hardware")


class _Records:
    """Writes are steps; reads come from memory."""

    def __init__(self, records: Any, steps: Steps) -> None:
        self._records = records
        for table in ("sandboxes", "containers", "images", "borrowed", "device_conditions"):
            setattr(self, table, Stepping(f"records.{table}", getattr(records, table), steps, ("get", "all")))

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._records, attribute)


def _use_programs() -> None:
    """Makes disk creation use the test's qemu-img if there is one, with the test's time limit."""
    path = f"{os.environ['VIRTSHIM_TEST_PROGRAMS']}:{os.environ['PATH']}"
    limit = float(os.environ["VIRTSHIM_TEST_QEMU_IMG_LIMIT"])

    def run(argv: Sequence[str], *, timeout: float, **options: Any) -> process.Finished:
        return process.run(argv, timeout=timeout, environment={"PATH": path}, **options)

    def run_in_time(argv: Sequence[str], *, timeout: float, **options: Any) -> process.Finished:
        return run(argv, timeout=min(timeout, limit), **options)

    images: Any = confinement
    parts: Any = adapters
    images.run = run
    parts.RootDiskStore = functools.partial(RootDiskStore, run=run_in_time)


def _stepping(parts: Any, steps: Steps, before: str = "") -> Any:
    """The adapters, or one group of them, with a step at each call: `group.adapter.method`."""
    dressed: dict[str, Any] = {}
    for field in dataclasses.fields(parts):
        part, name = getattr(parts, field.name), f"{before}{field.name}"
        if name == "records":
            dressed[field.name] = _Records(part, steps)
        elif type(part).__module__ == adapters.__name__:
            dressed[field.name] = _stepping(part, steps, f"{name}.")
        elif name not in _NO_STEPS:
            dressed[field.name] = Stepping(name, part, steps, _SILENT.get(name, ()))
    return dataclasses.replace(parts, **dressed)


def main() -> None:
    steps = Steps(os.environ["VIRTSHIM_TEST_ORDER"])
    wire = assembly.wire

    def dressed(settings: Any, wired: Any) -> Any:
        return wire(settings, _stepping(wired, steps))

    assembly.wire = dressed
    if boot := os.environ.get("VIRTSHIM_TEST_BOOT"):
        assembly.machine.boot_id = lambda: boot
    _use_programs()
    serve_command(sys.argv[2])


if __name__ == "__main__":
    main()
