"""A pod takes a profile, which is a named set of annotations that the node's operator defines."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from fakes.adopted import HANDLER, running
from fakes.world import World, pod_key, sandbox_config

from virtshim.config.settings import Settings
from virtshim.config.vms import Vm, VmProfile
from virtshim.model.errors import InvalidRequest
from virtshim.model.vm import DiskBus

OLD = VmProfile(
    name="old-guests", annotations={"VirtletDiskDriver": "scsi", "VirtletVCPUCount": "2"}, handlers=("old",)
)
LARGE = VmProfile(name="large", annotations={"VirtletVCPUCount": "8"})


@pytest.fixture
def make_world(tmp_path: Path) -> Any:
    made: list[World] = []

    def make(*profiles: VmProfile) -> World:
        made.append(World(tmp_path, vm=Vm(profiles=profiles), cri={"runtime_handlers": ["old", "new"]}))
        return made[-1]

    yield make
    for world in made:
        world.close()


def vm(world: World, annotations: Mapping[str, str], handler: str = "") -> tuple[int, DiskBus]:
    """vCPUs and disk bus of the VM of a pod with these."""
    world.pull()
    sandbox = world.run(config=sandbox_config(annotations=annotations, runtime_handler=handler))
    assert world.sandbox(sandbox).config.annotations == annotations
    container = world.create(sandbox)
    world.start(container)
    spec = world.outside.vms.domains[world.domain(container)].spec
    assert spec is not None
    return spec.size.vcpus, spec.disk_bus


@pytest.mark.parametrize(
    ("annotations", "handler", "wanted"),
    [
        ({"virtshim.io/profile": "old-guests"}, "", (2, DiskBus.SCSI)),
        ({"virtshim.io/profile": "large"}, "old", (8, DiskBus.VIRTIO)),
        ({}, "old", (2, DiskBus.SCSI)),
        ({}, "new", (1, DiskBus.VIRTIO)),
        ({}, "", (1, DiskBus.VIRTIO)),
        ({"virtshim.io/profile": ""}, "", (1, DiskBus.VIRTIO)),
        ({"virtshim.io/profile": "old-guests", "VirtletVCPUCount": "3"}, "", (3, DiskBus.SCSI)),
    ],
)
def test_a_profiles_annotations_apply_where_the_pod_has_none(
    make_world: Callable[..., World], annotations: dict[str, str], handler: str, wanted: tuple[int, DiskBus]
) -> None:
    assert vm(make_world(OLD, LARGE), annotations, handler) == wanted


@pytest.mark.parametrize(
    ("profiles", "named", "said"),
    [
        ((OLD, LARGE), "larg", "did you mean large?"),
        ((OLD, LARGE), "solaris", "it has old-guests, large, windows"),
        ((), "solaris", r"it has windows \(vm\.profiles makes more\)"),
    ],
)
def test_an_unknown_profile_is_refused_and_the_error_lists_the_known_ones(
    make_world: Callable[..., World], profiles: tuple[VmProfile, ...], named: str, said: str
) -> None:
    world = make_world(*profiles)
    with pytest.raises(InvalidRequest, match=said):
        world.run(config=sandbox_config(annotations={"virtshim.io/profile": named}))
    assert world.everything() == []


def test_a_pod_keeps_the_profile_that_it_was_created_with(make_world: Callable[..., World]) -> None:
    world = make_world(LARGE)
    world.pull()
    config = sandbox_config(annotations={"virtshim.io/profile": "large"})
    sandbox = world.run(config=config)
    small = LARGE.model_copy(update={"annotations": {"VirtletVCPUCount": "1"}})
    world.app.live.use(Settings(vm=Vm(profiles=(small,))))
    world = world.recovered()
    container = world.create(sandbox)
    world.start(container)
    spec = world.outside.vms.domains[world.domain(container)].spec
    assert spec is not None
    assert spec.size.vcpus == 8
    world.close()


def test_reloaded_profiles_apply_to_later_pods(make_world: Callable[..., World]) -> None:
    world = make_world()
    world.app.live.use(Settings(vm=Vm(profiles=(LARGE,))))
    assert vm(world, {"virtshim.io/profile": "large"}) == (8, DiskBus.VIRTIO)


def test_a_pods_own_bad_annotation_is_refused_even_with_a_profile(make_world: Callable[..., World]) -> None:
    with pytest.raises(InvalidRequest, match="annotation VirtletVCPUCount"):
        make_world(LARGE).do.run_sandbox.run(
            pod_key(),
            sandbox_config(annotations={"virtshim.io/profile": "large", "VirtletVCPUCount": "many"}),
            make_world().deadline(),
        )


@pytest.mark.parametrize(
    ("profile", "said"),
    [
        ({"name": "a", "annotations": {"VirtletVCPUCount": "many"}}, "VirtletVCPUCount"),
        ({"name": "a", "annotations": {"example.com/x": "1"}}, "not an annotation of VMs"),
        ({"name": "a", "annotations": {"virtshim.io/vnc": "true"}}, "virtshim.io/vnc: only pods may set this"),
        ({"name": "a", "annotations": {"virtshim.io/profile": "b"}}, "virtshim.io/profile: only pods may set this"),
        (
            {"name": "a", "annotations": {"virtshim.io/vm-container": "vm"}},
            "virtshim.io/vm-container: only .* set it in each",
        ),
        ({"name": "a b"}, "match pattern"),
        ({"annotations": {}}, "Field required"),
    ],
)
def test_an_impossible_profile_is_refused_when_the_settings_are_read(profile: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Vm.model_validate({"profiles": [profile]})


def test_names_and_handlers_of_profiles_are_unique() -> None:
    with pytest.raises(ValueError, match="two profiles have the name large"):
        Vm(profiles=(LARGE, LARGE))
    with pytest.raises(ValueError, match="two profiles have the handler old"):
        Vm(profiles=(OLD, OLD.model_copy(update={"name": "other"})))


def test_a_profiles_handler_is_a_runtime_handler_of_the_node() -> None:
    with pytest.raises(ValueError, match=r"no pod can have the handler old; also list it in cri\.runtime_handlers, or"):
        Settings(vm=Vm(profiles=(OLD,)))


def test_pods_with_containers_beside_their_vm_may_have_a_profile_by_their_handler(world: World) -> None:
    large = LARGE.model_copy(update={"handlers": (HANDLER,)})
    world.app.live.use(Settings(vm=Vm(profiles=(large,))))
    container = running(world)
    spec = world.outside.vms.domains[world.domain(container)].spec
    assert spec is not None
    assert spec.size.vcpus == 8


def test_a_mount_path_in_a_profile_is_ignored_by_pods_that_mount_nothing_there(
    make_world: Callable[..., World],
) -> None:
    """It is for many pods, some of them installed already; the pod's own word would be."""
    world = make_world(VmProfile(name="answers", annotations={"virtshim.io/sysprep": "/sysprep"}))
    world.outside.devices.listed = {("default", "web", "vm")}
    vm(world, {"virtshim.io/profile": "answers"})
