"""QEMU's answers about a guest's memory on its way, also those of a QEMU that its guest has taken over."""

import contextlib
import json
import uuid
from collections.abc import Iterator
from typing import Any, cast

import libvirt_qemu
import pytest

from virtshim.model.errors import InternalError
from virtshim.model.ids import ContainerId
from virtshim.vm.connection import Connection
from virtshim.vm.domain_xml import NodeProfile
from virtshim.vm.elements.processors import Cgroups, DomainType
from virtshim.vm.memory_streams import LibvirtMemoryStreams
from virtshim.vm.streams import StreamState

VM = uuid.UUID(int=7)
CONTAINER = ContainerId("a" * 64)
PROFILE = NodeProfile("node", DomainType.KVM, "/usr/lib/virtshim/vmwrapper", "/usr/bin/qemu-system-x86_64", Cgroups.OFF)


class Streams(LibvirtMemoryStreams):
    @contextlib.contextmanager
    def _using(self, domain: uuid.UUID, doing: str, container: ContainerId | None = None) -> Iterator[Any]:
        yield self

    def isActive(self) -> bool:  # noqa: N802
        return True


@pytest.fixture
def streams() -> Streams:
    return Streams(cast("Connection", None), PROFILE)


def answers(monkeypatch: pytest.MonkeyPatch, answer: object) -> None:
    monkeypatch.setattr(libvirt_qemu, "qemuMonitorCommand", lambda *_: json.dumps(answer))


def test_the_state_of_a_stream(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, {"return": {"status": "pre-switchover", "ram": {"remaining": 5}}})
    assert streams.state(VM, CONTAINER) == StreamState(stopped=True, left=5)
    answers(monkeypatch, {"return": {"status": "failed", "error-desc": "no room"}})
    assert "no room" in streams.state(VM, CONTAINER).failed


@pytest.mark.parametrize(
    "answer",
    [
        {"return": {"status": "active", "ram": "none"}},
        {"return": {"status": "active", "ram": {"remaining": []}}},
        {"return": {"status": "active", "ram": {"remaining": float("inf")}}},
        {"error": "no"},
        {"error": {}},
    ],
)
def test_an_unreadable_answer_is_an_error_of_that_vm(
    streams: Streams, monkeypatch: pytest.MonkeyPatch, answer: object
) -> None:
    answers(monkeypatch, answer)
    with pytest.raises(InternalError, match=f"QEMU of VM {VM}"):
        streams.state(VM, CONTAINER)


@pytest.mark.parametrize("answer", [{"return": {"qemu": 9}}, {"return": {"qemu": {"major": None}}}])
def test_an_unreadable_version_is_an_error_of_that_vm(
    streams: Streams, monkeypatch: pytest.MonkeyPatch, answer: object
) -> None:
    answers(monkeypatch, answer)
    with pytest.raises(InternalError, match=f"QEMU of VM {VM}"):
        streams.needs(VM, CONTAINER)
