"""A real OpenTelemetry collector (rotel) that writes down what it receives."""

from __future__ import annotations

import re
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import rotel  # type: ignore[import-untyped]  # only its place is wanted

_PROGRAM = Path(rotel.__file__).with_name("rotel-agent")


@dataclass(frozen=True)
class Span:
    service: str
    name: str
    trace: str
    id: str
    parent: str
    text: str


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


class Collector:
    """`with Collector(directory) as collector: ... collector.endpoint`."""

    def __init__(self, directory: Path) -> None:
        self.endpoint = f"127.0.0.1:{_free_port()}"
        self._written = directory / "collector.log"
        self._directory = directory

    def __enter__(self) -> Self:
        with self._written.open("wb") as out:
            self._process = subprocess.Popen(
                [
                    str(_PROGRAM), "start", "--exporter", "blackhole", "--debug-log", "traces",
                    "--debug-log-verbosity", "detailed",
                    "--otlp-grpc-endpoint", self.endpoint, "--otlp-http-endpoint", f"127.0.0.1:{_free_port()}",
                    "--pid-file", f"{self._directory}/collector.pid",
                ],
                stdout=out, stderr=out, cwd=self._directory,
            )  # fmt: skip
        try:
            within_a_minute(self._listens)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(60)

    def _listens(self) -> bool:
        host, _, port = self.endpoint.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=1).close()
        except OSError:
            return False
        return True

    def spans(self) -> list[Span]:
        """All spans received so far."""
        found = []
        for resource in self._written.read_text().split("ResourceSpans #")[1:]:
            service = re.search(r"service\.name: Str\((.*)\)", resource)
            for text in re.split(r"^Span #\d+$", resource, flags=re.MULTILINE)[1:]:
                told = {
                    key.strip(): value.strip() for key, _, value in (line.partition(":") for line in text.splitlines())
                }
                found.append(
                    Span(
                        service[1] if service else "",
                        told["Name"],
                        told["Trace ID"],
                        told["ID"],
                        told["Parent ID"],
                        text,
                    )
                )
        return found


def within_a_minute(is_true: Callable[[], object]) -> None:
    until = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < until, "not within a minute"
        time.sleep(0.05)
