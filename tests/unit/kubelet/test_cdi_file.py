"""The runtime can read the CDI specifications that the device plugin writes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from virtshim.devices.cdi_spec import CdiSpec, parse_spec
from virtshim.devices.pools import Offer, Pool
from virtshim.devices.values import PciAddress
from virtshim.kubelet.device_plugin import specification, write_cdi_file

FIRST, SECOND = PciAddress.parse("0000:3d:01.0"), PciAddress.parse("0000:3d:01.1")


def read(*offers: Offer) -> CdiSpec:
    return parse_spec(json.dumps(specification(Pool("a.b/c", vendor="8086"), offers)).encode())


def test_a_function_alone_in_its_group_is_named_by_its_address() -> None:
    (device,) = read(Offer((FIRST,), group=7, numa=None)).devices
    assert device.address == FIRST
    assert [node.host_path for node in device.edits.nodes] == ["/dev/vfio/vfio", "/dev/vfio/7"]


def test_a_group_of_several_functions_is_granted_by_its_node_only() -> None:
    (device,) = read(Offer((FIRST, SECOND), group=7, numa=None)).devices
    assert device.address is None
    assert [node.host_path for node in device.edits.nodes] == ["/dev/vfio/vfio", "/dev/vfio/7"]


def _binary(path: Path) -> None:
    path.write_bytes(b"\xff\xfe" * 100)


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("there", [_binary, _pipe, _endless])
def test_the_cdi_file_replaces_whatever_is_at_its_path(tmp_path: Path, there) -> None:
    pool, offer = Pool("a.b/c", vendor="8086"), Offer((FIRST,), group=7, numa=None)
    path = tmp_path / "virtshim-a.b_c.json"
    there(path)
    write_cdi_file(str(tmp_path), pool, [offer])
    assert not path.is_symlink()
    assert json.loads(path.read_text()) == specification(pool, [offer])


def test_an_up_to_date_cdi_file_is_not_rewritten(tmp_path: Path) -> None:
    pool, offer = Pool("a.b/c", vendor="8086"), Offer((FIRST,), group=7, numa=None)
    write_cdi_file(str(tmp_path), pool, [offer])
    before = (tmp_path / "virtshim-a.b_c.json").stat().st_ino
    write_cdi_file(str(tmp_path), pool, [offer])
    assert [path.stat().st_ino for path in tmp_path.iterdir()] == [before]
