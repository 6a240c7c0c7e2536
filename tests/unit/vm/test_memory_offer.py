"""A starting QEMU gets the file with its guest's memory from a socket."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tapmanager import protocol
from virtshim.vm.memory_offer import memory_offered


@pytest.mark.parametrize("shared", [True, False])
def test_vmwrapper_gets_the_memory_once_while_the_vm_starts(tmp_path: Path, shared: bool) -> None:
    path = str(tmp_path / "memory" / "x.sock")
    memory = os.memfd_create("memory")
    os.write(memory, b"of the guest")
    with memory_offered(path, memory, None, shared=shared):
        ok, (given,) = protocol.call(path, "memory", {}, 5.0)
        assert ok == {"shared": shared}
        assert os.pread(given, 100, 0) == b"of the guest"
        with pytest.raises(OSError):
            protocol.call(path, "memory", {}, 0.2)
    os.close(given)
    os.close(memory)
    assert not os.listdir(tmp_path / "memory")


def test_a_start_that_never_asks_leaves_nothing(tmp_path: Path) -> None:
    path = str(tmp_path / "x.sock")
    memory = os.memfd_create("memory")
    with memory_offered(path, memory, None, shared=False):
        assert os.stat(path).st_mode & 0o777 == 0o600
    os.close(memory)
    assert not os.listdir(tmp_path)
