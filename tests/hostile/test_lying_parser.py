"""A taken-over child that unpacks layers cannot replace images of other tenants, even if it claims that foreign layers
match an image's config."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.cri import Client, served
from fakes.registry import FakeRegistry, tar
from fakes.webserver import LOOPBACK, WebServer
from fakes.world import Outside

import virtshim
from criproto.runtime_v1 import api_pb2 as pb
from virtshim.images import confinement
from virtshim.images.filestore import ImageFileStore, ImageSettings
from virtshim.model.ids import ImageDigest

pytestmark = [
    pytest.mark.hostile,
    pytest.mark.skipif(os.geteuid() != 0, reason="AREA hostile NOT TESTED: needs root, which is what is given up"),
]

PROJECT = Path(virtshim.__file__).parents[1]
LIE = "\ndef verified(chunks, diff, what):\n    yield from chunks\n"
DISK, KERNEL = b"\xeb\x3c" + bytes(1021) + b"v", b"the victim's kernel"
VICTIMS = {"disk/a.img": DISK, "etc/motd": b"the victim's"}
FILES_ALONE = {"etc/motd": b"the victim's"}
WITH_KERNEL = {**VICTIMS, "boot/vmlinuz": KERNEL}


class Node:
    def __init__(self, client: Client, store: ImageFileStore) -> None:
        self.client = client
        self.store = store

    def seen(self, reference: str) -> dict[str, bytes]:
        """The image as a pod sees it: its disk, and the files of a volume."""
        answer = self.client.ImageStatus(pb.ImageStatusRequest(image=pb.ImageSpec(image=reference), verbose=True))
        facts = json.loads(answer.info["info"])
        found = {}
        if "disk" in facts:
            found["disk"] = Path(self.store.path(ImageDigest(facts["disk"]))).read_bytes()
        root = Path(self.store.path(ImageDigest(facts["files"]), ""))
        return found | {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    store = ImageFileStore(str(tmp_path / "images"), ImageSettings(insecure_registries=LOOPBACK, max_bytes=64 << 20))
    outside: Any = Outside()
    outside.files = store
    with served(tmp_path, outside) as (_, client, _):
        yield Node(client, store)


@pytest.fixture
def taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """Inside the block, the code that unpacks layers accepts all of them."""
    copy = tmp_path / "virtshim-copy"
    for package in ("vmwrapper", "virtshim"):
        shutil.copytree(PROJECT / package, copy / package, ignore=shutil.ignore_patterns("__pycache__"))
    with (copy / "virtshim/images/confined/layers.py").open("a") as module:
        module.write(LIE)

    def begin() -> Any:
        context = pytest.MonkeyPatch.context()
        entered = context.__enter__()
        entered.setattr(confinement, "ROOT", str(copy))
        return context

    return begin


def push(registry: FakeRegistry, name: str, told: dict[str, bytes], brought: dict[str, bytes]) -> str:
    """An image with the config of `told` and the layer of `brought`."""
    registry.manifest(name, [(gzip.compress(tar(brought)), tar(told))])
    return registry.name(name)


ATTACKS = {
    "other files": (VICTIMS, {**VICTIMS, "etc/motd": b"the attacker's"}),
    "another disk": (VICTIMS, {**VICTIMS, "disk/a.img": bytes(1023) + b"a"}),
    "files and no disk": (FILES_ALONE, {"etc/motd": b"the attacker's"}),
    "a file more": (VICTIMS, {**VICTIMS, "etc/cron": b"the attacker's"}),
    "another kernel": (WITH_KERNEL, {**WITH_KERNEL, "boot/vmlinuz": b"the attacker's"}),
}


@pytest.mark.parametrize("first", ["the attacker", "the victim"])
@pytest.mark.parametrize("case", ATTACKS)
def test_another_tenants_image_keeps_its_content(
    node: Node, web: WebServer, taken_over: Callable[[], Any], case: str, first: str
) -> None:
    told, brought = ATTACKS[case]
    registry = FakeRegistry(web)
    victims, attackers = push(registry, "victim", told, told), push(registry, "attacker", told, brought)
    ids = {}
    for name in (attackers, victims) if first == "the attacker" else (victims, attackers, victims):
        lies = taken_over() if name == attackers else None
        try:
            ids[name] = node.client.pull(name)
        finally:
            if lies is not None:
                lies.__exit__(None, None, None)
    wanted = {path.replace("disk/a.img", "disk"): data for path, data in told.items()}
    for reference in (victims, ids[victims]):
        found = node.seen(reference)
        assert {path: found.get(path) for path in wanted} == wanted
        assert b"the attacker's" not in found.values()
    assert ids[attackers] != ids[victims]
