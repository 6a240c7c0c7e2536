"""Adopt lets VMs run in a sandbox that another runtime made."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import pytest
from fakes.adopted import ADOPTION, HANDLER, NETNS, SANDBOX, adopt, running, shared_config
from fakes.background import Background
from fakes.world import World, container_config, pod_key, sandbox_config

from virtshim.model.container import Mount, Resources
from virtshim.model.errors import DeadlineExceeded, InvalidRequest, ShimError, Unavailable, WrongState
from virtshim.model.ids import SandboxId
from virtshim.model.network import Dns
from virtshim.model.sandbox import Adoption, Namespaces, NamespaceScope, PodKey, SandboxConfig, SandboxPhase

OTHER = SandboxId("d00d" * 16)


def check(world: World, config: SandboxConfig) -> None:
    world.app.operator.services.adopt_sandbox.check(config, world.deadline())


def test_an_adopted_sandbox_is_ready_with_the_other_runtimes_id_namespace_and_addresses(world: World) -> None:
    adopt(world, dns=Dns(("10.96.0.10",), ("svc.test",), ()))
    record = world.sandbox(SANDBOX)
    assert record.is_ready
    assert record.adopted == ADOPTION
    assert record.network is not None
    assert (record.network.netns, record.network.ips) == (NETNS, ADOPTION.addresses)
    (asked,) = world.outside.networks.requests
    assert asked.existing == ADOPTION
    assert asked.dns.servers == ("10.96.0.10",)
    assert not world.outside.networks.ran  # no CNI plugin


def test_a_vm_runs_in_an_adopted_sandbox_below_the_pods_own_cgroup(world: World) -> None:
    container = running(world)
    assert world.container(container).is_running
    assert world.container(container).sandbox_id == SANDBOX
    (group,) = world.outside.cgroups.cgroups.values()
    assert group.cgroup_parent == shared_config().cgroup_parent


def test_a_repeated_adoption_does_nothing(world: World) -> None:
    container = running(world)
    before = world.sandbox(SANDBOX)
    adopt(world)
    # kubelet may send a config that has changed since: annotations, resources.
    adopt(world, annotations={"virtshim.io/vcpus": "2"}, resources=Resources(cpu_quota=1))
    assert world.sandbox(SANDBOX) == before
    assert world.container(container).is_running
    assert len(world.outside.networks.requests) == 1


def test_the_same_sandbox_with_another_namespace_or_pod_is_refused(world: World) -> None:
    adopt(world)
    with pytest.raises(WrongState, match=r"/var/run/netns/cni-1.*cannot be adopted with /var/run/netns/cni-2"):
        adopt(world, to=Adoption("/var/run/netns/cni-2"))
    with pytest.raises(WrongState, match="of pod default/web"):
        world.app.operator.services.adopt_sandbox.adopt(
            SANDBOX, pod_key("other"), shared_config(), ADOPTION, world.deadline()
        )
    assert world.sandbox(SANDBOX).is_ready


def test_a_sandbox_that_virtshim_made_itself_is_never_adopted(world: World) -> None:
    own = world.run()
    with pytest.raises(WrongState, match="known as another one"):
        adopt(world, own)
    assert world.sandbox(own).adopted is None


def test_an_earlier_sandbox_of_the_pod_stays_until_it_is_removed(world: World) -> None:
    adopt(world)
    adopt(world, OTHER, attempt=1)
    assert world.sandbox(SANDBOX).is_ready
    world.remove_sandbox(SANDBOX)
    assert world.sandbox(OTHER).is_ready


@pytest.mark.parametrize("handler", [HANDLER])
def test_run_pod_sandbox_refuses_the_handler_and_names_the_proxy(world: World, handler: str) -> None:
    with pytest.raises(InvalidRequest, match="virtshim proxy"):
        world.run(config=sandbox_config(runtime_handler=handler))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"runtime_handler": "virtshim"}, "pod_handlers"),
        ({"runtime_handler": ""}, "pod_handlers"),
        ({"overhead": Resources()}, "overhead"),
        ({"namespaces": Namespaces(pid=NamespaceScope.POD)}, "shareProcessNamespace"),
        ({"annotations": {"virtshim.io/vcpus": "many"}}, "virtshim.io/vcpus"),
        ({"annotations": {"virtshim.io/memory-volumes": "/cache"}}, "virtshim.io/memory-volumes"),
    ],
)
def test_an_unfit_pod_is_refused_by_name_before_and_after_its_sandbox_exists(
    world: World, changes: dict[str, object], named: str
) -> None:
    config = dataclasses.replace(shared_config(), **changes)
    with pytest.raises(InvalidRequest, match=named):
        check(world, config)
    with pytest.raises(InvalidRequest, match=named):
        world.app.operator.services.adopt_sandbox.adopt(SANDBOX, pod_key(), config, ADOPTION, world.deadline())
    assert world.everything() == []


def test_an_overhead_is_required_whatever_the_node_requires_of_other_pods(world: World) -> None:
    assert not world.app.live.require_overhead.now
    with pytest.raises(InvalidRequest, match=r"which a pod with containers beside its VM needs.*such as virtshim-pod"):
        check(world, shared_config(overhead=Resources()))


def test_a_check_leaves_nothing_behind(world: World) -> None:
    check(world, shared_config())
    assert world.everything() == []


@pytest.mark.parametrize("what", ["networks", "shares"])
def test_a_check_fails_while_a_daemon_that_the_vm_needs_is_down(world: World, what: str) -> None:
    getattr(world.outside, what).gone = True
    with pytest.raises(Unavailable):
        check(world, shared_config())


def test_a_namespace_that_tapmanager_refuses_is_refused_in_its_words_and_leaves_nothing(world: World) -> None:
    world.outside.networks.unfit[NETNS] = f"{NETNS} is the node's own network namespace"
    with pytest.raises(InvalidRequest, match=r"cni-1 is the node's own network namespace"):
        adopt(world)
    assert world.everything() == []


def test_a_failed_adoption_that_cannot_be_undone_leaves_a_record_that_the_next_one_uses(world: World) -> None:
    world.journal.fail("networks.attach", Unavailable("tapmanager died"))
    world.journal.fail("networks.release", Unavailable("tapmanager died"))
    with pytest.raises(ShimError):
        adopt(world)
    assert world.sandbox(SANDBOX).phase is SandboxPhase.NOT_READY
    adopt(world)
    assert world.sandbox(SANDBOX).is_ready


def test_a_deadline_that_has_passed_adopts_nothing(world: World) -> None:
    with pytest.raises(DeadlineExceeded):
        world.app.operator.services.adopt_sandbox.adopt(
            SANDBOX, pod_key(), shared_config(), ADOPTION, world.deadline(0)
        )
    assert world.everything() == []


def test_a_sandbox_that_tapmanager_lost_is_attached_again_by_the_next_adoption(world: World) -> None:
    container = running(world)
    world.outside.networks.lose()
    world.app.watch.look()
    assert not world.sandbox(SANDBOX).is_ready
    assert not world.container(container).is_running
    adopt(world)
    assert world.sandbox(SANDBOX).is_ready
    first, second = world.outside.networks.requests
    assert second.macs == {"eth0": "52:54:00:aa:bb:cc"}  # that of the first attach
    assert (first.existing, first.macs) == (second.existing, {})
    again = world.create(SANDBOX, attempt=1)
    world.start(again)
    assert world.container(again).is_running


def test_a_lost_sandbox_is_not_adopted_while_its_vm_may_still_run(world: World) -> None:
    container = running(world)
    world.records.sandboxes.replace(world.sandbox(SANDBOX).not_ready("its network is gone"))
    with pytest.raises(WrongState, match=f"its network is gone.*{container}.*still runs"):
        adopt(world)


def test_the_root_disk_that_stays_with_the_pod_is_the_next_sandboxs_too(world: World) -> None:
    keep = {"virtshim.io/root-disk": "pod"}
    first = running(world, annotations=keep)
    disk = world.container(first).spec.pod_disk
    assert disk
    world.stop_sandbox(SANDBOX)
    adopt(world, OTHER, attempt=1, annotations=keep)
    world.remove_sandbox(SANDBOX)
    second = world.create(OTHER, attempt=1)
    world.start(second)
    assert world.container(second).spec.pod_disk == disk
    assert disk in world.outside.disks.pod_disks
    world.remove_sandbox(OTHER)
    assert world.everything() == []


def test_an_empty_dir_is_the_directory_that_the_pods_containers_mount(world: World) -> None:
    host = "/var/lib/kubelet/pods/uid-of-web/volumes/kubernetes.io~empty-dir/fetched"
    world.pull()
    container = world.create(adopt(world), config=container_config(mounts=(Mount("/fetched", host),)))
    (volume,) = world.container(container).spec.volumes
    assert (volume.host, volume.guest, volume.readonly) == (host, "/fetched", False)
    world.start(container)
    assert world.outside.shares.shares[container.short] == (volume,)


def test_pod_keys_of_two_pods_are_independent(world: World) -> None:
    adopt(world)
    world.app.operator.services.adopt_sandbox.adopt(
        OTHER, PodKey("default", "db", "uid-2", 0), shared_config(), Adoption("/var/run/netns/cni-2"), world.deadline()
    )
    world.remove_sandbox(SANDBOX)
    assert world.sandbox(OTHER).is_ready


def test_two_adoptions_at_once_attach_the_namespace_once(world: World) -> None:
    gate = world.journal.hold("networks.attach")
    calls = [Background(lambda: adopt(world)) for _ in range(2)]
    gate.wait()
    gate.open()
    assert [one.done() for one in calls] == [SANDBOX, SANDBOX]
    assert len(world.outside.networks.requests) == 1
    assert world.sandbox(SANDBOX).is_ready


@pytest.mark.parametrize("ends", ["stop_sandbox", "remove_sandbox"])
def test_a_pod_that_ends_during_an_adoption_ends_after_it(world: World, ends: str) -> None:
    gate = world.journal.hold("networks.attach")
    adopting = Background(lambda: adopt(world))
    gate.wait()
    ending = Background(lambda: getattr(world, ends)(SANDBOX))
    gate.open()
    adopting.done()
    ending.done()
    assert SANDBOX not in world.outside.networks.networks
    for left in world.records.sandboxes.all():  # a stop leaves the record
        world.remove_sandbox(left.id)
    assert world.everything() == []


class Meanwhile:
    """A part of a use case. Its call `name` happens, and then something else does before the use case goes on."""

    def __init__(self, part: object, name: str, then: Callable[[], object]) -> None:
        self._part, self._name, self._then = part, name, then

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._part, name)
        return self._both(real) if name == self._name else real

    def _both(self, real: Callable[..., object]) -> Callable[..., None]:
        def call(*args: object) -> None:
            real(*args)
            self._then()

        return call


def test_a_sandbox_that_is_adopted_again_while_it_stops_keeps_its_network(world: World) -> None:
    """A late CreateContainer brings the adoption. kubelet repeats the call that fails."""
    running(world)
    stop = world.app.watch.stop_sandbox
    raced = dataclasses.replace(stop, saving=cast("Any", Meanwhile(stop.saving, "publish", lambda: adopt(world))))
    with pytest.raises(WrongState, match="was adopted again meanwhile; repeat the call"):
        raced.stop(world.sandbox(SANDBOX), world.deadline())
    assert world.sandbox(SANDBOX).is_ready
    assert SANDBOX in world.outside.networks.networks
    world.remove_sandbox(SANDBOX)
    assert world.everything() == []


def test_a_sandbox_that_is_adopted_again_while_it_is_removed_leaves_no_network_without_a_record(world: World) -> None:
    running(world)
    remove = world.app.watch.remove_sandbox
    part = Meanwhile(remove.remove_container, "remove", lambda: adopt(world))
    raced = dataclasses.replace(remove, remove_container=cast("Any", part))
    with pytest.raises(WrongState, match="was adopted again meanwhile; repeat the call"):
        raced.remove(world.sandbox(SANDBOX), world.deadline())
    assert world.sandbox(SANDBOX).is_ready
    world.remove_sandbox(SANDBOX)
    assert world.everything() == []
