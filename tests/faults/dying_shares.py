"""`virtshim-shares`, which dies on order (VIRTSHIM_TEST_ORDER)."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from typing import Any

from dying import Stepping, Steps

from tapmanager.shares import __main__ as program
from tapmanager.shares import daemons

_STEPS = ("makedirs", "mkdir", "chown", "kill", "unlink", "rmdir")


class _Programs(Stepping):
    """Wraps the module `subprocess`, whose Popen is a class."""

    def Popen(self, *args: Any, **options: Any) -> Any:  # noqa: N802
        return self._call("Popen", subprocess.Popen, *args, **options)


def main() -> int:
    steps = Steps(os.environ["VIRTSHIM_TEST_ORDER"])
    module: Any = daemons
    module.os = Stepping("os", os, steps, [name for name in dir(os) if name not in _STEPS])
    module.subprocess = _Programs("subprocess", subprocess, steps)
    module.select = Stepping("select", select, steps)
    entry: Any = program
    made = program.VmCgroups
    entry.VmCgroups = lambda found: Stepping("groups", made(found), steps, ("directories",))
    return program.main(["--config", sys.argv[2]])


if __name__ == "__main__":
    sys.exit(main())
