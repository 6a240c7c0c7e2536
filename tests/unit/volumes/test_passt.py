"""The passt of a VM with containers beside it starts before the VM and ends with it, and the VM ends with its passt."""

from __future__ import annotations

import re

import pytest
from fakes.adopted import CGROUP, NETNS, SANDBOX, adopt, running, shared_config
from fakes.waiting import eventually
from fakes.world import World, sandbox_config

from virtshim.model.container import ContainerPhase, ExitReason
from virtshim.model.errors import InvalidRequest, Unavailable, WrongState
from virtshim.model.network import GuestPorts
from virtshim.model.sandbox import Adoption, PortMapping

WEB = PortMapping("tcp", 80, 0, "")


def test_passt_starts_before_the_vm_and_ends_with_it(world: World) -> None:
    world.pull()
    made = world.create(adopt(world, port_mappings=(WEB,)))
    world.journal.calls.clear()
    world.start(made)
    order = [call for call in world.journal.calls if call in ("cgroups.make", "shares.start", "vms.start")]
    assert order == ["cgroups.make", "shares.start", "vms.start"]
    network = world.outside.shares.networks[made.short]
    assert (network.pod.netns, network.pod.inode, network.ports) == (NETNS, 7, GuestPorts((80,)))
    group = next(iter(world.outside.cgroups.cgroups.values()))
    assert (group.passt_socket, group.nic_queues) == (f"/run/shares/{made.short}/net/sock", 1)
    world.stop(made)
    assert world.outside.shares.networks == {}


def test_a_vm_alone_in_its_pod_has_no_passt(world: World) -> None:
    world.running()
    assert (world.outside.shares.shares, world.outside.shares.networks) == ({}, {})


def test_a_port_that_a_container_holds_fails_the_start_by_name(world: World) -> None:
    world.pull()
    world.outside.shares.held_ports.add(80)
    made = world.create(adopt(world, port_mappings=(WEB,)))
    with pytest.raises(WrongState, match="port 80/tcp of the pod is held by another"):
        world.start(made)
    ended = world.container(made)
    assert ended.phase is ContainerPhase.EXITED
    assert ended.exit is not None
    assert (ended.exit.reason, "port 80/tcp" in ended.exit.message) == (ExitReason.START_ERROR, True)
    assert world.outside.vms.running() == []
    assert world.outside.shares.shares == {}


def test_a_vm_ends_when_its_passt_has_ended_and_says_so(world: World) -> None:
    made = running(world)
    world.app.watch.look()
    assert world.container(made).is_running
    world.outside.shares.cut_off.add(made.short)
    world.app.watch.look()
    ended = world.container(made)
    assert ended.exit is not None
    assert (ended.exit.code, ended.exit.reason) == (137, ExitReason.NETWORK_LOST)
    assert "its passt has ended" in ended.exit.message
    assert world.outside.vms.running() == []
    assert world.outside.shares.networks == {}
    assert world.sandbox(SANDBOX).is_ready, "the next attempt starts in it"


def test_a_vm_whose_passt_ended_while_virtshim_was_down_ends_at_the_next_look(world: World) -> None:
    made = running(world)
    world.outside.shares.cut_off.add(made.short)
    after = world.restarted()
    try:
        after.app.watch.look()
        ended = after.container(made)
        assert ended.exit is not None
        assert ended.exit.reason is ExitReason.NETWORK_LOST
    finally:
        after.close()


def test_a_pod_is_refused_where_passt_is_missing_or_its_annotations_do_not_fit(world: World) -> None:
    check = world.app.operator.services.adopt_sandbox.check
    check(shared_config(), world.deadline())
    with pytest.raises(InvalidRequest, match="SCTP"):
        check(shared_config(port_mappings=(PortMapping("sctp", 9, 0, ""),)), world.deadline())
    with pytest.raises(InvalidRequest, match=re.escape("virtshim.io/warm-start")):
        check(shared_config(annotations={"virtshim.io/warm-start": "true"}), world.deadline())
    with pytest.raises(InvalidRequest, match=re.escape("virtshim.io/ports")):
        world.run(config=sandbox_config(annotations={"virtshim.io/ports": "22"}))
    world.outside.shares.without_passt = True
    with pytest.raises(Unavailable, match=r"passt is missing.*install"):
        check(shared_config(), world.deadline())


def test_passt_lies_in_the_pods_cgroup(world: World) -> None:
    running(world)
    assert [group.cgroup_parent for group in world.outside.cgroups.cgroups.values()] == [CGROUP]


def address_scripts(world: World) -> list[tuple[str, ...]]:
    return [command.argv for command in world.outside.guests.commands if "virtshim-addresses" in command.argv]


def test_the_agent_gives_the_guest_its_ipv6_address(world: World) -> None:
    made = running(world)
    eventually(lambda: address_scripts(world))
    (script, *_) = address_scripts(world)
    assert {"address", "fd00::7/24", "10.88.7.7/24"} <= set(script)
    assert world.container(made).is_running


def test_a_guest_with_ipv4_alone_has_its_address_by_dhcp(world: World) -> None:
    running(world, to=Adoption(NETNS, ("10.88.7.7",)), sysctls={"net.core.somaxconn": "9"})
    eventually(lambda: any("virtshim-sysctls" in command.argv for command in world.outside.guests.commands))
    assert address_scripts(world) == []
