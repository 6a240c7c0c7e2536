"""A tenant who pulls many images whose registries never finish leaves places for others."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import os
import re
import resource
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from fakes.cri import Client, served
from fakes.registry import FakeRegistry, tar
from fakes.webserver import LOOPBACK, WebServer
from fakes.world import Outside
from podclient import wait_until

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.images.filestore import ImageFileStore, ImageSettings

pytestmark = pytest.mark.hostile

MANY = 60
# `images.namespace_pulls`, by default; of one pull here.
PLACES = 12
FILES, CHILD_MEMORY, CPU_SECONDS = 300, 96 << 20, 2.0
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.fixture
def node(tmp_path: Path) -> Iterator[tuple[Client, Path]]:
    outside: Any = Outside()
    outside.files = ImageFileStore(str(tmp_path / "images"), ImageSettings(insecure_registries=LOOPBACK))
    with served(tmp_path, outside) as (_, client, _):
        yield client, tmp_path / "images"


def pull(client: Client, image: str, namespace: str) -> str:
    """Pulls; returns the digest or the refusal's message."""
    pod = pb.PodSandboxConfig(metadata=pb.PodSandboxMetadata(name="a", namespace=namespace, uid="u"))
    request = pb.PullImageRequest(image=pb.ImageSpec(image=image), sandbox_config=pod)
    try:
        return str(client.PullImage(request).image_ref)
    except grpc.RpcError as exc:
        if exc.code() is EXHAUSTED:
            return f"refused: {exc.details()}"
        return "ended"


def endless(registry: FakeRegistry, repository: str, until: threading.Event) -> str:
    """An image whose last bytes come only after `until`."""
    plain = tar({f"files/{repository}-{n}": os.urandom(64) for n in range(FILES)})
    packed = gzip.compress(plain, 1)
    registry.manifest(repository, [(packed, plain)])
    path = f"/v2/{repository}/blobs/sha256:{hashlib.sha256(packed).hexdigest()}"
    registry.web.routes[path] = sends_all_but_the_end(packed, until)
    return registry.name(repository)


def sends_all_but_the_end(packed: bytes, until: threading.Event) -> Callable[[Any], None]:
    def route(request: Any) -> None:
        request.send_response(200)
        request.send_header("Content-Length", str(len(packed)))
        request.end_headers()
        request.wfile.write(packed[:-64])
        request.wfile.flush()
        until.wait(60)
        request.close_connection = True

    return route


def children() -> dict[int, int]:
    """The children of this process that unpack layers -> their resident bytes."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it, or one of them, has ended
            for pid in (task / "children").read_text().split():
                if b"\0layers\0" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    resident = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
                    found[int(pid)] = int(resident[1]) << 10 if resident else 0
    return found


def processor_seconds() -> float:
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def test_a_tenants_pulls_are_bounded_and_leave_places_for_others(web: WebServer, node: tuple[Client, Path]) -> None:
    """Bounds processes, memory, inodes and processor time of all pulls together."""
    client, images = node
    registry, until = FakeRegistry(web), threading.Event()
    honest = registry.push("honest", {"disk/a.img": b"\xeb\x3c" + os.urandom(1022)})
    names = [endless(registry, f"hostile{n}", until) for n in range(MANY)]
    used = processor_seconds()
    with ThreadPoolExecutor(MANY) as threads:
        try:
            pulls = [threads.submit(pull, client, name, "hostile") for name in names]
            wait_until(lambda: len(children()) + sum(one.done() for one in pulls) >= MANY, 60, "all have come that far")
            assert pull(client, honest, "honest").startswith("sha256:")
            found = children()
            assert len(found) <= PLACES
            assert sum(found.values()) <= PLACES * CHILD_MEMORY
            assert sum(1 for _ in images.rglob("*")) <= PLACES * (FILES + 20) + 100
        finally:
            until.set()
    refused = [said for one in pulls if (said := one.result()).startswith("refused")]
    assert len(refused) == MANY - PLACES
    assert "namespace hostile has 12 pulls under way, the limit for one namespace" in refused[0]
    assert "raise images.namespace_pulls" in refused[0]
    assert processor_seconds() - used < PLACES * CPU_SECONDS + MANY * 0.2


def test_pull_places_are_given_back(web: WebServer, node: tuple[Client, Path]) -> None:
    client, _ = node
    registry = FakeRegistry(web)
    for n in range(PLACES + 2):
        assert pull(client, registry.name(f"none{n}"), "a") == "ended"
    assert pull(client, registry.push("b", {"disk/a.img": b"\xeb\x3c" + os.urandom(1022)}), "a").startswith("sha256:")
