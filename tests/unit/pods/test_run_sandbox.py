"""RunPodSandbox makes record and network, and a failed step leaves nothing."""

import dataclasses
import re
from pathlib import Path

import pytest
from fakes.world import World, pod_key, sandbox_config

from virtshim.config.settings import Settings
from virtshim.config.vms import Vm
from virtshim.model.container import Resources
from virtshim.model.deadline import Deadline
from virtshim.model.errors import (
    AlreadyExists,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    ResourceExhausted,
    Unavailable,
)
from virtshim.model.network import Bandwidth, Dns
from virtshim.model.sandbox import PortMapping, SandboxPhase


def test_a_new_sandbox_is_ready_and_has_its_network(world: World) -> None:
    sandbox = world.sandbox(world.run())
    assert sandbox.phase is SandboxPhase.READY
    assert sandbox.network is not None
    assert sandbox.network.ips == ("10.88.0.2", "fd00::5")
    assert re.fullmatch(r"[0-9a-f]{64}", sandbox.id.value)


def test_the_row_is_written_before_the_network_is_touched(world: World) -> None:
    world.run()
    assert world.journal.calls == ["records.sandboxes.add", "networks.attach", "records.sandboxes.replace"]


def test_hostname_dns_and_port_mappings_reach_the_network(world: World) -> None:
    ports = (PortMapping("udp", 53, 5353, "127.0.0.1"),)
    dns = Dns(("10.96.0.10",), ("svc.cluster.local",), ("ndots:5",))
    world.run(config=sandbox_config(hostname="db-0", dns=dns, port_mappings=ports))
    (request,) = world.outside.networks.requests
    assert (request.hostname, request.dns, request.port_mappings, request.pod) == ("db-0", dns, ports, pod_key())


def test_the_filter_and_bandwidth_that_a_pod_asks_for_reach_the_network(world: World) -> None:
    wanted = {"virtshim.io/network-filter": "mac", "kubernetes.io/egress-bandwidth": "1M"}
    world.run(config=sandbox_config(annotations=wanted))
    (request,) = world.outside.networks.requests
    assert (request.filter, request.bandwidth) == ("mac", Bandwidth(egress=1_000_000))


def test_annotations_cannot_choose_mac_or_address(world: World) -> None:
    """Who may is Multus, which asks the API server for them itself; of ours there is none."""
    foreign = {
        "k8s.v1.cni.cncf.io/networks": '[{"name": "blue", "mac": "c2:b0:57:49:47:f1", "ips": ["10.1.0.9/24"]}]',
        "v1.multus-cni.io/default-network": '[{"name": "red", "mac": "c2:b0:57:49:47:f2"}]',
        "cni.projectcalico.org/ipAddrs": '["10.1.0.9"]',
    }
    world.run(config=sandbox_config(annotations=foreign))
    (request,) = world.outside.networks.requests
    asked = str(dataclasses.asdict(request))
    assert "c2:b0" not in asked
    assert "10.1.0.9" not in asked
    for name in ("virtshim.io/mac", "virtshim.io/ips"):
        with pytest.raises(InvalidRequest, match=name):
            world.run(config=sandbox_config(annotations={name: "c2:b0:57:49:47:f1"}))


@pytest.mark.parametrize(
    ("annotations", "pod", "many"),
    [
        ({}, Resources(cpu_quota=100_000, cpu_period=100_000), False),
        ({}, Resources(cpu_quota=100_001, cpu_period=100_000), True),
        ({}, Resources(cpu_shares=2, cpu_period=100_000), False),  # without a limit
        ({}, Resources(cpu_quota=-1, cpu_period=100_000), True),  # exclusive CPUs
        ({}, Resources(), True),  # nobody has said it
        ({"VirtletVCPUCount": "1"}, Resources(), False),
        ({"VirtletVCPUCount": "2"}, Resources(cpu_quota=50_000, cpu_period=100_000), True),
        ({"VirtletVCPUCount": "4", "virtshim.io/nic-queues": "1"}, Resources(), False),
        ({"virtshim.io/nic-queues": "2"}, Resources(cpu_quota=50_000, cpu_period=100_000), True),
    ],
)
def test_taps_have_several_queues_if_the_vm_may_need_them(
    world: World, annotations: dict[str, str], pod: Resources, many: bool
) -> None:
    world.run(config=sandbox_config(annotations=annotations, resources=pod))
    (request,) = world.outside.networks.requests
    assert request.multi_queue is many


def test_the_network_call_gets_the_rest_of_the_callers_time(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []
    attach = world.outside.networks.attach
    monkeypatch.setattr(
        world.outside.networks, "attach", lambda request, timeout: (given.append(timeout), attach(request, timeout))[1]
    )
    world.do.run_sandbox.run(pod_key(), sandbox_config(), world.deadline(17))
    assert given == [17]


def test_a_repeated_call_returns_the_first_sandbox(world: World) -> None:
    assert world.run() == world.run()
    assert world.journal.count("networks.attach") == 1


def test_another_attempt_is_another_sandbox(world: World) -> None:
    assert world.run(attempt=0) != world.run(attempt=1)


def test_a_stopped_sandbox_keeps_its_name_until_it_is_removed(world: World) -> None:
    first = world.run()
    world.stop_sandbox(first)
    with pytest.raises(AlreadyExists, match="remove it first"):
        world.run()
    world.remove_sandbox(first)
    assert world.run() != first


def test_an_unknown_runtime_handler_is_refused_by_name(world: World) -> None:
    with pytest.raises(InvalidRequest, match=r"'gvisor'.*known: virtshim"):
        world.run(config=sandbox_config(runtime_handler="gvisor"))
    assert world.journal.calls == []


def test_a_known_runtime_handler_is_kept(world: World) -> None:
    sandbox = world.run(config=sandbox_config(runtime_handler="virtshim"))
    assert world.sandbox(sandbox).config.runtime_handler == "virtshim"


def test_a_bad_annotation_is_refused_before_anything_is_made(world: World) -> None:
    with pytest.raises(InvalidRequest, match="VirtletVCPUCount"):
        world.run(config=sandbox_config(annotations={"VirtletVCPUCount": "many"}))
    assert world.journal.calls == []


def test_nothing_is_made_after_the_deadline(world: World) -> None:
    with pytest.raises(DeadlineExceeded):
        world.do.run_sandbox.run(pod_key(), sandbox_config(), Deadline.after(world.outside.clock.monotonic(), 0))
    assert world.everything() == []


@pytest.mark.parametrize("half_made", [False, True])
def test_a_failed_network_leaves_nothing(world: World, half_made: bool) -> None:
    world.journal.fail("networks.attach", InternalError("CNI bridge: no such device"), after=half_made)
    with pytest.raises(InternalError, match="no such device"):
        world.run()
    assert world.everything() == []
    world.run()


@pytest.mark.parametrize("after", [False, True])
def test_a_full_disk_at_the_last_step_leaves_nothing(world: World, after: bool) -> None:
    world.journal.fail("records.sandboxes.replace", ResourceExhausted("disk full"), after=after)
    with pytest.raises(ResourceExhausted):
        world.run()
    assert world.everything() == []


def test_a_full_disk_at_the_first_step_touches_nothing_outside(world: World) -> None:
    world.journal.fail("records.sandboxes.add", ResourceExhausted("disk full"))
    with pytest.raises(ResourceExhausted):
        world.run()
    assert world.journal.count("networks.attach") == 0


def test_a_not_ready_row_stays_if_the_network_can_neither_be_made_nor_released(world: World) -> None:
    world.journal.fail("networks.attach", InternalError("CNI ADD failed"), after=True)
    world.journal.fail("networks.release", Unavailable("tapmanager is gone"))
    with pytest.raises(InternalError, match="CNI ADD failed"):
        world.run()
    (row,) = world.records.sandboxes.all()
    assert row.phase is SandboxPhase.NOT_READY
    assert row.is_visible
    assert "could not be undone" in row.reason


def test_stop_and_remove_finish_a_set_up_that_could_not_be_undone(world: World) -> None:
    world.journal.fail("networks.attach", InternalError("CNI ADD failed"), after=True)
    world.journal.fail("networks.release", Unavailable("tapmanager is gone"))
    with pytest.raises(InternalError):
        world.run()
    (row,) = world.records.sandboxes.all()
    world.stop_sandbox(row.id)
    assert world.outside.networks.networks == {}
    world.remove_sandbox(row.id)
    assert world.everything() == []


def test_undo_does_not_use_up_the_callers_deadline(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []
    monkeypatch.setattr(world.outside.networks, "release", lambda sandbox, timeout: given.append(timeout))
    world.journal.fail("networks.attach", InternalError("CNI ADD failed"))
    with pytest.raises(InternalError):
        world.do.run_sandbox.run(pod_key(), sandbox_config(), world.deadline(0.001))
    assert given == [world.settings.cri.stop_timeout]


def test_a_row_that_not_even_undo_could_change_does_not_block_the_pod_for_ever(world: World) -> None:
    full = ResourceExhausted("disk full")
    world.journal.fail("records.sandboxes.replace", full)
    world.journal.fail("records.sandboxes.delete", full)
    with pytest.raises(ResourceExhausted):
        world.run()
    world.journal.heal()
    sandbox = world.run()
    assert world.sandbox(sandbox).phase is SandboxPhase.READY
    world.remove_sandbox(sandbox)
    assert world.everything() == []


OWN_GROUP = "/kubepods/burstable/pod1"
OVERHEAD = Resources(memory_limit_bytes=256 << 20)


def test_a_node_that_requires_overhead_refuses_a_pod_without_it_before_anything_is_made(tmp_path: Path) -> None:
    world = World(tmp_path, vm=Vm(require_overhead=True))
    with pytest.raises(InvalidRequest, match=r"no memory overhead.*vm\.require_overhead.*runtimeClassName"):
        world.run(config=sandbox_config(cgroup_parent=OWN_GROUP))
    assert world.journal.calls == []
    with pytest.raises(InvalidRequest, match="no memory overhead"):  # a CPU's alone leaves no room for QEMU
        world.run(config=sandbox_config(cgroup_parent=OWN_GROUP, overhead=Resources(cpu_quota=10_000)))


@pytest.mark.parametrize(
    ("cgroup_parent", "overhead"),
    [(OWN_GROUP, OVERHEAD), ("", Resources()), ("/operators/group", Resources())],
    ids=["with an overhead", "crictl's", "in an operator's group"],
)
def test_a_node_that_requires_overhead_accepts_pods_whose_vms_are_not_beside_their_cgroups(
    tmp_path: Path, cgroup_parent: str, overhead: Resources
) -> None:
    world = World(tmp_path, vm=Vm(require_overhead=True))
    world.run(config=sandbox_config(cgroup_parent=cgroup_parent, overhead=overhead))


def test_a_node_that_does_not_require_overhead_takes_every_pod_until_a_reload_says_otherwise(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.run(config=sandbox_config(cgroup_parent=OWN_GROUP))
    world.app.live.use(Settings(vm=Vm(require_overhead=True)))
    with pytest.raises(InvalidRequest, match="no memory overhead"):
        world.run("other", config=sandbox_config(cgroup_parent=OWN_GROUP))
