"""What `virtshim proxy` adds to a call, beside the same call without it, pair by pair.

    python -m tests.bench.proxy [ROUNDS]     these figures alone

Two stand-ins are behind it, the second with nothing to list. They answer at once: what is added is the proxy's.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    # Runs without pytest, whose `pythonpath` in pyproject.toml says the same.
    sys.path[:0] = [str(PROJECT / part) for part in ("", "deploy", "tests", "tests/e2e", "tests/bench")]

from fakes.proxy import Proxy  # noqa: E402  needs the path above
from figures import Figures, timed  # noqa: E402
from podclient import PodClient  # noqa: E402

from criproto.runtime_v1 import api_pb2 as pb  # noqa: E402

PODS = 500
_WARM = 50


@contextlib.contextmanager
def _runtime(socket: str, pods: int) -> Iterator[None]:
    """In a process of its own, as runtimes are."""
    paths = f"{PROJECT}:{PROJECT}/tests"
    with subprocess.Popen(
        [sys.executable, "-m", "fakes.runtime", socket, "stand-in", str(pods)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": paths},
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield
        assert process.stdin is not None
        process.stdin.close()


def proxy_rounds(rounds: int, figures: Figures) -> None:
    with tempfile.TemporaryDirectory(prefix="vp-") as directory:
        primary, other = f"{directory}/primary.sock", f"{directory}/other.sock"
        with (
            _runtime(primary, PODS),
            _runtime(other, 0),
            Proxy(Path(directory), primary, other) as proxy,
            PodClient(proxy.socket) as through,
            PodClient(primary) as direct,
        ):
            assert len(through.pods()) == PODS
            for _ in range(_WARM):
                _version(through)
                _version(direct)
            for number in range(rounds):
                plain, proxied = _pair(number, lambda: _version(direct), lambda: _version(through))
                figures.add("proxy_added_ms", proxied - plain, "ms")
                figures.add("phase_version_ms", plain, "ms")
                plain, proxied = _pair(number, direct.pods, through.pods)
                figures.add("proxy_list_500_ratio", proxied / plain, "ratio")
                figures.add("phase_proxy_list_500_added_ms", proxied - plain, "ms")
                figures.add("phase_list_500_ms", plain, "ms")


def _version(client: PodClient) -> None:
    client.runtime.Version(pb.VersionRequest(), timeout=60)


def _pair(number: int, first: Callable[[], object], second: Callable[[], object]) -> tuple[float, float]:
    """Which one goes first changes from round to round."""
    if number % 2:
        other = timed(second)
        return timed(first), other
    return timed(first), timed(second)


if __name__ == "__main__":
    found = Figures()
    proxy_rounds(int(sys.argv[1]) if sys.argv[1:] else 400, found)
    for key, figure in found.document().items():
        print(key, figure)
