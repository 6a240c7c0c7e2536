"""`virtshim device-plugin` offers the resources that settings and sysfs name, beside a kubelet."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.kubelet import FakeKubelet
from fakes.sysfs import BRIDGE, NVME, FakeSysfs

from virtshim.cli.device_plugin import candidates, device_plugin_command, pool_of
from virtshim.config.settings import Settings, load_settings
from virtshim.devices.function_health import AerCounts, FunctionHealth
from virtshim.devices.pools import Pool, offers
from virtshim.devices.values import DeviceCondition, PciAddress
from virtshim.model.errors import InvalidRequest, WrongState


@pytest.fixture
def directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="vs-dp-"))  # pytest's own are too long for sockets
    yield path
    shutil.rmtree(path)


def settings_with(tmp_path: Path, text: str) -> Settings:
    (tmp_path / "c.toml").write_text(text)
    return load_settings(str(tmp_path / "c.toml"))


def health_of(sysfs: FakeSysfs, *conditions: DeviceCondition) -> FunctionHealth:
    return FunctionHealth(AerCounts(sysfs.files()), lambda: {one.claim: one for one in conditions})


def test_a_pool_offers_the_vfs_of_its_pf_as_sysfs_shows_them(tmp_path) -> None:
    sysfs = FakeSysfs(tmp_path / "root")
    sysfs.pci("0000:65:00.0", 20, driver="nvme", class_code=NVME, vendor=0x144D, total_vfs=2)
    sysfs.pci("0000:65:00.1", 21, driver="vfio-pci", class_code=NVME, vendor=0x144D, vf_of="0000:65:00.0", node=1)
    sysfs.pci("0000:65:00.2", 22, driver="nvme", class_code=NVME, vendor=0x144D, vf_of="0000:65:00.0")
    sysfs.pci("0000:64:00.0", 21, driver="pcieport", class_code=BRIDGE, vendor=0x144D)
    (resource,) = settings_with(
        tmp_path, '[[device_plugin.resources]]\nname = "a.b/nvme"\npfs = ["65:00.0"]\n'
    ).device_plugin.resources
    first, second = offers(pool_of(resource), candidates(sysfs.files(), health_of(sysfs)))
    assert (first.id, first.group, first.numa, first.fault) == ("0000:65:00.1", 21, 1, "")
    assert (second.id, second.fault) == ("0000:65:00.2", "0000:65:00.2 is bound to nvme, not to vfio-pci")


def test_a_function_whose_group_the_node_uses_is_not_offered_as_healthy(tmp_path) -> None:
    sysfs = FakeSysfs(tmp_path / "root")
    sysfs.pci("0000:65:01.0", 4, driver="vfio-pci", class_code=NVME)
    sysfs.pci("0000:65:02.0", 4, driver="virtio-pci", class_code=NVME)
    sysfs.pci("0000:64:00.0", 4, driver="pcieport", class_code=BRIDGE)
    (resource,) = settings_with(
        tmp_path, '[[device_plugin.resources]]\nname = "a.b/nvme"\naddresses = ["65:01.0"]\n'
    ).device_plugin.resources
    (offer,) = offers(pool_of(resource), candidates(sysfs.files(), health_of(sysfs)))
    assert "also has 0000:65:02.0, which is bound to virtio-pci" in offer.fault


def test_a_function_kept_for_the_node_is_not_offered_as_healthy(tmp_path: Path) -> None:
    """The runtime would refuse it to every pod that kubelet sends here for it."""
    sysfs = FakeSysfs(tmp_path / "host")
    sysfs.pci("0000:65:01.0", 7, driver="vfio-pci", vendor=0x1B36)
    sysfs.pci("0000:65:02.0", 8, driver="vfio-pci", vendor=0x1B36)
    found = candidates(sysfs.files(), health_of(sysfs), {PciAddress.parse("0000:65:02.0")})
    assert [offer.fault for offer in offers(Pool("a.b/nvme", vendor="1b36"), found)] == [
        "",
        "0000:65:02.0 is reserved for the node (devices.keep)",
    ]


@pytest.mark.parametrize(
    ("resource", "fault"),
    [
        (
            'name = "nvme"\nvendor = "8086"',
            "name: 'nvme' is not a resource name that kubelet accepts; write domain/name",
        ),
        ('name = "node.kubernetes.io/nvme"\nvendor = "8086"', "is not a resource name that kubelet accepts"),
        ('name = "requests.a.b/c"\nvendor = "8086"', "is not a resource name that kubelet accepts"),
        ('name = "a.b/c"', "set vendor, pfs or addresses"),
        ('name = "a.b/c"\nvendor = "0x8086"', "vendor: '0x8086' is not a PCI id; write four lower-case hex digits"),
        ('name = "a.b/c"\npfs = ["65:00"]', "pfs[0]: not a PCI address"),
        ('name = "a.b/c"\naddresses = ["65:00.0"]\ndevices = ["37c9"]', "set vendor too"),
    ],
)
def test_an_invalid_resource_is_reported_by_its_key(tmp_path, resource, fault) -> None:
    with pytest.raises(InvalidRequest) as told:
        settings_with(tmp_path, f"[[device_plugin.resources]]\n{resource}\n")
    assert "device_plugin.resources[0]" in str(told.value)
    assert fault in str(told.value)


def test_a_duplicate_resource_is_an_error(tmp_path) -> None:
    twice = '[[device_plugin.resources]]\nname = "a.b/c"\nvendor = "8086"\n' * 2
    with pytest.raises(InvalidRequest, match=r"a\.b/c is listed twice"):
        settings_with(tmp_path, twice)


def test_without_its_run_directory_the_plugin_says_what_to_do(tmp_path: Path) -> None:
    text = '[paths]\nrun_dir = "/dev/null/run"\n[[device_plugin.resources]]\nname = "a.b/c"\nvendor = "8086"\n'
    (tmp_path / "c.toml").write_text(text)
    with pytest.raises(WrongState, match=r"/dev/null/run cannot be used: Not a directory; .* choose another path"):
        device_plugin_command(str(tmp_path / "c.toml"))


def test_resources_that_would_set_the_same_variable_are_refused(tmp_path: Path) -> None:
    both = "".join(f'[[device_plugin.resources]]\nname = "a.b/{name}"\nvendor = "8086"\n' for name in ("c.d", "C_D"))
    with pytest.raises(InvalidRequest, match=r"a\.b/c\.d and a\.b/C_D would set the same variable, PCIDEVICE_A_B_C_D,"):
        settings_with(tmp_path, both)


def test_a_resource_whose_socket_would_have_too_long_a_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidRequest, match=r"is too long: its socket .* would have 108 bytes, and a socket's path may have 107"
    ):
        settings_with(tmp_path, f'[[device_plugin.resources]]\nname = "a.b/{"c" * 58}"\nvendor = "8086"\n')


def test_with_nothing_to_offer_the_command_says_so(tmp_path) -> None:
    (tmp_path / "c.toml").write_text("")
    with pytest.raises(InvalidRequest, match=r"device_plugin\.resources is empty"):
        device_plugin_command(str(tmp_path / "c.toml"))


def test_the_program_registers_and_ends_with_its_signal(directory) -> None:
    (directory / "c.toml").write_text(
        f'[paths]\nrun_dir = "{directory}/run"\n[device_plugin]\ndirectory = "{directory}"\n'
        '[[device_plugin.resources]]\nname = "a.b/none"\nvendor = "ffff"\n'
    )
    kubelet = FakeKubelet(directory)
    kubelet.start()
    main = "import sys; from virtshim.cli.main import main; main()"
    plugin = subprocess.Popen(
        [sys.executable, "-c", main, "device-plugin", "--config", str(directory / "c.toml")], stderr=subprocess.PIPE
    )
    try:
        until = time.monotonic() + 30
        while not ("a.b/none" in kubelet.plugins and kubelet.plugins["a.b/none"].lists):
            assert time.monotonic() < until, "it did not register within 30 s"
            assert plugin.poll() is None
            time.sleep(0.02)
        assert kubelet.plugins["a.b/none"].lists == [{}]
        second = subprocess.run(plugin.args, stderr=subprocess.PIPE, text=True, check=False, timeout=30)
        assert (second.returncode, f"(pid {plugin.pid})" in second.stderr) == (75, True), second.stderr
        plugin.send_signal(signal.SIGTERM)
        _, said = plugin.communicate(timeout=30)
    finally:
        plugin.kill()
        plugin.wait()
        kubelet.stop()
    assert plugin.returncode == 0, said
    assert b"plugin.stopped" in said
    assert not list(directory.glob("virtshim-*.sock"))
