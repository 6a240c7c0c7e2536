"""The proxy serves complete lists or errors while runtimes and the proxy are killed, stopped and restarted."""

import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from fakes.background import Background
from fakes.cri import Client, pod, refused
from fakes.journal import WAIT_LIMIT
from fakes.processes import hang
from fakes.proxy import Proxy
from fakes.runtime import FakeRuntime
from podclient import wait_until

from criproto.runtime_v1 import api_pb2 as pb

pytestmark = pytest.mark.proxy

PROJECT = Path(__file__).resolve().parents[3]
FAIL = 'when_down = "fail"'


class Program:
    """A fake runtime with one pod, as a process."""

    def __init__(self, socket_path: str) -> None:
        self.socket = socket_path
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fakes.runtime", self.socket, "program", "1"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": f"{PROJECT}:{PROJECT}/tests"},
        )  # fmt: skip
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"ready\n"

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def stop(self) -> None:
        """Stops the process: its socket exists but does not answer."""
        hang(self.process.pid)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)


@pytest.fixture
def program(place: Path) -> Iterator[Program]:
    made = Program(f"{place}/program.sock")
    yield made
    made.kill()


@pytest.fixture
def primary(place: Path) -> Iterator[FakeRuntime]:
    with FakeRuntime(f"{place}/primary.sock", "primary") as runtime:
        yield runtime


def again(client: Client) -> None:
    """Starts the proxy; returns when both runtimes are listed."""

    def both() -> bool:
        try:
            client.pods()
        except grpc.RpcError:
            return False
        return True

    wait_until(both, WAIT_LIMIT, "both runtimes are listed again")


def test_lists_fail_while_a_runtime_is_down_and_are_complete_when_it_is_back(
    place: Path, primary: FakeRuntime, program: Program
) -> None:
    primary.add_pod()
    with Proxy(place, primary.socket, program.socket, others=FAIL) as proxy:
        assert len(proxy.client.pods()) == 2
        program.kill()
        for _ in range(3):
            with refused(grpc.StatusCode.UNAVAILABLE, f"the runtime other at {program.socket} is not available"):
                proxy.client.pods()
        program.start()
        again(proxy.client)
        assert len(proxy.client.pods()) == 2


def test_calls_to_one_runtime_work_while_the_other_is_down(place: Path, primary: FakeRuntime, program: Program) -> None:
    with Proxy(place, primary.socket, program.socket, others=FAIL) as proxy:
        sandbox = proxy.client.run()
        theirs = proxy.client.run("vm", handler="vm")
        program.kill()
        assert proxy.client.pod_status(sandbox).id == sandbox
        assert proxy.client.run("second")
        conditions = proxy.client.Status(pb.StatusRequest()).status.conditions
        assert [(one.type, one.status, one.reason) for one in conditions] == [
            ("RuntimeReady", True, ""), ("NetworkReady", True, ""), ("other/RuntimeReady", False, "Unavailable"),
        ]  # fmt: skip
        for call in (
            lambda: proxy.client.pod_status(theirs),
            lambda: proxy.client.run("vm", handler="vm"),
            lambda: proxy.client.pod_status("0" * 64),
            lambda: proxy.client.ImageStatus(pb.ImageStatusRequest(image=pb.ImageSpec(image="anything"))),
            lambda: next(proxy.client.runtime.GetContainerEvents(pb.GetEventsRequest(), timeout=20)),
        ):
            with refused(grpc.StatusCode.UNAVAILABLE, "not available"):
                call()


def test_a_killed_runtime_ends_its_calls_and_events_as_unavailable(
    place: Path, primary: FakeRuntime, program: Program
) -> None:
    with Proxy(place, primary.socket, program.socket, others=FAIL) as proxy:
        theirs = proxy.client.run("vm", handler="vm")
        events = proxy.client.runtime.GetContainerEvents(pb.GetEventsRequest(), timeout=WAIT_LIMIT)
        wait_until(lambda: bool(primary.listeners), WAIT_LIMIT, "it listens")
        program.stop()
        call = Background(lambda: proxy.client.pod_status(theirs))
        program.kill()
        for waiting in (call.done, lambda: next(events)):
            with refused(grpc.StatusCode.UNAVAILABLE):
                waiting()


def test_killing_a_runtime_under_load_fails_calls_but_never_shortens_a_list(
    place: Path, primary: FakeRuntime, program: Program
) -> None:
    """Each round kills the runtime once; nothing is left of it afterwards."""
    primary.add_pod()
    over = threading.Event()

    def call_on(client: Client) -> tuple[set[int], set[grpc.StatusCode]]:
        lengths, codes = set(), set()
        while not over.is_set():
            try:
                lengths.add(len(client.pods()))
            except grpc.RpcError as error:
                codes.add(error.code())
        return lengths, codes

    with Proxy(place, primary.socket, program.socket, others=FAIL) as proxy:
        again(proxy.client)
        callers = [Background(lambda: call_on(proxy.client)) for _ in range(4)]
        try:
            for _ in range(3):
                program.kill()
                wait_until(lambda: _is_refused(proxy.client), WAIT_LIMIT, "its end is noticed")
                program.start()
                again(proxy.client)
        finally:
            over.set()
        for caller in callers:
            lengths, codes = caller.done()
            assert lengths == {2}
            assert codes <= {grpc.StatusCode.UNAVAILABLE}


def _is_refused(client: Client) -> bool:
    try:
        client.pods()
    except grpc.RpcError:
        return True
    return False


def test_a_stopped_runtime_counts_as_down_until_it_answers_again(
    place: Path, primary: FakeRuntime, program: Program
) -> None:
    with Proxy(place, primary.socket, program.socket, settings="answer_timeout = 3", others=FAIL) as proxy:
        theirs = proxy.client.run("vm", handler="vm")
        program.stop()
        with refused(grpc.StatusCode.UNAVAILABLE, "other at .* is not available: no answer within 3.0 s"):
            proxy.client.pods()
        with refused(grpc.StatusCode.UNAVAILABLE, "no answer within"):
            proxy.client.pod_status(theirs)
        program.go_on()
        again(proxy.client)
        assert proxy.client.pod_status(theirs).id == theirs
        told = [event["event"] for event in proxy.events()]
        assert told[-2:] == ["proxy.runtime.down", "proxy.runtime.back"]


def test_a_down_runtime_costs_no_processor_time(place: Path, primary: FakeRuntime) -> None:
    """The proxy retries with pauses."""
    with (
        socket.socket(socket.AF_UNIX) as nobody,
        Proxy(place, primary.socket, f"{place}/nobody.sock") as proxy,
    ):
        nobody.bind(f"{place}/nobody.sock")
        nobody.listen()
        nobody.settimeout(WAIT_LIMIT)
        caller = Background(proxy.client.pods)
        nobody.accept()[0].close()
        with refused(grpc.StatusCode.UNAVAILABLE):
            caller.done()
        assert proxy.process is not None
        before = _processor_seconds(proxy.process.pid)
        for _ in range(4):
            nobody.accept()[0].close()
        assert _processor_seconds(proxy.process.pid) - before < 1


def _processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def wait_until_kept(place: Path, pods: str, containers: str = "") -> None:
    """On disk: both lists, and these ids in them."""
    files = {place / "state/proxy/other.pods": pods, place / "state/proxy/other.containers": containers}
    wait_until(
        lambda: all(file.exists() and id_.encode() in file.read_bytes() for file, id_ in files.items()),
        WAIT_LIMIT,
        "what the runtime lists is kept",
    )


def test_the_last_known_pods_of_a_runtime_with_may_be_down_stay_listed(
    place: Path, primary: FakeRuntime, program: Program
) -> None:
    with Proxy(place, primary.socket, program.socket) as proxy:
        mine = proxy.client.run()
        theirs = proxy.client.run("vm", handler="vm")
        container = proxy.client.create(theirs)
        proxy.client.start(container)
        listed = {pod.id for pod in proxy.client.pods()}
        assert {mine, theirs} < listed
        assert [one.id for one in proxy.client.containers()] == [container]
        program.kill()
        for _ in range(2):
            states = {pod.id: pod.state for pod in proxy.client.pods()}
            assert set(states) == listed
            assert (states[mine], states[theirs]) == (pb.SANDBOX_READY, pb.SANDBOX_READY)
            assert [one.state for one in proxy.client.containers()] == [pb.CONTAINER_RUNNING]
        assert [pod.id for pod in proxy.client.pods(id=theirs)] == [theirs]
        assert proxy.client.pods(id="f00") == []
        with refused(grpc.StatusCode.UNAVAILABLE):
            proxy.client.pod_status(theirs)
        with refused(grpc.StatusCode.NOT_FOUND, "primary has no sandbox"):
            proxy.client.pod_status("f" * 64)
        wait_until_kept(place, pods=theirs, containers=container)
        proxy.stop(signal.SIGKILL)
        proxy.start()
        wait_until(lambda: _answers(proxy.client), WAIT_LIMIT, "the proxy is reached again")
        assert {pod.id for pod in proxy.client.pods()} == listed
        with refused(grpc.StatusCode.UNAVAILABLE, "may belong to the runtime other|is not available"):
            proxy.client.pod_status(theirs)
        program.start()  # with one pod: the others were removed meanwhile
        wait_until(lambda: len(proxy.client.pods()) == 2, WAIT_LIMIT, "the runtime is heard again")
        assert {pod.state for pod in proxy.client.pods()} == {pb.SANDBOX_READY}


ALL_PODS = pb.ListPodSandboxRequest()
# kubelet lists its containers with an empty filter.
ALL_CONTAINERS = pb.ListContainersRequest(filter=pb.ContainerFilter())


def _lists(client: Client) -> None:
    client.ListPodSandbox(ALL_PODS)
    client.ListContainers(ALL_CONTAINERS)


def _streams(client: Client) -> None:
    """Lists by streams, as kubelet since 1.36."""
    assert list(client.runtime.StreamPodSandboxes(pb.StreamPodSandboxesRequest(), timeout=20))
    request = pb.StreamContainersRequest(filter=pb.ContainerFilter())
    assert list(client.runtime.StreamContainers(request, timeout=20))


@pytest.mark.parametrize("ask", [_lists, _streams])
def test_the_pods_of_kubelets_last_list_stay_listed(
    place: Path, primary: FakeRuntime, ask: Callable[[Client], None]
) -> None:
    """The lists include objects created before the proxy started, and none that were removed since."""
    with (
        FakeRuntime(f"{place}/other.sock", "other") as other,
        Proxy(place, primary.socket, other.socket) as proxy,
    ):
        stays, goes = other.add_pod(), other.add_pod()
        containers = {pod: other.add_container(pod) for pod in (stays, goes)}
        ask(proxy.client)
        del other.pods[goes], other.containers[containers[goes]]
        ask(proxy.client)
        other.stop()
        assert [(pod.id, pod.state) for pod in proxy.client.pods()] == [(stays, pb.SANDBOX_READY)]
        kept = proxy.client.ListContainers(ALL_CONTAINERS).containers
        assert [(one.id, one.state) for one in kept] == [(containers[stays], pb.CONTAINER_RUNNING)]


def _pods_listed(client: Client) -> list[str]:
    return [one.id for one in client.ListPodSandbox(ALL_PODS).items]


def _pods_streamed(client: Client) -> list[str]:
    pieces = client.runtime.StreamPodSandboxes(pb.StreamPodSandboxesRequest(), timeout=20)
    return [one.id for piece in pieces for one in piece.pod_sandboxes]


@pytest.mark.parametrize("ask", [_pods_listed, _pods_streamed])
def test_a_late_list_does_not_bring_back_removed_pods(
    place: Path, primary: FakeRuntime, ask: Callable[[Client], list[str]]
) -> None:
    asked, over = threading.Event(), threading.Event()

    def late(request: bytes, context: object) -> bytes:
        is_first, found = not asked.is_set(), other._ListPodSandbox(request, context)
        asked.set()
        assert not is_first or over.wait(WAIT_LIMIT)
        return found

    with (
        FakeRuntime(f"{place}/other.sock", "other") as other,
        Proxy(place, primary.socket, other.socket) as proxy,
    ):
        stays, goes = other.add_pod(), other.add_pod()
        proxy.client.containers()
        other.answers["ListPodSandbox"] = other.answers["StreamPodSandboxes"] = late
        slow = Background(lambda: ask(proxy.client))
        try:
            assert asked.wait(WAIT_LIMIT)
            del other.pods[goes]
            assert ask(proxy.client) == [stays]
        finally:
            over.set()
        assert slow.done() == [stays, goes]
        other.stop()
        assert _pods_listed(proxy.client) == [stays]


def test_a_streamed_list_that_breaks_off_is_not_kept(place: Path, primary: FakeRuntime) -> None:
    def broken(_request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        yield other._StreamPodSandboxes(b"", context)[0]
        context.abort(grpc.StatusCode.INTERNAL, "the database is broken")

    with (
        FakeRuntime(f"{place}/other.sock", "other") as other,
        Proxy(place, primary.socket, other.socket) as proxy,
    ):
        theirs = [other.add_pod(), other.add_pod()]
        assert _pods_streamed(proxy.client) == theirs
        proxy.client.containers()
        other.answers["StreamPodSandboxes"] = broken
        with refused(grpc.StatusCode.INTERNAL, "the database is broken"):
            _pods_streamed(proxy.client)
        other.stop()
        assert _pods_listed(proxy.client) == theirs


def test_a_pod_that_kubelet_has_not_listed_yet_stays_listed(
    place: Path, primary: FakeRuntime, program: Program
) -> None:
    with Proxy(place, primary.socket, program.socket) as proxy:
        theirs = proxy.client.run("vm", handler="vm")
        wait_until_kept(place, pods=theirs)
        program.kill()
        assert theirs in {pod.id for pod in proxy.client.pods()}


def test_a_pull_for_a_pod_of_a_down_runtime_never_goes_to_another_runtime(
    place: Path, primary: FakeRuntime, program: Program
) -> None:
    """A proxy that has not seen the pod start behaves the same."""
    config = pod("vm")
    request = pb.PullImageRequest(image=pb.ImageSpec(image="disk"), sandbox_config=config)
    with Proxy(place, primary.socket, program.socket) as proxy:
        theirs = proxy.client.run("vm", handler="vm")
        wait_until_kept(place, pods=theirs)
        program.kill()
        for _ in range(2):
            with refused(grpc.StatusCode.UNAVAILABLE, "the runtime other at .* is not available"):
                proxy.client.PullImage(request)
            proxy.stop(signal.SIGKILL)
            proxy.start()
            wait_until(lambda: _answers(proxy.client), WAIT_LIMIT, "the proxy is reached again")
        assert not primary.asked("PullImage")


def test_a_runtime_gets_the_new_configuration_when_it_is_back(place: Path, primary: FakeRuntime) -> None:
    """A proxy that was killed meanwhile behaves the same. Of two missed configurations it sends only the newer one,
    once."""
    wanted = [
        pb.UpdateRuntimeConfigRequest(
            runtime_config=pb.RuntimeConfig(network_config=pb.NetworkConfig(pod_cidr=f"10.{number}.0.0/24"))
        )
        for number in (1, 2)
    ]
    other = FakeRuntime(f"{place}/other.sock", "other")
    pending = place / "state/proxy/other.config"
    with Proxy(place, primary.socket, other.socket) as proxy:
        for one in wanted:
            proxy.client.UpdateRuntimeConfig(one)
        assert len(primary.asked("UpdateRuntimeConfig")) == 2
        proxy.stop(signal.SIGKILL)
        proxy.start()
        with other:
            wait_until(lambda: not pending.exists(), WAIT_LIMIT, "the runtime got the configuration")
            assert [call.request for call in other.asked("UpdateRuntimeConfig")] == [wanted[1].SerializeToString()]


def test_events_of_a_runtime_arrive_again_when_it_is_back(place: Path, primary: FakeRuntime) -> None:
    with (
        FakeRuntime(f"{place}/other.sock", "other") as other,
        Proxy(place, primary.socket, other.socket) as proxy,
    ):
        events = proxy.client.runtime.GetContainerEvents(pb.GetEventsRequest(), timeout=2 * WAIT_LIMIT)
        wait_until(lambda: bool(primary.listeners and other.listeners), WAIT_LIMIT, "it listens")
        other.stop()
        wait_until(lambda: not other.listeners, WAIT_LIMIT, "the other has gone")
        primary.tell("of the primary")
        assert next(events).container_id == "of the primary"
        other.start()
        wait_until(lambda: bool(other.listeners), WAIT_LIMIT, "it listens to the other again")
        other.tell("of the other")
        assert next(events).container_id == "of the other"
        events.cancel()


def test_a_killed_proxy_loses_nothing(place: Path, primary: FakeRuntime, program: Program) -> None:
    with Proxy(place, primary.socket, program.socket) as proxy:
        mine, theirs = proxy.client.run(), proxy.client.run("vm", handler="vm")
        before = proxy.client.pods()
        proxy.stop(signal.SIGKILL)
        proxy.start()
        wait_until(lambda: _answers(proxy.client), WAIT_LIMIT, "the proxy is reached again")
        assert [proxy.client.pod_status(id_).id for id_ in (mine, theirs)] == [mine, theirs]
        assert proxy.client.pods() == before


def _answers(client: Client) -> bool:
    try:
        client.Version(pb.VersionRequest())
    except grpc.RpcError:
        return False
    return True


def test_only_root_can_use_the_socket_and_only_one_proxy_serves_it(
    place: Path, primary: FakeRuntime, program: Program
) -> None:
    with Proxy(place, primary.socket, program.socket) as proxy:
        assert stat.S_IMODE(os.stat(proxy.socket).st_mode) == 0o600
        first, proxy.log = proxy.process, place / "second.log"
        assert not proxy.is_ready(proxy.launch())
        assert proxy.stop() == 75
        assert "another virtshim" in proxy.log.read_text()
        proxy.process = first
        assert _answers(proxy.client)


def test_sigterm_ends_the_proxy_during_calls_and_event_streams(
    place: Path, primary: FakeRuntime, program: Program
) -> None:
    with Proxy(place, primary.socket, program.socket) as proxy:
        events = proxy.client.runtime.GetContainerEvents(pb.GetEventsRequest(), timeout=WAIT_LIMIT)
        wait_until(lambda: bool(primary.listeners), WAIT_LIMIT, "it listens")
        assert proxy.stop() == 0
        with refused(grpc.StatusCode.UNAVAILABLE):
            next(events)


def test_garbage_on_the_socket_does_not_disturb_other_clients(
    place: Path, primary: FakeRuntime, program: Program
) -> None:
    with Proxy(place, primary.socket, program.socket) as proxy:
        for said in (
            b"GET / HTTP/1.1\r\n\r\n",
            os.urandom(4096),
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + os.urandom(512),
            b"",
        ):
            with socket.socket(socket.AF_UNIX) as rude:
                rude.connect(proxy.socket)
                rude.sendall(said)
        assert _answers(proxy.client)
