"""Devices that kubelet grants get from CreateContainer's message into the record of the VM's devices. Host files,
kubelet's list and CDI specifications are there, and no part of the resolver is replaced."""

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from fakes.cri import Client, pod, refused, served
from fakes.pod_resources import FakePodResources, serving
from fakes.sysfs import FakeSysfs
from fakes.world import Outside, World

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.cli.check import check_devices
from virtshim.devices.attachable import AttachChecker, AttachRules
from virtshim.devices.cdi_directories import CdiDirectories
from virtshim.devices.host_files import NodeKind
from virtshim.devices.resolve import NodeDevices
from virtshim.devices.values import BlockDevice, CardFunction, GrantedDevices, PciAddress, PciFunction
from virtshim.kubelet.pod_resources import PodResourcesClient

PF, VF, KERNEL_VF, SHARED = "0000:3b:00.0", "0000:3b:02.0", "0000:3b:02.1", "0000:65:00.0"


@dataclass
class Node:
    host: FakeSysfs
    kubelet: FakePodResources
    world: World
    client: Client
    kubelet_ends: contextlib.ExitStack

    def create(self, *nodes: str, sandbox: str = "", **changes: Any) -> str:
        devices = [pb.Device(host_path=node, container_path=node, permissions="rw") for node in nodes]
        return self.client.create(sandbox or self.client.run(), devices=devices, **changes)

    def granted(self) -> GrantedDevices:
        (container,) = self.world.records.containers.all()
        return container.granted


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """A node with a VF at vfio-pci, a VF at its kernel driver, and a function that shares its group with a busy one."""
    (tmp_path / "state").mkdir()
    host = FakeSysfs(tmp_path / "host")
    host.pci(PF, 40, driver="ixgbe", total_vfs=8)
    host.pci(VF, 41, driver="vfio-pci", vf_of=PF)
    host.pci(KERNEL_VF, 42, driver="iavf", vf_of=PF)
    host.pci(SHARED, 7, driver="vfio-pci")
    host.pci("0000:65:00.1", 7, driver="snd_hda_intel")
    kubelet, short = FakePodResources(), tempfile.mkdtemp(prefix="kr-")
    books, files = PodResourcesClient(f"{short}/s"), host.files()
    rules = AttachRules(bind=True, keep=(), lockable=lambda: None)
    devices = NodeDevices(files, CdiDirectories(("/etc/cdi",), files), books, AttachChecker(files, rules))
    outside = Outside(devices=devices)  # type: ignore[arg-type]
    with contextlib.ExitStack() as kubelet_ends, served(tmp_path / "state", outside) as (world, client, _):
        kubelet_ends.enter_context(serving(kubelet, f"{short}/s"))
        world.pull()
        yield Node(host, kubelet, world, client, kubelet_ends)
    books.close()
    shutil.rmtree(short)


def function(address: str, resource: str) -> PciFunction:
    return PciFunction(PciAddress.parse(address), resource)


def test_a_vm_gets_the_vf_and_the_volume_of_its_container(
    node: Node, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node.kubelet.grant("default", "web", "vm", ("intel.com/vfs", [VF]))
    volume = node.host.node("/dev/nbd0", NodeKind.BLOCK)
    envs = [pb.KeyValue(key="PCIDEVICE_INTEL_COM_VFS", value=VF.encode())]
    made = node.create("/dev/vfio/vfio", "/dev/vfio/41", volume, envs=envs)
    assert node.granted() == GrantedDevices((function(VF, "intel.com/vfs"),), (BlockDevice(volume, volume),))

    (tmp_path / "c.toml").write_text(f'paths.state_dir = "{tmp_path}/state"\n')
    check_devices(str(tmp_path / "c.toml"), files=node.host.files())
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith(VF)]
    assert row.endswith(f"yes                {made[:12]}")


def test_kubelets_list_alone_grants_a_vf_at_its_kernel_driver(node: Node) -> None:
    node.kubelet.grant("default", "web", "vm", ("intel.com/vfs", [KERNEL_VF]))
    node.create(envs=[pb.KeyValue(key="PCIDEVICE_INTEL_COM_VFS", value=KERNEL_VF.encode())])
    assert node.granted().passthrough == (function(KERNEL_VF, "intel.com/vfs"),)


def test_a_vf_of_a_network_card_is_shown_with_its_number_and_its_settings(node: Node) -> None:
    node.host.interface("ens1", f"/sys/devices/pci0000:00/{PF}")
    node.world.outside.drivers.cards[VF] = CardFunction("vfio-pci", "ens1", 0, {"vlan": 100, "spoof_check": True})
    made = node.create("/dev/vfio/vfio", "/dev/vfio/41")
    status = node.client.ContainerStatus(pb.ContainerStatusRequest(container_id=made, verbose=True))
    assert json.loads(status.info["info"])["devices"] == [
        {
            "claim": f"pci:{VF}", "resource": "", "pci": VF, "driver": "vfio-pci", "card": "ens1", "number": 0,
            "vlan": 100, "spoofCheck": True,
        }
    ]  # fmt: skip
    with refused(grpc.StatusCode.FAILED_PRECONDITION, rf"pci:{VF} \(VF 0 of ens1\) is held by container vm"):
        node.create("/dev/vfio/vfio", "/dev/vfio/41", sandbox=node.client.run("other"))


def test_a_container_with_devices_is_unavailable_while_kubelet_does_not_answer(node: Node) -> None:
    sandbox = node.client.run()
    node.kubelet_ends.close()
    with refused(grpc.StatusCode.UNAVAILABLE, "kubelet does not say which containers and devices the pod has"):
        node.create(sandbox=sandbox, envs=[pb.KeyValue(key="PCIDEVICE_X", value=KERNEL_VF.encode())])


def test_a_forged_device_variable_grants_nothing_and_leaves_nothing(node: Node) -> None:
    node.kubelet.grant("default", "web", "vm", ("intel.com/vfs", [VF]))
    sandbox = node.client.run()
    envs = [pb.KeyValue(key="QAT0", value=KERNEL_VF.encode())]
    with refused(
        grpc.StatusCode.INVALID_ARGUMENT, f"variable QAT0 names {KERNEL_VF}, which this container was not granted"
    ):
        node.create("/dev/vfio/vfio", "/dev/vfio/41", sandbox=sandbox, envs=envs)
    assert node.client.containers() == []


def test_a_function_that_cannot_be_attached_is_refused_before_anything_is_created(node: Node) -> None:
    with refused(
        grpc.StatusCode.FAILED_PRECONDITION, r"shares IOMMU group 7 with 0000:65:00\.1, .*; bind that to vfio-pci"
    ):
        node.create("/dev/vfio/vfio", "/dev/vfio/7", envs=[pb.KeyValue(key="PCI_RESOURCE_X", value=SHARED.encode())])
    assert node.client.containers() == []


def test_the_status_lists_what_a_vm_does_not_get_of_its_cdi_devices(node: Node) -> None:
    edits = {"deviceNodes": [{"path": "/dev/vfio/41"}], "mounts": [{"hostPath": "/lib", "containerPath": "/lib"}]}
    devices = [{"name": "a", "containerEdits": edits}]
    node.host.write(
        "/etc/cdi/gpu.json", json.dumps({"cdiVersion": "0.6.0", "kind": "example.com/gpu", "devices": devices})
    )
    made = node.create(CDI_devices=[pb.CDIDevice(name="example.com/gpu=a")])
    node.client.start(made)
    assert "the guest does not have mounts of /etc/cdi/gpu.json" in node.client.status(made).message
    assert [one.reason for one in node.world.outside.pod_events.told] == ["CdiLeftOut"]


def test_a_network_interface_of_the_node_is_refused_as_a_device(node: Node) -> None:
    edits = {"netDevices": [{"hostInterfaceName": "ens1", "name": "net1"}]}
    devices = [{"name": "a", "containerEdits": edits}]
    node.host.write(
        "/etc/cdi/nic.json", json.dumps({"cdiVersion": "1.1.0", "kind": "example.com/nic", "devices": devices})
    )
    with refused(grpc.StatusCode.INVALID_ARGUMENT, r"example\.com/nic=a is a network interface of the node"):
        node.create(CDI_devices=[pb.CDIDevice(name="example.com/nic=a")])
    assert node.client.containers() == []


def test_a_cdi_name_counts_on_the_container_but_not_on_the_pod(node: Node) -> None:
    node.host.write(
        "/etc/cdi/vf.yaml",
        "{cdiVersion: 0.6.0, kind: intel.com/vf, devices: [{name: a, containerEdits: {deviceNodes: [{path: /dev/vfio/41}]}}]}",
    )
    annotations = {"cdi.k8s.io/plugin": "intel.com/vf=a"}
    request = pb.RunPodSandboxRequest(config=pod(annotations=annotations))
    sandbox = node.client.RunPodSandbox(request).pod_sandbox_id
    made = node.create(sandbox=sandbox)
    assert node.granted() == GrantedDevices()
    node.client.remove(made)
    node.create(sandbox=sandbox, annotations=annotations)
    assert node.granted().passthrough == (function(VF, ""),)
