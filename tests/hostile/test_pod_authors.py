"""A pod's author who uses hostile names, paths, annotations, mounts, images or devices gets an error or an ordinary VM.

They are sent to the real CRI server as kubelet would. Each attempt ends in one clear error that names the field, with
nothing half-made left, or it does no harm: then the VM's definition is that of any other pod."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from fakes.cri import Client, container, pod, served
from fakes.world import LOG_DIRECTORY, World
from pod_author import (
    FORGED,
    HARMLESS,
    INVALID,
    NOT_FOUND,
    REFUSED_CONTAINERS,
    REFUSED_PODS,
    Attempt,
    Harmless,
    judge,
    notes,
)

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.model.ids import ContainerId
from virtshim.model.vm import VmSpec
from virtshim.seed.documents import seed_documents
from virtshim.vm import domain_xml
from virtshim.vm.domain_xml import NodeProfile
from virtshim.vm.elements.processors import Cgroups, DomainType

pytestmark = [pytest.mark.hostile, pytest.mark.cri]

PROFILE = NodeProfile("node", DomainType.QEMU, "/usr/libexec/virtshim/vmwrapper", "/usr/bin/qemu", Cgroups.OFF)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[tuple[World, Client]]:
    """A node whose VMs are defined as by libvirt: text that cannot be in a definition is refused."""
    with served(tmp_path) as (world, client, _):
        world.pull()
        define = world.outside.vms.define

        def as_libvirt(spec: VmSpec) -> None:
            domain_xml.build(spec, PROFILE)
            define(spec)

        world.outside.vms.define = as_libvirt  # type: ignore[method-assign]
        yield world, client


@pytest.mark.parametrize("attempt", REFUSED_PODS, ids=str)
def test_a_pod_is_refused_if_it_has(node: tuple[World, Client], attempt: Attempt) -> None:
    world, client = node
    before = dict(world.outside.files.files)
    with pytest.raises(grpc.RpcError) as error:
        client.run(**attempt.changes)
    judge(error.value, attempt)
    assert world.everything() == []
    assert world.leftovers() == []
    assert world.outside.files.files == before


@pytest.mark.parametrize("attempt", REFUSED_CONTAINERS, ids=str)
def test_a_container_is_refused_if_it_has(node: tuple[World, Client], attempt: Attempt) -> None:
    world, client = node
    sandbox = client.run()
    before = world.everything()
    with pytest.raises(grpc.RpcError) as error:
        client.create(sandbox, **attempt.changes)
    judge(error.value, attempt)
    assert world.everything() == before, "the pod without a container"
    assert world.leftovers() == []
    client.create(sandbox), "and another one can still be made"
    client.remove_pod(sandbox)
    assert world.everything() == []


def definition(world: World, container_id: str) -> str:
    """The definition without the parts that differ between VMs."""
    there = world.container(ContainerId(container_id))
    spec = world.outside.vms.spec(there.domain_uuid)
    text = domain_xml.build(spec, PROFILE)
    for word in (
        there.domain_name,
        str(spec.uuid),
        container_id,
        there.sandbox_id.value,
        ContainerId(container_id).short,
    ):
        text = text.replace(word, "*")
    return re.sub(r"<title>.*</title>|key-of-\w+", "", text)


@pytest.mark.parametrize("attempt", HARMLESS, ids=str)
def test_harmless_settings_give_the_same_vm_definition(node: tuple[World, Client], attempt: Harmless) -> None:
    """The VM is defined as any other, and its guest gets nothing that the pod could not set openly."""
    world, client = node
    ordinary = client.run("ordinary")
    wanted = definition(world, client.create(ordinary))
    sandbox = client.run(**attempt.pod)
    made = client.create(sandbox, **attempt.container)
    assert definition(world, made) == wanted
    client.start(made)
    assert client.status(made).started_at  # one whose command ends at once may have exited by now
    documents = seed_documents(world.outside.seeds.requests[ContainerId(made)])
    assert documents.files["user-data"].splitlines()[0] == "#cloud-config"
    paths = [there.spec.log_file for there in world.records.containers.all()]
    assert all(path.startswith(f"{LOG_DIRECTORY}/") and "/../" not in path for path in paths)
    assert not world.outside.termination_files.written
    client.stop(made)
    for one in (sandbox, ordinary):
        client.remove_pod(one)
    assert world.everything() == []


def test_a_pod_cannot_take_over_another_pods_vm_by_uuid(node: tuple[World, Client]) -> None:
    world, client = node
    uuid = "12345678-9abc-4def-8123-456789abcdef"
    victim = client.run("victim", **notes(VirtletSystemUUID=uuid))
    running = client.create(victim)
    client.start(running)
    thief = client.run("thief", **notes(VirtletSystemUUID=uuid.upper()))
    with pytest.raises(grpc.RpcError) as error:
        client.create(thief)
    judge(error.value, Attempt("", {}, "VirtletSystemUUID", grpc.StatusCode.ALREADY_EXISTS))
    assert client.status(running).state == pb.CONTAINER_RUNNING
    assert len(world.outside.vms.running()) == 1
    client.remove_pod(thief)
    assert client.status(running).state == pb.CONTAINER_RUNNING


@pytest.mark.parametrize(
    "image", ["file://etc/shadow", "../../etc/shadow", f"guest:{FORGED}", "x" * 5000, "sha256:" + "0" * 64, "http://"]
)
def test_an_invalid_image_name_is_not_pulled(node: tuple[World, Client], image: str) -> None:
    world, client = node
    fetched = list(world.outside.files.fetched)
    with pytest.raises(grpc.RpcError) as error:
        client.pull(image)
    assert error.value.code() in (INVALID, NOT_FOUND)
    assert (error.value.details() or "").isprintable()
    assert world.outside.files.fetched == fetched or image.startswith("..")
    assert world.leftovers() == []


def test_ordinary_pod_and_container_names_are_accepted(node: tuple[World, Client]) -> None:
    """Shows that the attempts above are refused for their own reason."""
    _, client = node
    sandbox = client.RunPodSandbox(pb.RunPodSandboxRequest(config=pod("a.b-c"))).pod_sandbox_id
    request = pb.CreateContainerRequest(pod_sandbox_id=sandbox, config=container("vm-1"))
    assert client.CreateContainer(request).container_id
