"""virtshim reads from console and agent how far a guest has booted."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.world import World

from virtshim.model.ids import ContainerId, SandboxId

BOOT = (
    (1, b"SeaBIOS (version 1.16.2)\r\nBooting from Hard Disk...\r\n"),
    (2, b"[    0.000000] Linux version 6.1.0-18-cloud-amd64\r\n"),
    (3, b"[    0.900000] Run /sbin/init as init process\r\n"),
    (4, b"[    3.1] cloud-init[310]: Cloud-init v. 22.4.2 running 'init-local' at Mon\r\n"),
    (5, b"[    9.1] cloud-init[600]: Cloud-init v. 22.4.2 finished at Mon\r\n"),
)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.close()


def shows(world: World, container: ContainerId, text: bytes) -> None:
    output = world.outside.boot_output.shown
    output[container] = output.get(container, b"") + text
    world.outside.consoles.say(container, text.decode())


def guest_phases(world: World, sandbox: SandboxId) -> list[tuple[str, float | None]]:
    found = world.app.starts.ups.start_up(sandbox).phases
    started = [phase.name for phase in found].index("libvirt")
    return [(phase.name, phase.seconds) for phase in found[started + 1 :]]


def test_each_call_is_reported_with_its_phases(world: World) -> None:
    sandbox, container = world.running()
    found = world.app.starts.ups.start_up(sandbox).phases
    assert [phase.name for phase in found if phase.container is None] == ["sandbox", "network"]
    made = [phase.name for phase in found if phase.container == container]
    assert made[:10] == [
        "create",
        "devices",
        "disk",
        "seed",
        "empty_disks",
        "define",
        "start",
        "cgroup",
        "volumes",
        "libvirt",
    ]


def test_a_console_shows_firmware_kernel_user_space_and_cloud_init(world: World) -> None:
    sandbox, container = world.running()
    for seconds, text in BOOT:
        world.outside.clock.advance(seconds)
        shows(world, container, text)
    assert guest_phases(world, sandbox) == [
        ("firmware", 3), ("agent", None), ("kernel", 3), ("user-space", 9), ("cloud-init", 5),
    ]  # fmt: skip


def test_a_mark_split_into_two_pieces_is_recognised(world: World) -> None:
    sandbox, container = world.running()
    shows(world, container, b"[    0.0] Linux ver")
    shows(world, container, b"sion 6.1.0\r\n")
    assert ("kernel", None) in guest_phases(world, sandbox)


@pytest.mark.parametrize(("between", "tells"), [(b"Free", True), (b"x" * 300, False)])
def test_a_bsd_is_recognised_by_its_copyright_at_the_start_of_a_line(world: World, between: bytes, tells: bool) -> None:
    sandbox, container = world.running()
    shows(world, container, b"Copyright (c) 1992-2021 The " + between + b"BSD Project.\r\n")
    assert (("kernel", None) in guest_phases(world, sandbox)) is tells


def test_a_vm_may_end_while_its_console_is_read(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox, container = world.running()
    stopping = threading.Thread(target=world.stop, args=(container,), daemon=True)

    def piece(_container: ContainerId, _start: int, _most: int) -> bytes:
        if stopping.ident is None:
            stopping.start()
            stopping.join(60)
        return BOOT[1][1]

    monkeypatch.setattr(world.outside.boot_output, "piece", piece)
    shows(world, container, BOOT[1][1])
    assert not stopping.is_alive()
    assert "kernel" not in dict(guest_phases(world, sandbox)), "it boots no more"


def test_without_cloud_init_a_login_prompt_ends_the_boot(world: World) -> None:
    sandbox, container = world.running()
    shows(world, container, BOOT[1][1] + BOOT[2][1])
    world.outside.clock.advance(2)
    shows(world, container, b"\r\nguest login: ")
    assert ("user-space", 2) in guest_phases(world, sandbox)


def test_the_agents_port_shows_when_the_agent_is_up(world: World) -> None:
    sandbox, container = world.running()
    world.outside.clock.advance(7)
    for _ in range(2):  # and again, when it is restarted
        for tell in world.outside.vms.agent_callbacks:
            tell(world.domain(container))
        world.outside.clock.advance(1)
    assert dict(guest_phases(world, sandbox)) == {"firmware": 7, "agent": 7}


def test_the_agents_phase_ends_though_nobody_asks_the_agent_anything(world: World) -> None:
    sandbox, container = world.running()
    boots, clock, vms = world.app.starts.boots, world.outside.clock, world.outside.vms
    clock.advance(3)
    boots.look()
    assert ("agent", None) in guest_phases(world, sandbox)
    vms.with_agent.add(world.domain(container))
    vms.why_not = "libvirt is restarted"
    clock.advance(2)
    boots.look()
    assert ("agent", None) in guest_phases(world, sandbox)
    vms.why_not = ""
    clock.advance(2)
    boots.look()
    assert dict(guest_phases(world, sandbox)) == {"firmware": 7, "agent": 7}


def test_the_longer_a_guest_has_no_agent_the_more_rarely_it_is_looked_for(world: World) -> None:
    sandbox, container = world.running()
    boots, clock = world.app.starts.boots, world.outside.clock
    clock.advance(800)
    boots.look()
    world.outside.vms.with_agent.add(world.domain(container))
    clock.advance(90)
    boots.look()
    assert ("agent", None) in guest_phases(world, sandbox)
    clock.advance(11)
    boots.look()
    assert ("agent", 901) in guest_phases(world, sandbox)


def test_the_boot_phases_end_with_the_vm(world: World) -> None:
    sandbox, container = world.running()
    world.stop(container)
    assert [phase.error for phase in world.app.starts.ups.start_up(sandbox).phases[-2:]] == ["the VM ended"] * 2
    world.remove_sandbox(sandbox)
    assert world.app.starts.ups.start_up(sandbox).phases == ()
