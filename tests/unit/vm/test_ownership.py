"""The owner mark in a domain's definition is read back unchanged, or refused."""

from __future__ import annotations

import pytest

from virtshim.model.errors import InvalidRequest
from virtshim.model.ids import ContainerId, SandboxId
from virtshim.vm.ownership import OwnerMark, node_of, read_mark


def test_the_mark_is_read_back_unchanged() -> None:
    wanted = OwnerMark("node-1", ContainerId("a" * 64), SandboxId("b" * 64))
    # libvirt drops the namespace declaration.
    text = f'<owner node="node-1" container="{"a" * 64}" sandbox="{"b" * 64}"/>'
    assert read_mark(text) == wanted
    assert node_of(text) == "node-1"


@pytest.mark.parametrize("text", ["", "<owner", '<owner node="n"/>', '<owner node="n" container="x" sandbox="y"/>'])
def test_a_damaged_mark_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        read_mark(text)
