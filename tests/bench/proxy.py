"""Measures a call through `virtshim proxy` beside the same call through a bare grpc.aio (`pass_through.py`), and lists
beside the same lists without the proxy.

    python -m tests.bench.proxy [ROUNDS]     these figures alone

Stand-ins behind it answer at once, so the added time is the proxy's. Lists are measured twice: with an empty second
runtime, compared with the first one's own answer; and with half of the pods on each, compared with one call to each."""

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
    with _process("-m", "fakes.runtime", socket, "stand-in", str(pods)):
        yield


@contextlib.contextmanager
def _process(*words: str) -> Iterator[None]:
    """A Python program of its own, as runtimes and proxies are; it is ready."""
    paths = f"{PROJECT}:{PROJECT}/tests"
    with subprocess.Popen(
        [sys.executable, *words],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": paths},
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield
        assert process.stdin is not None
        process.stdin.close()


def proxy_figures(rounds: int) -> Figures:
    figures = Figures()
    with tempfile.TemporaryDirectory(prefix="vp-") as directory:
        one, two, half, other_half, bare = (
            f"{directory}/{name}.sock" for name in ("one", "two", "half", "other", "bare")
        )
        with _runtime(one, PODS), _runtime(two, 0), Proxy(Path(directory), one, two) as proxy:
            with _process(str(Path(__file__).with_name("pass_through.py")), bare, one):
                _beside_bare(rounds, bare, proxy.socket, figures)
            _beside_one(rounds, one, proxy.socket, figures)
        with (
            _runtime(half, PODS // 2),
            _runtime(other_half, PODS // 2),
            Proxy(Path(directory), half, other_half) as proxy,
        ):
            _beside_both(rounds, half, other_half, proxy.socket, figures)
    return figures


def _beside_bare(rounds: int, bare: str, proxy: str, figures: Figures) -> None:
    """A call that one runtime answers; Version would ask both."""
    with PodClient(proxy) as through, PodClient(bare) as passed:
        pod = through.pods()[0].id
        for number in range(-_WARM, rounds):
            plain, proxied = _pair(number, lambda: passed.pod_status(pod), lambda: through.pod_status(pod))
            if number >= 0:
                figures.add("proxy_ratio", proxied / plain, "ratio")


def _beside_one(rounds: int, primary: str, proxy: str, figures: Figures) -> None:
    with PodClient(proxy) as through, PodClient(primary) as direct:
        assert len(through.pods()) == PODS
        for _ in range(_WARM):
            _version(through)
            _version(direct)
        for number in range(rounds):
            plain, proxied = _pair(number, lambda: _version(direct), lambda: _version(through))
            figures.add("proxy_added_ms", proxied - plain, "ms")
            figures.add("phase_version_ms", plain, "ms")
            plain, proxied = _pair(number, direct.pods, through.pods)
            figures.add("proxy_list_500_one_ratio", proxied / plain, "ratio")
            figures.add("phase_proxy_list_500_one_added_ms", proxied - plain, "ms")
            figures.add("phase_list_500_ms", plain, "ms")


def _beside_both(rounds: int, primary: str, other: str, proxy: str, figures: Figures) -> None:
    """A client learns the pods of two runtimes by two calls, or by one call to the proxy."""
    with PodClient(proxy) as through, PodClient(primary) as first, PodClient(other) as second:
        assert len(through.pods()) == PODS
        for number in range(-_WARM, rounds):
            plain, proxied = _pair(number, lambda: (first.pods(), second.pods()), through.pods)
            if number >= 0:
                figures.add("proxy_list_500_ratio", proxied / plain, "ratio")


def _version(client: PodClient) -> None:
    client.runtime.Version(pb.VersionRequest(), timeout=60)


def _pair(number: int, first: Callable[[], object], second: Callable[[], object]) -> tuple[float, float]:
    """Measures both; the order alternates from round to round."""
    if number % 2:
        other = timed(second)
        return timed(first), other
    return timed(first), timed(second)


if __name__ == "__main__":
    found = proxy_figures(int(sys.argv[1]) if sys.argv[1:] else 400)
    for key, figure in found.document().items():
        print(key, figure)
