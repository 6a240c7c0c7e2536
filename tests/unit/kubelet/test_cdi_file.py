"""The CDI specifications that the device plugin writes, as the runtime reads them."""

from __future__ import annotations

import json

from virtshim.devices.cdi_spec import CdiSpec, parse_spec
from virtshim.domain.device_pools import Offer, Pool
from virtshim.domain.devices import PciAddress
from virtshim.kubelet.cdi_file import specification

FIRST, SECOND = PciAddress.parse("0000:3d:01.0"), PciAddress.parse("0000:3d:01.1")


def read(*offers: Offer) -> CdiSpec:
    return parse_spec(json.dumps(specification(Pool("a.b/c", vendor="8086"), offers)).encode())


def test_a_function_with_a_group_of_its_own_is_named_by_its_address() -> None:
    (device,) = read(Offer((FIRST,), group=7, numa=None)).devices
    assert device.address == FIRST
    assert [node.host_path for node in device.edits.nodes] == ["/dev/vfio/vfio", "/dev/vfio/7"]


def test_a_group_of_several_functions_is_granted_by_its_node_alone() -> None:
    (device,) = read(Offer((FIRST, SECOND), group=7, numa=None)).devices
    assert device.address is None
    assert [node.host_path for node in device.edits.nodes] == ["/dev/vfio/vfio", "/dev/vfio/7"]
