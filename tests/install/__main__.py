"""`make e2e-install` tests the package on a real, emulated Debian. If a step fails, the exit code is 1, and the output
says what was seen."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
_BUILD_SECONDS = "900"  # for each package
# Runs without pytest, whose `pythonpath` in pyproject.toml says the same.
sys.path[:0] = [str(PROJECT), str(PROJECT / "tests")]

from install.outer import Failed, booted, missing  # noqa: E402
from install.story import Story  # noqa: E402


def main() -> int:
    if lacks := missing():
        print(f"e2e-install {lacks}")
        return 1
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="virtshim-debs-", dir="/var/tmp") as directory:
        for version in ("1.0.0", "1.0.1"):
            argv = ["timeout", _BUILD_SECONDS, str(PROJECT / "deploy/deb/build.sh"), directory, version]
            subprocess.run(argv, check=True, cwd=PROJECT, env={**os.environ, "SOURCE_DATE_EPOCH": "1700000000"})
        packages = sorted(Path(directory).glob("*.deb"))
        beside = [PROJECT / "build/guest.qcow2", PROJECT / "deploy/podclient.py", PROJECT / "deploy/imageserver.py"]
        with booted([*packages, *beside, PROJECT / "tests/install/in_the_machine.py"]) as machine:
            try:
                Story(machine, packages, say).tell()
            except (Failed, OSError, ValueError) as exc:
                say(f"FAILED: {type(exc).__name__}: {exc}\n{machine.look()}")
                return 1
    say(f"All of it works, in {time.monotonic() - started:.0f} s")
    return 0


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
