"""virtshim accepts pods like the 21 examples of Virtlet's repository unchanged, as kubelet and a CRI proxy request
them. It refuses others for a reason that docs/from-virtlet.md gives.

fixtures/virtlet_pods has manifests of our own with the features of each example."""

import json
from pathlib import Path

import grpc
import pytest
import yaml
from fakes.cri import Client
from fakes.kubelet_pods import PodOfManifest, pod_of
from fakes.world import LOG_DIRECTORY, World

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.model.vm import VmSpec
from virtshim.seed.ports import SeedRequest

MANIFESTS = Path(__file__).parents[2] / "fixtures" / "virtlet_pods"
DOCUMENT = Path(__file__).parents[3] / "docs" / "from-virtlet.md"

KEY = "key"
USER = "user-data: ssh_pwauth, users"
MNT = "user-data: mounts"
# Name -> its VM: memory, disks by their names in the guest, and the guest's data.
ACCEPTED = {
    "cirros-vm": f"160Mi vda 1Gi, {KEY}",
    "cirros-vm-deployment": f"160Mi vda, {KEY}",
    "cirros-vm-persistent-rootfs-local": f"1024Mi vda /, {KEY}",
    "cirros-vm-persistent-rootfs-rbd": f"1024Mi vda /, {KEY}",
    # No container mounts its volume, so kubelet neither sets it up nor passes it.
    "cirros-vm-raw-device": "1024Mi vda",
    "cirros-vm-volume-mount": f"160Mi vda, 40000000 at /somevol, {KEY}, script",
    "cirros-vm-with-additional-annotations": f"160Mi vda, {KEY}, script",
    "debian-vm": f"1024Mi vda 4Gi, {KEY}, DHCP",
    "fedora-vm": f"256Mi vda, {KEY}",
    "fedora-vm-with-testuser": f"256Mi vda, {KEY}, {USER}",
    "k8s": "1024Mi 2 vCPUs vda 4Gi, user-data: runcmd, users, write_files",
    "ubuntu-multi-cni": f"1024Mi vda, {USER}",
    "ubuntu-vm": f"1024Mi vda 4Gi, {KEY}",
    "ubuntu-vm-hostpath-pv": f"1024Mi vda, shared /home/ubuntu/hostpath, {KEY}",
    "ubuntu-vm-local-block-pv": f"1024Mi vda, block /dev/testpvc, {KEY}, {MNT}",
    "ubuntu-vm-nfs-pv": f"1024Mi vda, shared /home/ubuntu/nfspath, {KEY}",
    "ubuntu-vm-rbd-block-pv": f"1024Mi vda, block /dev/testpvc, {KEY}, {MNT}",
    "ubuntu-vm-with-libvirt-cpusetting": f"1024Mi CPU Westmere less avx vda, {KEY}",
    "ubuntu-vm-with-nested-virtualization": f"1024Mi CPU host-model vda, {KEY}",
    "ubuntu-vm-with-testuser": f"1024Mi vda, {KEY}, {USER}",
    "ubuntu-vm-with-volume": f"1024Mi vda, 2048000000 at /var/lib/docker, {KEY}",
}
# Name -> words of the refusal, and the row of the document that describes it.
REFUSED = {
    "refused-ceph-flexvolume": (
        "a flexVolume of type ceph is not supported",
        "| flexVolume `raw` with `path`, `ceph` | refused",
    ),
    "refused-raw-device-mounted": (
        "a flexVolume of type raw with path",
        "| flexVolume `raw` with `path`, `ceph` | refused",
    ),
    "refused-chown-9pfs": (
        "annotation VirtletChown9pfsMounts: not supported",
        "| `VirtletChown9pfsMounts` | virtshim refuses `true`",
    ),
}


def manifest(name: str) -> PodOfManifest:
    return pod_of(list(yaml.safe_load_all((MANIFESTS / f"{name}.yaml").read_text())), LOG_DIRECTORY)


def asked_for(name: str, world: World, client: Client) -> str:
    """Creates the container; returns its id or the refusal's message."""
    pod = manifest(name)
    for directory, options in pod.flex_options.items():
        world.outside.volume_disks.options[directory] = json.dumps(options).encode()
    for mount in pod.container.mounts:
        if "projected" in mount.host_path:
            world.outside.kubelet_volumes.write(mount.host_path, {"token": b"x"})
        elif mount.host_path.endswith("etc-hosts"):
            world.outside.kubelet_volumes.put(mount.host_path, b"127.0.0.1 localhost\n")
    world.outside.files.publish(pod.container.image.image, b"a disk")
    try:
        pod.container.image.image = client.pull(pod.container.image.image)
        sandbox = client.RunPodSandbox(pb.RunPodSandboxRequest(config=pod.config)).pod_sandbox_id
        request = pb.CreateContainerRequest(pod_sandbox_id=sandbox, config=pod.container, sandbox_config=pod.config)
        container: str = client.CreateContainer(request).container_id
        client.start(container)
    except grpc.RpcError as error:
        return error.details() or ""
    return container


def told(vm: VmSpec, seed: SeedRequest) -> str:
    vcpus = f" {vm.size.vcpus} vCPUs" if vm.size.vcpus > 1 else ""
    model = vm.cpu_details.name or vm.cpu_model.value
    features = "".join(f" less {name}" for name, policy in vm.cpu_details.features if policy == "disable")
    root = f" {seed.options.root_volume_bytes >> 30}Gi" if seed.options.root_volume_bytes else ""
    bus = "vda" if vm.disk_bus.value == "virtio" else "sda"
    whole = f"{vm.size.memory_bytes >> 20}Mi{vcpus}{f' CPU {model}' if model else ''}{features} {bus}{root}"
    parts = [
        f"{whole} /" if vm.granted.root_volume else whole,
        *(f"{disk.size_bytes} at {disk.guest}" for disk in seed.empty_disks),
        *(f"block {one.container_path}" for one in seed.blocks),
        *(f"shared {one.guest}" for one in seed.volumes),
    ]
    options = seed.options
    parts += ["key"] * len(options.ssh_keys)
    parts += [f"user-data: {', '.join(sorted(options.user_data))}"] if options.user_data else []
    parts += ["script"] if options.user_data_script else []
    parts += ["DHCP"] if options.force_dhcp else []
    return ", ".join(parts)


def test_each_of_the_21_pods_and_each_refused_pod_has_a_manifest() -> None:
    assert len(ACCEPTED) == 21
    assert sorted(path.stem for path in MANIFESTS.iterdir()) == sorted((*ACCEPTED, *REFUSED))


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_virtlet_pod_is_accepted_unchanged_and_gets_its_vm(name: str, world: World, client: Client) -> None:
    container = asked_for(name, world, client)
    assert client.containers()[0].id == container, container
    (seed,) = world.outside.seeds.requests.values()
    assert told(world.outside.vms.spec(world.domain(seed.container)), seed) == ACCEPTED[name]


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_virtlet_pod_is_refused_for_the_documented_reason(name: str, world: World, client: Client) -> None:
    words, row = REFUSED[name]
    assert words in asked_for(name, world, client)
    assert client.containers() == []
    assert row in DOCUMENT.read_text()
