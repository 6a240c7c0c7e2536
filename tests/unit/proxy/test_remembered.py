"""What the proxy remembers is bounded; what is still used stays."""

from unittest.mock import Mock

import pytest

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.proxy import images, owners
from virtshim.proxy.images import Images
from virtshim.proxy.owners import Owners

pytestmark = pytest.mark.proxy


def config(name: str) -> bytes:
    return pb.PodSandboxConfig(metadata=pb.PodSandboxMetadata(name=name)).SerializeToString()


def test_a_pod_that_is_started_again_is_remembered_longer_than_one_that_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "_REMEMBERED", 2)
    remembered = Images(Mock(), [], Mock(), Mock(), 1)
    for name in ("first", "second", "first", "third"):
        remembered.remember_pod(config(name), Mock())
    assert [name for _, name, _ in remembered._pods] == ["first", "third"]


def test_an_id_that_is_asked_for_is_remembered_longer_than_one_that_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owners, "_REMEMBERED", 2)
    remembered = Owners([], Mock(), 1)
    remembered.remember("first", Mock())
    remembered.remember("second", Mock())
    assert remembered.remembered("first")
    remembered.remember("third", Mock())
    assert remembered.remembered("first")
    assert not remembered.remembered("second")
