"""The settings become the port's rules on this machine."""

import contextlib
from pathlib import Path

import pytest

from virtshim.app.adapters import node_devices
from virtshim.config.settings import Devices, Settings
from virtshim.devices.host_files import HostFiles
from virtshim.devices.ports import Devices as DevicesPort
from virtshim.devices.resolve import device_rules
from virtshim.devices.values import DeviceRequest, GrantedDevices, PciAddress
from virtshim.model.errors import InvalidRequest, Unavailable


@pytest.mark.parametrize(("socket", "error"), [("", InvalidRequest), ("/nonexistent/kubelet.sock", Unavailable)])
def test_kubelet_is_asked_only_if_the_settings_say_so(socket: str, error: type[Exception], tmp_path: Path) -> None:
    settings = Settings(devices=Devices(pod_resources_socket=socket, cdi_dirs=(str(tmp_path),)))
    with contextlib.ExitStack() as stack:
        devices: DevicesPort = node_devices(settings, stack)
        assert devices.resolve(DeviceRequest("default", "vm", "c")) == GrantedDevices()
        with pytest.raises(error):
            devices.resolve(DeviceRequest("default", "vm", "c", envs={"PCIDEVICE_X": "0000:00:00.0"}))


def test_the_rules_follow_the_settings() -> None:
    settings = Settings(devices=Devices(bind=False, keep=("3b:00.0", "10000:e1:00.0")))
    rules = device_rules(settings, HostFiles())
    assert not rules.bind
    assert rules.keep == {PciAddress(0, 0x3B, 0, 0), PciAddress(0x10000, 0xE1, 0, 0)}


def test_an_invalid_address_to_keep_is_refused() -> None:
    with pytest.raises(ValueError, match="not a PCI address"):
        Devices(keep=("eth0",))
