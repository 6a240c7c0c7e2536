"""A VM gets the devices that kubelet granted. Each test's request is what a device plugin in the field sends."""

import contextlib
from collections.abc import Mapping
from typing import Any

import pytest
from fakes.sysfs import BRIDGE, QAT, FakeSysfs
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from virtshim.devices.cdi_directories import CdiDirectories
from virtshim.devices.grants import Authority, chosen, forged, hints, in_order
from virtshim.devices.host_files import NodeKind
from virtshim.devices.pools import Offer, Pool
from virtshim.devices.resolve import Resolver
from virtshim.devices.values import (
    BlockDevice,
    CriDevice,
    DeviceRequest,
    GrantedDevices,
    KubeletGrant,
    MediatedDevice,
    PciAddress,
    PciFunction,
    UsbDevice,
    VdpaDevice,
)
from virtshim.kubelet.device_plugin import cdi_file_qualified_name, write_cdi_file
from virtshim.model.errors import InvalidRequest, Unavailable

VF1, VF2, PF = "0000:3b:02.0", "0000:3b:02.1", "0000:3b:00.0"
UUID = "83b8f4f2-509f-382f-3c1e-e6bfe0fa1001"
VFIO = "/dev/vfio/vfio"


class Kubelet:
    """`grants` of the one container there is; `trouble`: why it cannot be asked."""

    def __init__(self, *grants: KubeletGrant, trouble: str = "") -> None:
        self.grants = grants
        self.trouble = trouble
        self.asked = 0

    def granted(self, namespace: str, pod: str, container: str) -> tuple[KubeletGrant, ...]:
        self.asked += 1
        if self.trouble:
            raise Unavailable(self.trouble)
        return self.grants

    def own_containers(self, namespace: str, pod: str) -> tuple[str, ...] | None:
        return ("c",) if self.granted(namespace, pod, "c") else None


def grant(resource: str, *ids: str, of_pod: bool = False) -> KubeletGrant:
    return KubeletGrant(resource, ids, of_pod)


def resolve(
    host: FakeSysfs,
    *nodes: str,
    kubelet: Kubelet | None = None,
    envs: Mapping[str, str] | None = None,
    cdi: tuple[str, ...] = (),
) -> GrantedDevices:
    files = host.files()
    resolver = Resolver(files, CdiDirectories(("/etc/cdi", "/var/run/cdi"), files), kubelet)
    devices = tuple(CriDevice(node, node) for node in nodes)
    return resolver.resolve(DeviceRequest("default", "vm", "c", devices, cdi, envs or {}))


def addresses(granted: GrantedDevices) -> list[str]:
    return [str(device.address) for device in granted.passthrough if isinstance(device, PciFunction)]


def function(address: str, resource: str = "") -> PciFunction:
    return PciFunction(PciAddress.parse(address), resource)


@pytest.fixture
def vfs(host: FakeSysfs) -> FakeSysfs:
    """Two VFs at vfio-pci, each with a group of its own."""
    host.pci(PF, 40, driver="ixgbe", total_vfs=8)
    host.pci(VF1, 41, driver="vfio-pci", vf_of=PF)
    host.pci(VF2, 42, driver="vfio-pci", vf_of=PF)
    return host


# --- device plugins


def test_sriov_plugin_a_vf_and_a_block_volume_of_one_pod_both_arrive(vfs: FakeSysfs) -> None:
    vfs.node("/dev/nbd0", NodeKind.BLOCK)
    kubelet = Kubelet(grant("intel.com/vfs", VF1))
    envs = {"PCIDEVICE_INTEL_COM_VFS": VF1, "PCIDEVICE_INTEL_COM_VFS_INFO": '{"0000:3b:02.0":{}}'}
    granted = resolve(vfs, VFIO, "/dev/vfio/41", "/dev/nbd0", kubelet=kubelet, envs=envs)
    assert granted.passthrough == (function(VF1, "intel.com/vfs"),)
    assert granted.blocks == (BlockDevice("/dev/nbd0", "/dev/nbd0"),)


def test_qat_plugin_the_order_of_its_variables_means_nothing(vfs: FakeSysfs) -> None:
    one = {"QAT0": VF1, "QAT1": VF2}
    other = {"QAT0": VF2, "QAT1": VF1}
    kubelet = Kubelet(grant("qat.intel.com/generic", VF2, VF1))
    granted = [
        resolve(vfs, *nodes, kubelet=kubelet, envs=envs)
        for nodes, envs in (
            ((VFIO, "/dev/vfio/42", "/dev/vfio/41"), one),
            (("/dev/vfio/41", "/dev/vfio/42", VFIO), other),
        )
    ]
    assert granted[0] == granted[1]
    assert addresses(granted[0]) == [VF1, VF2]
    assert {device.resource for device in granted[0].passthrough} == {"qat.intel.com/generic"}


def test_kubevirt_plugin_grants_groups_and_names_nodes_twice(vfs: FakeSysfs) -> None:
    host = vfs
    host.cdev("vfio0", f"/sys/devices/pci0000:00/{VF1}")
    kubelet = Kubelet(grant("devices.kubevirt.io/nic", "41"))
    envs = {"PCI_RESOURCE_DEVICES_KUBEVIRT_IO_NIC": f"{VF1},"}
    granted = resolve(host, VFIO, "/dev/vfio/41", "/dev/vfio/devices/vfio0", kubelet=kubelet, envs=envs)
    assert granted.passthrough == (function(VF1, "devices.kubevirt.io/nic"),)


def test_nvidia_plugin_gets_the_gpu_that_it_names_and_not_its_siblings(host: FakeSysfs) -> None:
    gpu, audio = "0000:65:00.0", "0000:65:00.1"
    for minor, address in enumerate((gpu, audio)):
        host.cdev(f"vfio{minor}", host.pci(address, 7, driver="vfio-pci"), minor=minor)
    host.node("/dev/iommu")
    envs = {"PCI_RESOURCE_NVIDIA_COM_GA102": gpu}
    nodes = (VFIO, "/dev/vfio/7", "/dev/vfio/devices/vfio0", "/dev/vfio/devices/vfio1", "/dev/iommu")
    assert addresses(resolve(host, *nodes, envs=envs)) == [gpu]


def test_nvidia_vgpu_plugin_grants_a_directory_and_kubelets_list_names_the_vgpu(host: FakeSysfs) -> None:
    host.vfio(12)
    host.mdev(UUID, 12, host.pci("0000:65:00.0", driver="nvidia"))
    envs = {"MDEV_PCI_RESOURCE_NVIDIA_COM_GRID": UUID.upper()}
    granted = resolve(host, "/dev/vfio", kubelet=Kubelet(grant("nvidia.com/GRID", UUID)), envs=envs)
    assert granted.passthrough == (MediatedDevice(UUID, "nvidia.com/GRID"),)


def test_kubevirt_mdev_plugin_grants_the_group_of_the_mediated_device(host: FakeSysfs) -> None:
    host.vfio(12)
    host.mdev(UUID, 12, host.pci("0000:65:00.0", driver="nvidia"))
    granted = resolve(host, VFIO, "/dev/vfio/12", envs={"MDEV_PCI_RESOURCE_X": f"{UUID},"})
    assert granted.passthrough == (MediatedDevice(UUID),)


def test_usb_plugin_gives_the_devices_behind_the_nodes(host: FakeSysfs) -> None:
    host.node("/dev/bus/usb/001/014")
    host.node("/dev/bus/usb/002/003")
    envs = {"USB_RESOURCE_KUBEVIRT_IO_STORAGE": "1:14,2:3,"}
    granted = resolve(host, "/dev/bus/usb/002/003", "/dev/bus/usb/001/014", envs=envs)
    assert granted.passthrough == (UsbDevice(1, 14), UsbDevice(2, 3))


def test_sriov_plugin_in_vdpa_mode_gets_the_vdpa_device_and_not_the_vf_below_it(host: FakeSysfs) -> None:
    home = host.pci(PF, 40, driver="mlx5_core")
    home = host.pci(VF1, 41, driver="mlx5_core", vf_of=PF)
    host.node("/dev/vhost-vdpa-0", major=240, minor=0)
    host.path(f"{home}/vdpa0/vhost-vdpa-0").mkdir(parents=True)
    host.link("/sys/dev/char/240:0", f"{home}/vdpa0/vhost-vdpa-0")
    kubelet = Kubelet(grant("mellanox.com/vdpa", VF1))
    granted = resolve(host, "/dev/vhost-vdpa-0", kubelet=kubelet, envs={"PCIDEVICE_MELLANOX_COM_VDPA": VF1})
    assert granted.passthrough == (VdpaDevice("/dev/vhost-vdpa-0", "mellanox.com/vdpa"),)


def test_sriov_plugin_in_kernel_mode_has_no_node_and_kubelets_list_is_the_grant(host: FakeSysfs) -> None:
    host.pci(PF, 40, driver="ixgbe")
    host.pci(VF1, 41, driver="iavf", vf_of=PF)
    kubelet = Kubelet(grant("intel.com/vfs", VF1))
    granted = resolve(host, kubelet=kubelet, envs={"PCIDEVICE_INTEL_COM_VFS": VF1})
    assert granted.passthrough == (function(VF1, "intel.com/vfs"),)


def test_sriov_plugin_with_cdi_names_the_vf_in_a_specification(vfs: FakeSysfs) -> None:
    vfs.write(
        "/var/run/cdi/sriov-dp-x.yaml",
        f"""
cdiVersion: 0.5.0
kind: intel.com/net-pci
devices:
- name: "{VF1}"
  containerEdits:
    deviceNodes: [{{path: /dev/vfio/vfio}}, {{path: /dev/vfio/41}}]
""",
    )
    envs = {"PCIDEVICE_INTEL_COM_VFS": VF1}
    assert addresses(resolve(vfs, envs=envs, cdi=(f"intel.com/net-pci={VF1}",))) == [VF1]


def test_a_cdi_annotation_bdf_chooses_in_its_group_or_grants_alone(host: FakeSysfs) -> None:
    for address in ("0000:65:00.0", "0000:65:00.1"):
        host.pci(address, 7, driver="vfio-pci")
    host.pci("0000:66:00.0", 8, driver="nvidia")
    host.write(
        "/etc/cdi/gpu.json",
        """{"cdiVersion": "0.6.0", "kind": "nvidia.com/pgpu", "devices": [
        {"name": "0", "annotations": {"bdf": "0000:65:00.0"}, "containerEdits": {"deviceNodes": [{"path": "/dev/vfio/7"}]}},
        {"name": "1", "annotations": {"bdf": "0000:66:00.0"}, "containerEdits": {}}]}""",
    )
    assert addresses(resolve(host, cdi=("nvidia.com/pgpu=0", "nvidia.com/pgpu=1"))) == ["0000:65:00.0", "0000:66:00.0"]


@pytest.mark.parametrize("cdi", [True, False])
def test_virtshims_own_plugin_gives_a_group_whole(card: FakeSysfs, cdi: bool) -> None:
    pool = Pool("virtshim.io/qat")
    functions = tuple(PciAddress.parse(address) for address in ("10000:e1:00.0", "10000:e1:00.1"))
    offer = Offer(functions, group=3, numa=None)
    kubelet = Kubelet(grant(pool.resource, offer.id))
    envs = {pool.variable: ",".join(map(str, functions))}
    if cdi:
        card.path("/var/run/cdi").mkdir(parents=True)
        write_cdi_file(str(card.path("/var/run/cdi")), pool, [offer])
        granted = resolve(card, kubelet=kubelet, envs=envs, cdi=(cdi_file_qualified_name(pool, offer),))
    else:
        granted = resolve(card, *offer.nodes, kubelet=kubelet, envs=envs)
    assert addresses(granted) == [str(address) for address in functions]
    assert {device.resource for device in granted.passthrough} == {"virtshim.io/qat"}


# --- groups


@pytest.fixture
def card(host: FakeSysfs) -> FakeSysfs:
    """A card of two functions and the bridge before it, all one group; the PCI domain is long."""
    host.pci("10000:e0:00.0", 3, class_code=BRIDGE, driver="pcieport")
    for address in ("10000:e1:00.0", "10000:e1:00.1"):
        host.pci(address, 3, driver="vfio-pci", class_code=QAT)
    return host


def test_a_group_gives_all_its_endpoints_and_no_bridge(card: FakeSysfs) -> None:
    assert addresses(resolve(card, VFIO, "/dev/vfio/3")) == ["10000:e1:00.0", "10000:e1:00.1"]


def test_a_hint_chooses_in_a_group(card: FakeSysfs) -> None:
    assert addresses(resolve(card, VFIO, "/dev/vfio/3", envs={"PCI_RESOURCE_X": "10000:E1:00.1"})) == ["10000:e1:00.1"]


def test_kubelets_list_chooses_in_a_group_without_any_hint(card: FakeSysfs) -> None:
    granted = resolve(card, VFIO, "/dev/vfio/3", kubelet=Kubelet(grant("x.com/y", "10000:e1:00.0")))
    assert addresses(granted) == ["10000:e1:00.0"]


def test_a_single_cdev_of_a_group_gives_that_function_alone(card: FakeSysfs) -> None:
    card.cdev("vfio1", "/sys/devices/pci10000:00/10000:e1:00.1")
    assert addresses(resolve(card, "/dev/vfio/devices/vfio1")) == ["10000:e1:00.1"]


def test_devices_are_sorted_by_resource_and_then_by_place(vfs: FakeSysfs) -> None:
    vfs.pci("0000:5e:00.0", 50, driver="vfio-pci")
    kubelet = Kubelet(grant("a.com/z", "0000:5e:00.0"), grant("b.com/a", VF2, VF1))
    granted = resolve(vfs, "/dev/vfio/42", "/dev/vfio/50", "/dev/vfio/41", kubelet=kubelet)
    assert addresses(granted) == ["0000:5e:00.0", VF1, VF2]


# --- forged hints


@pytest.mark.parametrize("variable", ["PCIDEVICE_X", "PCI_RESOURCE_X", "QAT7"])
def test_a_variable_that_names_another_device_is_refused_and_logged_as_a_security_event(
    vfs: FakeSysfs, variable: str
) -> None:
    vfs.pci("0000:00:1f.2", 9, driver="ahci")
    with capture_logs() as logs, pytest.raises(InvalidRequest) as error:
        resolve(
            vfs,
            VFIO,
            "/dev/vfio/41",
            kubelet=Kubelet(grant("intel.com/vfs", VF1)),
            envs={variable: f"{VF1},0000:00:1f.2"},
        )
    assert f"the variable {variable} names 0000:00:1f.2, which this container was not granted" in str(error.value)
    assert "default/vm" in str(error.value)
    assert [entry for entry in logs if entry["event"] == "security.forged_device"] == [
        {
            "event": "security.forged_device",
            "log_level": "warning",
            "namespace": "default",
            "pod": "vm",
            "container": "c",
            "variable": variable,
            "device": "0000:00:1f.2",
        }
    ]


def test_at_most_ten_forged_devices_are_reported(host: FakeSysfs) -> None:
    many = ",".join(f"0000:{bus:02x}:00.0,0000:{bus:02x}:00.0" for bus in range(256))
    with capture_logs() as logs, pytest.raises(InvalidRequest) as error:
        resolve(host, kubelet=Kubelet(), envs={"PCIDEVICE_X": many})
    assert len(logs) == 10
    assert str(error.value).count("not granted") == 10


def test_a_forged_variables_name_is_truncated_in_the_report(host: FakeSysfs) -> None:
    """Its author may make it as long as a pod can be."""
    with capture_logs() as logs, pytest.raises(InvalidRequest) as caught:
        resolve(host, envs={f"PCIDEVICE_{'X' * 1_000_000}": PF})
    assert len(str(caught.value)) < 1000
    assert [len(entry["variable"]) for entry in logs if entry["event"] == "security.forged_device"] == [200]


@pytest.mark.parametrize(
    ("variable", "value"), [("MDEV_PCI_RESOURCE_X", UUID), ("USB_RESOURCE_X", "1:2"), ("PCIDEVICE_X", "3b:02.1")]
)
def test_other_kinds_of_devices_cannot_be_forged_either(vfs: FakeSysfs, variable: str, value: str) -> None:
    vfs.mdev(UUID, 12, "/sys/devices/pci0000:00/0000:3b:00.0")
    with pytest.raises(InvalidRequest, match=f"{variable} names {value}, which this container was not granted"):
        resolve(vfs, VFIO, "/dev/vfio/41", envs={variable: value})


def test_a_forged_vgpu_beside_a_granted_one_is_refused(host: FakeSysfs) -> None:
    other = UUID.replace("1001", "1002")
    for group, uuid in ((12, UUID), (13, other)):
        host.mdev(uuid, group, host.pci("0000:65:00.0", driver="nvidia"))
    host.vfio()
    with pytest.raises(InvalidRequest, match=other):
        resolve(host, "/dev/vfio", kubelet=Kubelet(grant("n/g", UUID)), envs={"MDEV_PCI_RESOURCE_N_G": other})


def test_without_kubelet_a_function_without_a_node_is_an_error_that_can_be_retried(host: FakeSysfs) -> None:
    host.pci(VF1, 41, driver="iavf")
    with capture_logs() as logs, pytest.raises(Unavailable, match="was granted are unknown: kubelet is away"):
        resolve(host, kubelet=Kubelet(trouble="kubelet is away"), envs={"PCIDEVICE_X": VF1})
    assert [entry["event"] for entry in logs] == ["devices.kubelet_not_asked"]


def test_where_kubelet_is_never_asked_a_function_without_a_node_is_refused(host: FakeSysfs) -> None:
    host.pci(VF1, 41, driver="iavf")
    with pytest.raises(
        InvalidRequest, match=r"not granted \(kubelet is not asked \(devices.pod_resources_socket is empty"
    ):
        resolve(host, envs={"PCIDEVICE_X": VF1})


def test_granted_nodes_are_enough_while_kubelet_is_away(vfs: FakeSysfs) -> None:
    granted = resolve(vfs, VFIO, "/dev/vfio/41", kubelet=Kubelet(trouble="away"), envs={"PCIDEVICE_X": VF1})
    assert granted.passthrough == (function(VF1),)


def test_only_kubelets_list_can_name_the_vgpu(host: FakeSysfs) -> None:
    host.vfio()
    envs = {"MDEV_PCI_RESOURCE_X": UUID}
    with pytest.raises(Unavailable):
        resolve(host, "/dev/vfio", kubelet=Kubelet(trouble="away"), envs=envs)
    with pytest.raises(InvalidRequest, match="nothing says which mediated device"):
        resolve(host, "/dev/vfio")
    with pytest.raises(InvalidRequest, match=r"/dev/vfio \(a/b\): .*kubelet lists none for this container"):
        resolve(host, "/dev/vfio", kubelet=Kubelet(grant("a/b", "0")))


def test_a_specification_that_names_more_than_it_grants_is_no_security_event(vfs: FakeSysfs) -> None:
    vfs.write(
        "/etc/cdi/x.yaml",
        f"{{cdiVersion: 1.0.0, kind: a.b/c, devices: [{{name: x, containerEdits: {{env: ['PCIDEVICE_X={VF2}']}}}}]}}",
    )
    with capture_logs() as logs, pytest.raises(InvalidRequest, match=r"CDI: /etc/cdi/x\.yaml sets PCIDEVICE_X"):
        resolve(vfs, "/dev/vfio/41", cdi=("a.b/c=x",))
    assert logs == []


# --- kubelet's list


def test_kubelet_is_not_asked_for_an_ordinary_pod(host: FakeSysfs) -> None:
    kubelet = Kubelet(trouble="away")
    host.node("/dev/sdb", NodeKind.BLOCK)
    host.node("/dev/kvm")
    granted = resolve(host, "/dev/sdb", "/dev/kvm", kubelet=kubelet, envs={"PATH": "/bin", "PCIDEVICE_X": "no address"})
    assert granted == GrantedDevices(blocks=(BlockDevice("/dev/sdb", "/dev/sdb"),))
    assert kubelet.asked == 0


def test_a_physical_function_at_a_kernel_driver_also_needs_a_hint(host: FakeSysfs) -> None:
    host.pci(PF, 40, driver="nvme")
    host.pci("0000:3c:00.0", 41, driver="vfio-pci")
    kubelet = Kubelet(grant("x.com/y", PF))
    assert addresses(resolve(host, "/dev/vfio/41", kubelet=kubelet)) == ["0000:3c:00.0"]
    assert addresses(resolve(host, kubelet=kubelet, envs={"PCIDEVICE_X": PF})) == [PF]


def test_an_init_container_gets_the_devices_of_its_pod_that_it_names(host: FakeSysfs) -> None:
    host.pci(PF, 40, driver="ixgbe")
    for group, address in ((41, VF1), (42, VF2)):
        host.pci(address, group, driver="iavf", vf_of=PF)
    kubelet = Kubelet(grant("intel.com/vfs", VF1, VF2, of_pod=True))
    assert addresses(resolve(host, kubelet=kubelet, envs={"PCIDEVICE_INTEL_COM_VFS": VF2})) == [VF2]


def test_device_ids_that_are_no_pci_functions_are_left_out(vfs: FakeSysfs) -> None:
    kubelet = Kubelet(grant("x.com/y", "mlx5_core.sf.4", "0000:ff:00.0", "3", VF1))
    assert addresses(resolve(vfs, "/dev/vfio/41", kubelet=kubelet)) == [VF1]


# --- what cannot be given


def test_every_fault_is_in_one_message_with_the_resource(host: FakeSysfs) -> None:
    host.node("/dev/uio0")
    host.vfio(9)
    with pytest.raises(InvalidRequest) as error:
        resolve(host, "/dev/uio0", "/dev/vfio/9", kubelet=Kubelet(grant("qat.intel.com/generic", "x")), cdi=("a/b",))
    message = str(error.value)
    assert message.startswith("devices of default/vm: CDI: 'a/b' is not a CDI device name")
    assert "/dev/uio0 (qat.intel.com/generic): no VM can use UIO" in message
    assert "/dev/vfio/9 (qat.intel.com/generic): IOMMU group 9 is not there" in message


@pytest.mark.parametrize(("node", "says"), [("/dev/vfio/9", "it does not exist"), ("/dev/uio0", "no VM can use UIO")])
def test_a_variable_is_not_called_forged_when_its_device_may_be_behind_a_bad_node(
    host: FakeSysfs, node: str, says: str
) -> None:
    host.pci(VF1, 9)
    host.node("/dev/uio0")
    with capture_logs() as logs, pytest.raises(InvalidRequest, match=says) as error:
        resolve(host, node, envs={"QAT0": VF1})
    assert "not granted" not in str(error.value)
    assert logs == []


def test_a_group_of_bridges_gives_no_device(host: FakeSysfs) -> None:
    host.pci("0000:00:1c.0", 5, class_code=BRIDGE)
    host.vfio(5)
    with pytest.raises(InvalidRequest, match="IOMMU group 5 holds nothing that a VM can have"):
        resolve(host, "/dev/vfio/5")


def test_a_missing_cdi_address_is_a_fault(host: FakeSysfs) -> None:
    host.write(
        "/etc/cdi/x.yaml",
        "{cdiVersion: 1.0.0, kind: a.b/c, devices: [{name: x, annotations: {bdf: '0000:99:00.0'}, containerEdits: {}}]}",
    )
    with pytest.raises(InvalidRequest, match=r"PCI function 0000:99:00\.0, which .* is missing"):
        resolve(host, cdi=("a.b/c=x",))


def test_a_vfio_grant_without_any_device_is_logged(host: FakeSysfs) -> None:
    host.vfio()
    with capture_logs() as logs:
        assert resolve(host, VFIO) == GrantedDevices()
    assert logs == [
        {"event": "devices.vfio_without_device", "log_level": "warning", "namespace": "default", "pod": "vm"}
    ]


def test_the_first_of_two_volumes_at_one_path_counts(host: FakeSysfs) -> None:
    host.node("/dev/sdb", NodeKind.BLOCK)
    host.node("/dev/sdc", NodeKind.BLOCK)
    files = host.files()
    devices = (CriDevice("/dev/sdb", "/data"), CriDevice("/dev/sdc", "/data"))
    granted = Resolver(files, CdiDirectories((), files), None).resolve(DeviceRequest("d", "p", "c", devices))
    assert granted.blocks == (BlockDevice("/dev/sdb", "/data"),)


def test_without_kubelet_the_containers_of_a_pod_are_unknown(host: FakeSysfs) -> None:
    files = host.files()
    there = Kubelet(grant("intel.com/vf", "a"))
    asked = (there, Kubelet(), Kubelet(trouble="it is gone"), None)
    answers = [Resolver(files, CdiDirectories((), files), one).own_containers("default", "vm") for one in asked]
    assert answers == [("c",), None, None, None]


# --- whatever hints say

ADDRESSES = st.builds(PciAddress, st.just(0), st.integers(0, 2), st.integers(0, 1), st.integers(0, 2))
UUIDS = st.sampled_from([UUID, UUID.replace("1001", "1002")])
USB = st.builds(UsbDevice, st.integers(1, 2), st.integers(1, 3))
AUTHORITIES = st.builds(
    Authority,
    groups=st.dictionaries(st.integers(0, 3), st.lists(ADDRESSES, max_size=3).map(tuple), max_size=3),
    named=st.frozensets(ADDRESSES, max_size=3),
    unconditional=st.frozensets(ADDRESSES, max_size=2),
    if_hinted=st.frozensets(ADDRESSES, max_size=2),
    mdevs=st.frozensets(UUIDS),
    used=st.frozensets(ADDRESSES, max_size=2),
    others=st.frozensets(USB, max_size=2),
)
VALUES: Any = st.one_of(
    st.text(max_size=20),
    st.lists(ADDRESSES.map(str) | UUIDS | USB.map(lambda usb: f"{usb.bus}:{usb.device}"), max_size=4).map(",".join),
)
VARIABLES = st.dictionaries(
    st.sampled_from(
        ["PCIDEVICE_A", "PCIDEVICE_A_INFO", "PCI_RESOURCE_A", "QAT0", "MDEV_PCI_RESOURCE_A", "USB_RESOURCE_A"]
    )
    | st.text(max_size=12),
    VALUES,
    max_size=4,
)


@given(AUTHORITIES, VARIABLES)
def test_whatever_the_variables_say_the_vm_gets_a_part_of_the_grant(
    authority: Authority, variables: dict[str, str]
) -> None:
    hinted = hints([(name, value, "") for name, value in variables.items()])
    devices = in_order(chosen(authority, hinted))
    assert all(authority.grants(device) for device in devices)
    assert len({device.claim for device in devices}) == len(devices)
    granted = [hint for hint in hinted if hint not in forged(authority, hinted)]
    assert in_order(chosen(authority, granted)) == devices  # a forged hint has no effect, not even on the choice


@given(VARIABLES)
def test_whatever_the_variables_say_a_request_is_a_part_of_the_grant_or_an_error(variables: dict[str, str]) -> None:
    with contextlib.suppress(InvalidRequest):
        granted = _EMPTY_HOST.resolve(DeviceRequest("default", "vm", "c", envs=variables))
        assert granted == GrantedDevices()


class _NoFiles:
    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name}: a request without nodes reads nothing")


_EMPTY_HOST = Resolver(_NoFiles(), CdiDirectories((), _NoFiles()), None)  # type: ignore[arg-type]
