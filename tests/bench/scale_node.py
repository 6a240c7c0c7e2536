"""Serves CRI for very many pods with the real server, services and records. VMs, disks and networks are stand-ins, but
a real tapmanager says whether pod networks can be made.

    scale_node.py DIRECTORY SOCKET PODS BUSY TAPMANAGER

The last BUSY pods' guests do not listen to their power button. Says READY, and ends with its standard input."""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import logging
import sys
from pathlib import Path
from typing import Any

import structlog

PROJECT = Path(__file__).resolve().parents[2]
# Runs without pytest, whose `pythonpath` in pyproject.toml says the same.
sys.path[:0] = [str(PROJECT), str(PROJECT / "tests")]

from fakes.changed import changed  # noqa: E402  needs the path above
from fakes.networks import FakePodNetworks  # noqa: E402
from fakes.world import Outside, World, container_config, sandbox_config  # noqa: E402

from virtshim.config.settings import Cri  # noqa: E402
from virtshim.model.container import Container  # noqa: E402
from virtshim.model.ids import ContainerId, SandboxId  # noqa: E402
from virtshim.pods.networks import PodNetworkClient  # noqa: E402
from virtshim.pods.tapmanager_connection import TapmanagerConnection  # noqa: E402


class Networks(FakePodNetworks):
    """Asks the real tapmanager what Status needs."""

    def __init__(self, tapmanager: str) -> None:
        super().__init__()
        self._client = PodNetworkClient(TapmanagerConnection(tapmanager))

    def trouble(self) -> str:
        return self._client.trouble()


def labels(number: int) -> dict[str, Any]:
    """Labels as kubelet and a usual Deployment set them."""
    return {
        "labels": {
            "app": f"web-{number % 20}",
            "pod-template-hash": f"{number:010x}",
            "io.kubernetes.pod.name": f"web-{number}",
            "io.kubernetes.pod.namespace": "default",
            "io.kubernetes.pod.uid": f"uid-{number}",
        },
        "annotations": {
            "kubernetes.io/config.seen": "2026-01-01T00:00:00.000000000Z",
            "kubernetes.io/config.source": "api",
            "io.kubernetes.container.hash": f"{number:08x}",
            "io.kubernetes.container.restartCount": "0",
        },
    }


def fill(world: World, pods: int, busy: int) -> None:
    """The services make one pod and the others are its copies; the busy ones are made one by one."""
    sandbox_id, container_id = world.running("first")
    sandbox, container = world.sandbox(sandbox_id), world.container(container_id)
    for number in range(pods - busy - 1):
        key = hashlib.sha256(str(number).encode()).hexdigest()
        made = dataclasses.replace(
            sandbox,
            id=SandboxId(key),
            key=dataclasses.replace(sandbox.key, name=f"web-{number}", uid=f"uid-{number}"),
            config=sandbox_config(**labels(number)),
            created_at=sandbox.created_at + 2 * number + 10,
        )
        world.records.sandboxes.add(made)
        world.records.containers.add(_container(container, made.id, key, number))
    for number in range(busy):
        world.running(f"busy-{number}")


def _container(like: Container, sandbox: SandboxId, key: str, number: int) -> Container:
    own = ContainerId(hashlib.sha256(key.encode()).hexdigest())
    return changed(
        like,
        id=own,
        sandbox_id=sandbox,
        config=container_config(**labels(number)),
        domain_uuid=str(own.domain_uuid()),
        created_at=like.created_at + 2 * number + 10,
    )


def main() -> None:
    directory, socket, pods, busy, tapmanager = sys.argv[1:]
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    outside = Outside(networks=Networks(tapmanager))
    outside.vms.shuts_down_after = None
    outside.clock.held = True
    world = World(Path(directory), outside, cri=Cri(socket=socket))
    fill(world, int(pods), int(busy))
    gc.freeze()  # as virtshim does
    server = world.app.server(world.settings)
    server.start()
    print("READY", flush=True)
    sys.stdin.read()
    outside.clock.advance(3600)
    server.stop(1)


if __name__ == "__main__":
    main()
