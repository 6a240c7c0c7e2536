"""`virtshim serve`, whose libvirtd dies on order (VIRTSHIM_TEST_ORDER, VIRTSHIM_TEST_VICTIM): at the daemon's calls to it."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
from pathlib import Path
from typing import Any

os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

from dying import Stepping, Steps

from virtshim.app import assembly
from virtshim.cli.serve import serve_command

_SILENT = ("watching", "on_power_event", "trouble", "usage", "state", "qemu")


def _kill_libvirtd() -> None:
    """Kills libvirtd; virtshim itself survives."""
    os.kill(int(Path(os.environ["VIRTSHIM_TEST_VICTIM"]).read_text()), signal.SIGKILL)


def main() -> None:
    steps = Steps(os.environ["VIRTSHIM_TEST_ORDER"], _kill_libvirtd)
    wire = assembly.wire

    def dressed(settings: Any, adapters: Any) -> Any:
        parts = {
            name: Stepping(f"vm.{name}", getattr(adapters.vm, name), steps, _SILENT)
            for name in ("hypervisor", "pausing", "resizing", "inventory", "templates", "streams")
        }
        return wire(settings, dataclasses.replace(adapters, vm=dataclasses.replace(adapters.vm, **parts)))

    assembly.wire = dressed
    serve_command(sys.argv[2])


if __name__ == "__main__":
    main()
