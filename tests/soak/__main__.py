"""`make soak` runs pod cycles for some minutes, the second half of them with random kills of the daemons. It prints
what failed, leaked and grew. The exit code is 1 if anything failed or leaked."""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"  # before grpc is imported
PROJECT = Path(__file__).resolve().parents[2]
# Runs without pytest, whose `pythonpath` in pyproject.toml says the same.
sys.path[:0] = [str(PROJECT / part) for part in ("deploy", "tests", "tests/e2e", "tests/faults", "tests/soak")]

from cycles import Soak  # noqa: E402
from imageserver import serve_directory  # noqa: E402
from mortal_node import MortalNode  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="ends after so many minutes")
    parser.add_argument("--cycles", type=int, default=0, help="ends after so many cycles instead")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    options = parser.parse_args()
    print(f"soak: seed {options.seed}")
    directory = tempfile.mkdtemp(prefix="virtshim-soak-", dir="/var/tmp")
    os.chmod(directory, 0o711)
    try:
        with serve_directory(PROJECT / "build") as url:
            node = MortalNode(f"{directory}/n", url.removeprefix("http://"))
            try:
                node.up()
                node.start_bystander()
                soak = Soak(node, random.Random(options.seed))
                started = time.monotonic()

                def share() -> float:
                    if options.cycles:
                        return soak.cycles / options.cycles
                    return (time.monotonic() - started) / (60 * options.minutes)

                soak.run(share)
                report = soak.report()
            finally:
                node.end()
    finally:
        shutil.rmtree(directory)
    print(json.dumps(report, indent=2))
    return 1 if report["failures"] or report["leaks"] else 0


if __name__ == "__main__":
    sys.exit(main())
