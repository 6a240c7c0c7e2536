"""The report of a story, and the objects that its chapters use."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from cluster import Cluster
from fakes.kubelet import FakeKubelet
from fakes.pod_resources import FakePodResources
from node import Node
from podclient import PodClient


class Report:
    def __init__(self, path: str) -> None:
        self._file = open(path, "w", encoding="utf-8", buffering=1)  # noqa: SIM115
        self._begun = time.monotonic()

    @contextmanager
    def step(self, name: str) -> Iterator[dict[str, Any]]:
        """A step of the story; the block fills in the facts."""
        facts: dict[str, Any] = {}
        begun = time.monotonic()
        try:
            yield facts
        except BaseException as exc:
            facts["error"] = f"{exc!r}\n{traceback.format_exc()}"
            raise
        finally:
            now = time.monotonic()
            facts |= {"seconds": round(now - begun, 1), "at": round(now - self._begun, 1)}
            self._file.write(json.dumps({"step": name, **facts}) + "\n")


@dataclass(frozen=True)
class Stage:
    """`kubelet` and `books` are one kubelet's two sides: device plugins register with the one, the node asks the other what a
    container was granted."""

    report: Report
    node: Node
    client: PodClient
    cluster: Cluster
    kubelet: FakeKubelet
    books: FakePodResources
    full: bool
    """Also what tests marked `full` judge."""
