"""The output of `virtshim check --devices` over machines of all kinds matches golden files. GOLDEN_UPDATE=1 rewrites
them."""

import contextlib
import json
import os
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fakes.devices import FakeDeviceDrivers
from fakes.sysfs import BRIDGE, GPU, HOST_BRIDGE, NVME, QAT, FakeSysfs

from virtshim.cli.check import check_devices
from virtshim.devices.values import CardFunction, DeviceCondition, PciAddress
from virtshim.preflight.finding import Level
from virtshim.store import rows
from virtshim.store.read_only import read_claims, read_conditions

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "check_devices"
OWNER = "4f" * 32
BROKEN = DeviceCondition(PciAddress.parse("0000:3d:00.0"), 1_800_000_000 * 10**9, "it did not come out of it")


@pytest.fixture
def host(tmp_path: Path) -> FakeSysfs:
    return FakeSysfs(tmp_path / "host")


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.toml"
    path.write_text(f'paths.state_dir = "{tmp_path}"\n[devices]\nkeep = ["0000:5e:00.0"]\n')
    return str(path)


@pytest.fixture
def hold(tmp_path: Path) -> Iterator[Callable[..., None]]:
    """A container holds these claims, in a database that its daemon has open."""
    with contextlib.closing(sqlite3.connect(tmp_path / "state.db")) as database:
        database.execute("pragma journal_mode = wal")
        database.execute("create table claims (claim text primary key, container_id text not null)")
        database.execute("create table device_conditions (claim text primary key, document text not null)")
        document = rows.CONDITION.text(BROKEN)
        database.execute("insert into device_conditions values (?, ?)", (BROKEN.claim, document))

        def hold(*claims: str) -> None:
            database.executemany("insert into claims values (?, ?)", [(claim, OWNER) for claim in claims])
            database.commit()

        yield hold


def no_iommu(host: FakeSysfs) -> tuple[str, ...]:
    """Such as a VM in a cloud, or a machine whose BIOS has VT-d off."""
    host.pci("0000:00:00.0", class_code=HOST_BRIDGE)
    host.interface("eth0", host.pci("0000:00:03.0", driver="virtio-pci", vendor=0x1AF4, device=0x1041))
    host.default_route("eth0")
    home = host.pci("0000:00:04.0", driver="virtio-pci", vendor=0x1AF4, device=0x1042, class_code=0x010000)
    host.block("vda1", f"{home}/virtio1/block/vda/vda1", "254:1")
    host.mounted(("254:1", "/", "/dev/vda1"))
    return ()


def server(host: FakeSysfs) -> tuple[str, ...]:
    """A bit of everything: the node's own card and disk, VFs at either driver, a GPU, a group that is shared, a lost claim, a
    function that could not be reset, and one that is dead."""
    host.vfio()
    host.pci("0000:00:00.0", 0, class_code=HOST_BRIDGE)
    host.pci("0000:00:1f.0", 2, class_code=0x060100, driver="lpc_ich")
    host.pci("0000:3a:00.0", 1, class_code=BRIDGE, driver="pcieport")
    above = ("0000:3a:00.0",)
    home = host.pci("0000:3b:00.0", 20, driver="i40e", behind=above, total_vfs=64, node=0)
    host.interface("ens1f0", home)
    host.default_route("ens1f0")
    host.pci("0000:3b:02.0", 21, driver="vfio-pci", device=0x154C, behind=above, vf_of="0000:3b:00.0", node=0)
    home = host.pci("0000:3b:02.1", 22, driver="iavf", device=0x154C, behind=above, vf_of="0000:3b:00.0", node=0)
    host.interface("ens1f0v1", home)
    host.pci("0000:3d:00.0", 30, driver="4xxx", device=0x4940, class_code=QAT, total_vfs=16, node=0)
    home = host.pci("0000:5d:00.0", 31, driver="nvme", vendor=0x144D, device=0xA824, class_code=NVME)
    host.block("nvme0n1p1", f"{home}/nvme/nvme0/nvme0n1/nvme0n1p1", "259:1")
    host.mounted(("259:1", "/", "/dev/nvme0n1p1"))
    host.pci("0000:5e:00.0", 32, driver="nvme", vendor=0x144D, device=0xA824, class_code=NVME)
    host.pci("0000:65:00.0", 7, driver="vfio-pci", vendor=0x10DE, device=0x2204, class_code=GPU, node=1)
    host.pci("0000:65:00.1", 7, driver="snd_hda_intel", vendor=0x10DE, device=0x1AEF, class_code=0x040300, node=1)
    host.pci("0000:66:00.0", 41, driver="vfio-pci", vendor=0x10DE, device=0x2204, class_code=GPU, node=1)
    host.registers("0000:66:00.0", b"\xff" * 256)
    host.pci("10000:e1:00.0", 40, driver="vfio-pci", class_code=NVME, vfio_node=False)
    host.write("/var/lib/kubelet/pod-resources/kubelet.sock", "")
    host.write("/etc/cdi/good.yaml", "{cdiVersion: 1.0.0, kind: a.b/c, devices: [{name: x}]}")
    host.write("/var/run/cdi/bad.json", '{"cdiVersion": "7.0.0", "kind": "a.b/c", "devices": [{"name": "x"}]}')
    host.write("/run/libvirtd.pid", "812")
    host.write("/proc/812/limits", "Max locked memory         8589934592   8589934592   bytes\n")
    host.write("/proc/812/status", "CapEff:\t0000000000000000\n")
    return ("pci:0000:3b:02.0", "pci:0000:3b:0f.0", "usb:001/004")


@pytest.mark.parametrize(("machine", "code"), [(no_iommu, 1), (server, 0)])
def test_the_table_and_the_findings_match_the_golden_file(
    machine: Callable[[FakeSysfs], tuple[str, ...]],
    code: int,
    host: FakeSysfs,
    config: str,
    hold: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    hold(*machine(host))
    assert check_devices(config, files=host.files()) == code
    told = capsys.readouterr().out
    golden = GOLDEN / f"{machine.__name__}.txt"
    if os.environ.get("GOLDEN_UPDATE"):
        golden.write_text(told)
    assert told == golden.read_text()


def test_json_output_has_the_same_content(
    host: FakeSysfs, config: str, hold: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    hold(*server(host))
    assert check_devices(config, as_json=True, files=host.files()) == 0
    told = json.loads(capsys.readouterr().out)
    (vf,) = [row for row in told["devices"] if row["ADDRESS"] == "0000:3b:02.0"]
    assert (vf["FOR A VM"], vf["VFS"], vf["HELD BY"]) == ("yes", "VF 0 of ens1f0", OWNER[:12])
    assert {finding["check"] for finding in told["findings"]} == {"devices"}
    assert {finding["level"] for finding in told["findings"]} <= {level.value for level in Level}


def test_the_vlan_of_a_network_cards_vf_is_shown_if_tapmanager_knows_it(
    host: FakeSysfs, config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server(host)
    drivers = FakeDeviceDrivers()
    drivers.cards["0000:3b:02.1"] = CardFunction("iavf", "ens1f0", 1, {"vlan": 100, "protocol": "802.1ad"})
    assert check_devices(config, as_json=True, files=host.files(), drivers=drivers) == 0
    shown = {row["ADDRESS"]: row["VFS"] for row in json.loads(capsys.readouterr().out)["devices"]}
    assert (shown["0000:3b:02.0"], shown["0000:3b:02.1"]) == ("VF 0 of ens1f0", "VF 1 of ens1f0, VLAN 100 (802.1ad)")


def test_an_absent_tapmanager_is_asked_only_once(host: FakeSysfs, config: str) -> None:
    server(host)
    drivers = FakeDeviceDrivers()
    drivers.why_not = "it does not run"
    assert check_devices(config, files=host.files(), drivers=drivers) == 0
    assert drivers.asked == 1


def test_an_unreadable_database_only_hides_the_holders(
    host: FakeSysfs, config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server(host)
    (tmp_path / "state.db").write_text("no database, but long enough to be taken for a damaged one" * 20)
    assert check_devices(config, files=host.files()) == 0
    told = capsys.readouterr().out
    assert "warning claims" in told
    assert "0000:3b:02.0" in told


def test_a_database_older_than_claims_has_no_claims(tmp_path: Path) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / "state.db")) as database:
        database.execute("create table containers (id text)")
    assert read_claims(str(tmp_path / "state.db")) == {}
    assert read_conditions(str(tmp_path / "state.db")) == {}


def test_vfio_without_an_iommu_is_an_error_that_says_why(
    host: FakeSysfs, config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    host.pci("0000:3b:00.0", 9, driver="vfio-pci")
    host.write("/sys/kernel/iommu_groups/9/name", "vfio-noiommu\n")
    host.write("/sys/module/vfio/parameters/enable_unsafe_noiommu_mode", "Y\n")
    assert check_devices(config, files=host.files()) == 1
    assert (
        "enable_unsafe_noiommu_mode is set, and VMs cannot use the devices that it creates" in capsys.readouterr().out
    )


def test_devices_of_this_machine_are_shown_in_a_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("")
    assert check_devices(str(tmp_path / "c.toml")) in (0, 1)
    assert capsys.readouterr().out.startswith("ADDRESS")
