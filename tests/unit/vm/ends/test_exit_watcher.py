"""QEMU's end is reported at once, and its reason only if it is certain. The QEMUs here are sleeping shells."""

import subprocess
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog.testing
from fakes.scarcity import EPOLL, THREAD, Scarcity
from leaks import OpenedSince

from virtshim.model.vm import OffReason, Power, PowerState
from virtshim.vm.ends import QemuExitWatcher

VM = uuid.UUID("5fcca100-659f-5f99-9d53-0178ad853389")
WAIT_LIMIT = 20.0


class Node:
    """A directory as libvirt keeps it, and who was told of what."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.told = threading.Event()
        self.processes: list[subprocess.Popen[bytes]] = []

    def ends(self, *, is_embedded: bool = True) -> QemuExitWatcher:
        return QemuExitWatcher(str(self.directory), lambda _: self.told.set(), is_embedded=is_embedded)

    def run(self, state: str = "running", domain: uuid.UUID = VM, name: str = "vm") -> subprocess.Popen[bytes]:
        script = "echo; read line"
        process = subprocess.Popen(["sh", "-c", script, str(domain)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.processes.append(process)
        assert process.stdout is not None
        process.stdout.read(1)  # it is up: its command line can be read
        (self.directory / f"{name}.pid").write_text(f"{process.pid}\n")
        self.write(state, name)
        return process

    def write(self, state: str, name: str = "vm") -> None:
        (self.directory / f"{name}.xml").write_text(
            f"<!-- made by libvirt -->\n<domstatus state='{state}' reason='x' pid='1'>"
        )


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    for process in node.processes:
        process.kill()
        process.communicate()


def followed(node: Node, **options: bool) -> Iterator[QemuExitWatcher]:
    ends = node.ends(**options)
    yield ends
    ends.close()


@pytest.fixture
def ends(node: Node) -> Iterator[QemuExitWatcher]:
    yield from followed(node)


@pytest.fixture
def remote(node: Node) -> Iterator[QemuExitWatcher]:
    yield from followed(node, is_embedded=False)


def end(node: Node, process: subprocess.Popen[bytes]) -> None:
    """It ends, and stays a zombie: what is told needs no parent that looks."""
    process.kill()
    assert node.told.wait(WAIT_LIMIT)


def test_a_qemu_that_ends_without_an_event_has_crashed(node: Node, ends: QemuExitWatcher) -> None:
    process = node.run()
    ends.follow(VM, "vm")
    assert ends.over(VM) is None
    end(node, process)
    assert ends.over(VM) == PowerState(Power.OFF, OffReason.CRASHED)


@pytest.mark.parametrize(("by_host", "why"), [(False, OffReason.SHUTDOWN), (True, OffReason.DESTROYED)])
def test_a_shutdown_is_recognised_by_libvirts_earlier_event(
    node: Node, ends: QemuExitWatcher, by_host: bool, why: OffReason
) -> None:
    process = node.run()
    ends.follow(VM, "vm")
    node.write("shutdown")
    ends.shutting_down(VM, by_host=by_host)
    ends.shutting_down(VM, by_host=True)  # libvirt's own signal to a QEMU that has nothing more to do
    end(node, process)
    assert ends.over(VM) == PowerState(Power.OFF, why)
    assert ends.corrected(VM, PowerState(Power.OFF, OffReason.SHUTDOWN)) == PowerState(Power.OFF, why)


def test_libvirts_event_may_come_a_moment_after_qemus_end(node: Node, ends: QemuExitWatcher) -> None:
    process = node.run("shutdown")
    ends.follow(VM, "vm")
    process.kill()
    ends.shutting_down(VM, by_host=True)
    assert node.told.wait(WAIT_LIMIT)
    assert ends.over(VM) == PowerState(Power.OFF, OffReason.DESTROYED)


def test_a_shutdown_without_an_event_is_left_to_libvirt(node: Node, ends: QemuExitWatcher) -> None:
    silent = node.run("shutdown")
    ends.follow(VM, "vm")
    silent.kill()
    silent.wait()
    other = uuid.uuid4()
    process = node.run(domain=other, name="other")
    ends.follow(other, "other")
    node.write("shutdown", "other")
    ends.shutting_down(other, by_host=False)
    end(node, process)
    assert ends.over(VM) is None
    assert ends.over(other) == PowerState(Power.OFF, OffReason.SHUTDOWN)


def test_libvirts_off_reason_is_corrected_until_the_vm_is_started_again(ends: QemuExitWatcher) -> None:
    """Also of a VM whose process could not be followed."""
    shutdown = PowerState(Power.OFF, OffReason.SHUTDOWN)
    crashed, running = PowerState(Power.OFF, OffReason.CRASHED), PowerState(Power.RUNNING)
    assert ends.corrected(VM, shutdown) == shutdown
    ends.shutting_down(VM, by_host=True)
    assert ends.corrected(VM, shutdown) == PowerState(Power.OFF, OffReason.DESTROYED)
    assert [ends.corrected(VM, other) for other in (crashed, running)] == [crashed, running]
    ends.forget(VM)
    assert ends.corrected(VM, shutdown) == shutdown


def test_a_shutdown_in_libvirts_state_waits_for_the_event_that_names_its_cause(ends: QemuExitWatcher) -> None:
    """libvirt's state changes before its events are delivered."""
    shutdown, answers = PowerState(Power.OFF, OffReason.SHUTDOWN), []
    ends.forget(VM)
    ends.expect_event(VM)
    asking = threading.Thread(target=lambda: answers.append(ends.corrected(VM, shutdown)))
    asking.start()
    assert not answers
    ends.shutting_down(VM, by_host=True)
    asking.join(WAIT_LIMIT)
    assert answers == [PowerState(Power.OFF, OffReason.DESTROYED)]


@pytest.mark.parametrize("news", ["it has stopped", "events were lost", "it is removed"])
def test_no_event_is_awaited_after(ends: QemuExitWatcher, news: str) -> None:
    shutdown = PowerState(Power.OFF, OffReason.SHUTDOWN)
    ends.expect_event(VM)
    if news == "it has stopped":
        ends.stopped(VM)
    elif news == "events were lost":
        ends.forget_exits()
    else:
        ends.forget(VM)
    with structlog.testing.capture_logs() as logs:
        assert ends.corrected(VM, shutdown) == shutdown
    assert not logs, "it has not waited in vain"


def test_a_vm_that_we_destroy_counts_as_destroyed_even_if_an_event_came(node: Node, ends: QemuExitWatcher) -> None:
    process = node.run()
    ends.follow(VM, "vm")
    ends.will_destroy(VM)
    node.write("shutdown")
    end(node, process)
    assert ends.over(VM) == PowerState(Power.OFF, OffReason.DESTROYED)


def test_an_end_without_an_event_is_left_to_a_separate_libvirtd(node: Node, remote: QemuExitWatcher) -> None:
    silent = node.run()
    remote.follow(VM, "vm")
    silent.kill()
    silent.wait()
    other = uuid.uuid4()
    process = node.run("shutdown", other)
    remote.follow(other, "vm")
    remote.shutting_down(other, by_host=False)
    end(node, process)  # ends are told in order: the first one has been judged by now
    assert remote.over(VM) is None
    assert remote.over(other) == PowerState(Power.OFF, OffReason.SHUTDOWN)


def test_after_libvirts_stopped_event_libvirt_is_asked_again(node: Node, ends: QemuExitWatcher) -> None:
    process = node.run()
    ends.follow(VM, "vm")
    end(node, process)
    ends.stopped(VM)
    assert ends.over(VM) is None


def test_a_new_start_forgets_the_earlier_end(node: Node, ends: QemuExitWatcher) -> None:
    process = node.run()
    ends.follow(VM, "vm")
    end(node, process)
    ends.forget(VM)
    assert ends.over(VM) is None
    node.told.clear()
    process = node.run()
    ends.follow(VM, "vm")
    ends.follow(VM, "vm")
    end(node, process)
    assert ends.over(VM) is not None


def test_after_lost_events_libvirt_is_asked(node: Node, ends: QemuExitWatcher) -> None:
    process = node.run()
    ends.follow(VM, "vm")
    end(node, process)
    ends.forget_exits()
    assert ends.over(VM) is None


@pytest.mark.parametrize("found", ["nothing", "nonsense", "a process that has ended", "another's process"])
def test_a_qemu_that_cannot_be_found_is_left_to_libvirt(node: Node, ends: QemuExitWatcher, found: str) -> None:
    if found == "nonsense":
        (node.directory / "vm.pid").write_text("x")
    elif found == "a process that has ended":
        process = node.run()
        process.kill()
        process.wait()
    elif found == "another's process":
        node.run(domain=uuid.uuid4())
    ends.follow(VM, "vm")
    ends.will_destroy(VM)
    ends.stopped(VM)
    assert ends.over(VM) is None


def test_without_a_directory_nothing_is_followed() -> None:
    ends = QemuExitWatcher("", lambda _: None, is_embedded=True)
    ends.follow(VM, "vm")
    assert ends.over(VM) is None
    ends.close()


def test_closing_closes_the_descriptors_and_may_be_repeated(node: Node) -> None:
    opened = OpenedSince()
    ends = node.ends()
    node.run()
    ends.follow(VM, "vm")
    pipes = 2
    assert opened.count() == pipes + 3, "one to poll, one to wake it, one a QEMU"
    ends.close()
    ends.close()
    ends.follow(VM, "vm")
    assert opened.count() == pipes


@pytest.mark.parametrize("told", [OffReason.CRASHED, OffReason.UNKNOWN])
def test_a_guests_shutdown_is_remembered_over_a_restart_of_virtshim(
    node: Node, ends: QemuExitWatcher, told: OffReason
) -> None:
    """The embedded libvirt forgets it."""
    other, off = uuid.uuid4(), PowerState(Power.OFF, told)
    ends.shutting_down(VM, by_host=False)
    ends.shutting_down(VM, by_host=True)  # libvirt's own signal, when its guest is through
    ends.shutting_down(other, by_host=True)
    for later in followed(node):
        assert later.corrected(VM, off) == PowerState(Power.OFF, OffReason.SHUTDOWN)
        assert later.corrected(VM, PowerState(Power.OFF, OffReason.DESTROYED)).reason is OffReason.DESTROYED
        assert later.corrected(VM, PowerState(Power.RUNNING)) == PowerState(Power.RUNNING)
        assert later.corrected(other, off) == off
        later.forget(VM)  # it is started again
        assert later.corrected(VM, off) == off
    for later in followed(node):
        assert later.corrected(VM, off) == off


def test_removed_vms_are_forgotten(node: Node, ends: QemuExitWatcher) -> None:
    other, off = uuid.uuid4(), PowerState(Power.OFF)
    for domain in (VM, other):
        ends.shutting_down(domain, by_host=False)
    for later in followed(node):
        later.keep([VM])
    for later in followed(node):
        assert later.corrected(VM, off).reason is OffReason.SHUTDOWN
        assert later.corrected(other, off) == off


def test_no_shutdown_is_noted_for_a_separate_libvirtd(node: Node, remote: QemuExitWatcher) -> None:
    remote.shutting_down(VM, by_host=False)
    assert not (node.directory / "guest-ends").exists()


def test_an_end_that_cannot_be_reported_blocks_no_other_report(node: Node) -> None:
    other, told = uuid.UUID(int=7), threading.Event()

    def tell(domain: uuid.UUID) -> None:
        if domain == VM:
            raise RuntimeError("can't start new thread")
        told.set()

    ends = QemuExitWatcher(str(node.directory), tell, is_embedded=True)
    first, second = node.run(), node.run(domain=other, name="other")
    ends.follow(VM, "vm")
    ends.follow(other, "other")
    first.kill()
    first.wait()
    second.kill()
    assert told.wait(WAIT_LIMIT)
    ends.close()


@pytest.mark.parametrize("kind", [EPOLL, THREAD])
def test_a_qemu_that_could_not_be_followed_is_followed_on_the_next_request(node: Node, kind: str) -> None:
    scarcity = Scarcity(kind, 1)
    with scarcity.installed():
        for ends in followed(node):
            process = node.run()
            opened = OpenedSince()
            with scarcity.reigning(), pytest.raises((OSError, RuntimeError)):
                ends.follow(VM, "vm")
            assert opened.count() == 0
            ends.follow(VM, "vm")
            end(node, process)
            assert ends.over(VM) == PowerState(Power.OFF, OffReason.CRASHED)
