"""`virtshim-shares`, which dies on order (VIRTSHIM_TEST_ORDER)."""

from __future__ import annotations

import functools
import os
import shutil
import sys
from typing import Any

from dying import Stepping, Steps

from tapmanager.shares import __main__ as program
from tapmanager.shares import daemons

_MAKING = ("mkdir", "makedirs")


def main() -> int:
    steps = Steps(os.environ["VIRTSHIM_TEST_ORDER"])
    module: Any = daemons
    module.os = Stepping("os", os, steps, [name for name in dir(os) if name not in _MAKING])
    module.shutil = Stepping("shutil", shutil, steps)
    for name in ("_listen", "_kill"):
        setattr(module, name, _stepping(name, getattr(module, name), steps))
    launch = daemons.ShareDaemons._launch

    def launched(self: Any, what: str, *rest: Any, **options: Any) -> None:
        steps.take(f"launch.{what}", lambda: launch(self, what, *rest, **options))

    parts: Any = daemons.ShareDaemons
    parts._launch = launched
    entry: Any = program
    made = program.VmCgroups
    entry.VmCgroups = lambda found: Stepping("groups", made(found), steps, ("directories",))
    return program.main(["--config", sys.argv[2]])


def _stepping(name: str, function: Any, steps: Steps) -> Any:
    @functools.wraps(function)
    def taken(*args: Any) -> Any:
        return steps.take(name, lambda: function(*args))

    return taken


if __name__ == "__main__":
    sys.exit(main())
