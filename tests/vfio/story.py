"""What happens in the machine, from the first virtual function to `virtshim down`; each step is reported as a line of JSON.

    python tests/vfio/story.py REPORT

A fake kubelet talks to `virtshim device-plugin` and to a node's CRI socket, all over real sockets. Nothing is judged here:
test_passthrough.py does that, outside. A step that fails reports `error` and ends the story.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(PROJECT / part) for part in ("", "deploy", "tests", "tests/e2e", "tests/vfio")]

import grpc  # noqa: E402
import hardware  # noqa: E402
from fakes.kubelet import FakeKubelet, Plugin  # noqa: E402
from fakes.pod_resources import FakePodResources, serving  # noqa: E402
from hardware import EDU_RESOURCE, NVME_RESOURCE, SHARED_RESOURCE  # noqa: E402
from imageserver import serve_directory  # noqa: E402
from leaks import Snapshot  # noqa: E402
from node import VIRTSHIM, Node  # noqa: E402
from podclient import PodClient, container_config, log_lines, pod_config, wait_for_log, wait_until  # noqa: E402

from criproto.deviceplugin_v1beta1 import deviceplugin_pb2 as plugin_pb  # noqa: E402
from criproto.runtime_v1 import api_pb2 as pb  # noqa: E402

# Everything is emulated twice: what takes a second elsewhere takes ten.
PATIENCE = 200.0
MEMORY = 32 << 20

_PLUGIN = f"""
[device_plugin]
directory = "/run/device-plugins"
interval = 1.0
deliver = "%s"
[[device_plugin.resources]]
name = "{EDU_RESOURCE}"
addresses = ["{hardware.EDU}"]
[[device_plugin.resources]]
name = "{NVME_RESOURCE}"
pfs = ["{hardware.NVME}"]
[[device_plugin.resources]]
name = "{SHARED_RESOURCE}"
addresses = ["{hardware.SHARED_EDU}"]
"""
_NODE = """
[devices]
pod_resources_socket = "/run/pod-resources.sock"
"""


class Report:
    def __init__(self, path: str) -> None:
        self._file = open(path, "w", encoding="utf-8", buffering=1)  # noqa: SIM115
        self._begun = time.monotonic()

    @contextmanager
    def step(self, name: str) -> Iterator[dict[str, Any]]:
        """The block fills in the facts."""
        facts: dict[str, Any] = {}
        begun = time.monotonic()
        try:
            yield facts
        except BaseException as exc:
            facts["error"] = f"{exc!r}\n{traceback.format_exc()}"
            raise
        finally:
            now = time.monotonic()
            facts |= {"seconds": round(now - begun, 1), "at": round(now - self._begun, 1)}
            self._file.write(json.dumps({"step": name, **facts}) + "\n")


class Cluster:
    """What a kubelet asks of the node."""

    def __init__(self, client: PodClient, image: str, directory: str) -> None:
        self._client = client
        self._image = client.pull(image)
        self._directory = directory

    def sandbox(self, name: str) -> Sandbox:
        pod = pod_config(name, f"{self._directory}/logs/{name}")
        return Sandbox(self._client, pod, self._client.run_pod(pod))

    def container(
        self,
        *answers: plugin_pb.ContainerAllocateResponse,
        devices: tuple[str, ...] = (),
        envs: Mapping[str, str] | None = None,
    ) -> pb.ContainerConfig:
        """As kubelet makes it of what device plugins answered, each node once."""
        config = container_config(self._image, memory=MEMORY)
        nodes: dict[str, pb.Device] = {}
        for answer in answers:
            config.envs.extend(pb.KeyValue(key=key, value=value.encode()) for key, value in answer.envs.items())
            config.CDI_devices.extend(pb.CDIDevice(name=device.name) for device in answer.cdi_devices)
            for node in answer.devices:
                nodes.setdefault(
                    node.container_path,
                    pb.Device(
                        container_path=node.container_path, host_path=node.host_path, permissions=node.permissions
                    ),
                )
        for path in devices:
            nodes.setdefault(path, pb.Device(container_path=path, host_path=path, permissions="rw"))
        config.devices.extend(nodes.values())
        config.envs.extend(pb.KeyValue(key=key, value=value.encode()) for key, value in (envs or {}).items())
        return config


@dataclass(frozen=True)
class Sandbox:
    client: PodClient
    config: pb.PodSandboxConfig
    id: str

    def run(self, config: pb.ContainerConfig) -> list[str]:
        """Creates and starts it, and waits for the guest's word. Its console."""
        container = self.client.create(self.id, config, self.config)
        self.client.start(container)
        log = self.client.status(container).log_path
        wait_for_log(log, "device guest: done", PATIENCE)
        return log_lines(log)

    def refusal(self, config: pb.ContainerConfig) -> dict[str, Any]:
        """What is said against it, and whether when it was created or started."""
        before = len(self.client.containers())
        stage = "create"
        try:
            container = self.client.create(self.id, config, self.config)
            stage = "start"
            self.client.start(container)
        except grpc.RpcError as exc:
            left = len(self.client.containers()) - before
            return {"of": stage, "code": exc.code().name, "message": exc.details(), "left": left}
        return {"of": "", "code": "OK", "message": "it runs", "left": 1}

    def kill(self, node: Node) -> str:
        """Kills the one QEMU that runs; the container's id, once it has ended."""
        (container,) = [one.id for one in self.client.containers() if one.pod_sandbox_id == self.id]
        (pid,) = node.qemu_pids()
        os.kill(pid, signal.SIGKILL)
        wait_until(
            lambda: self.client.status(container).state == pb.CONTAINER_EXITED, PATIENCE, "the container has ended"
        )
        return container

    def remove(self) -> None:
        self.client.remove_pod(self.id)


@contextmanager
def device_plugin(kubelet: FakeKubelet, deliver: str) -> Iterator[Path]:
    """`virtshim device-plugin`, registered for its resources; its log. `deliver`: nodes or cdi."""
    settings, log = Path("/run/device-plugin.toml"), Path("/run/device-plugin.log")
    settings.write_text(_PLUGIN % deliver)
    kubelet.plugins.clear()
    with log.open("wb") as file:
        process = subprocess.Popen([*VIRTSHIM, "device-plugin", "--config", str(settings)], stdout=file, stderr=file)
    try:

        def known() -> bool:
            return process.poll() is not None or all(
                resource in kubelet.plugins and kubelet.plugins[resource].lists
                for resource in (EDU_RESOURCE, NVME_RESOURCE, SHARED_RESOURCE)
            )

        wait_until(known, PATIENCE, "the device plugin has registered")
        assert process.poll() is None, log.read_text()
        yield log
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def of_qemu(node: Node) -> dict[str, Any]:
    """About the one QEMU that runs."""
    (pid,) = node.qemu_pids()
    limits = Path(f"/proc/{pid}/limits").read_text().splitlines()
    (locked,) = [line.split()[3] for line in limits if line.startswith("Max locked memory")]
    return {"uid": os.stat(f"/proc/{pid}").st_uid, "memlock": locked, "vfio_users": hardware.vfio_users()}


def serves(client: PodClient) -> bool:
    try:
        client.pods()
    except grpc.RpcError:
        return False
    return True


def offered(plugins: Mapping[str, Plugin]) -> dict[str, dict[str, str]]:
    return {resource: plugin.lists[-1] for resource, plugin in plugins.items()}


def drivers() -> dict[str, str]:
    every = (*hardware.VFS, hardware.EDU, hardware.SHARED_EDU, hardware.SHARED_RNG)
    return {address: hardware.driver(address) for address in every}


def tell(report: Report, stack: ExitStack) -> None:
    with report.step("hardware") as facts:
        hardware.make_functions()
        for address in (*hardware.VFS[:2], hardware.EDU, hardware.SHARED_EDU):
            hardware.bind(address, "vfio-pci")
        hardware.bind(hardware.VFS[2], "")
        facts["drivers"] = drivers()
        facts["groups"] = {address: hardware.group(address) for address in drivers()}
    before = Snapshot.take()

    node = Node("/var/tmp/n", "10.99.0.0/16", _NODE, patience=PATIENCE)
    stack.callback(_down, node, before, report)
    with report.step("up") as facts:
        try:
            node.up()
        finally:
            facts["log"] = node.log()
    client = stack.enter_context(PodClient(node.socket, timeout=PATIENCE))
    url = stack.enter_context(serve_directory(PROJECT / "build" / "vfio"))
    with report.step("image"):
        node.make_bridge()
        cluster = Cluster(client, f"{url.removeprefix('http://')}/devices.qcow2", node.directory)

    Path("/run/device-plugins").mkdir()
    kubelet = FakeKubelet(Path("/run/device-plugins"))
    kubelet.start()
    stack.callback(kubelet.stop)
    books = FakePodResources()
    stack.enter_context(serving(books, "/run/pod-resources.sock"))
    with report.step("plugin") as facts:
        plugin = stack.enter_context(ExitStack())
        log = plugin.enter_context(device_plugin(kubelet, "nodes"))
        facts["offered"] = offered(kubelet.plugins)
        facts["log"] = log.read_text()

    edu, vf = (kubelet.plugins[resource] for resource in (EDU_RESOURCE, NVME_RESOURCE))
    first, second, third = hardware.VFS
    # What a plugin for functions with kernel drivers would say: no node, only a variable, and kubelet's books.
    lent = {"PCIDEVICE_EXAMPLE_COM_KERNEL_VF": third}
    in_books = ("example.com/kernel-vf", [third])
    with report.step("granted") as facts:
        answers = edu.allocate(hardware.EDU), vf.allocate(first)
        facts["envs"] = {key: value for answer in answers for key, value in answer.envs.items()}
        books.grant("default", "one", "vm", (EDU_RESOURCE, [hardware.EDU]), (NVME_RESOURCE, [first]), in_books)
        config = cluster.container(*answers, envs=lent)
        facts["devices"] = [device.host_path for device in config.devices]
    with report.step("passthrough") as facts:
        pod = cluster.sandbox("one")
        facts["console"] = pod.run(config)
        facts["drivers"] = drivers()
        facts.update(of_qemu(node))

    with report.step("daemon killed") as facts:
        (running,) = node.qemu_pids()
        os.kill(node.daemons()["virtshim"], signal.SIGKILL)
        wait_until(lambda: node.log().count("cri.serving") == 2 and serves(client), PATIENCE, "virtshim is back")
        facts["drivers"] = drivers()
        facts["same"] = node.qemu_pids() == {running}
        facts["states"] = [pb.ContainerState.Name(container.state) for container in client.containers()]
    with report.step("second pod"):
        other = cluster.sandbox("other")
    with report.step("claimed twice") as facts:
        facts.update(other.refusal(cluster.container(vf.allocate(first))))
    with report.step("forged hint") as facts:
        facts.update(other.refusal(cluster.container(envs={"PCIDEVICE_EXAMPLE_COM_NVME_VF": second})))
    with report.step("forged beside a grant") as facts:
        config = cluster.container(vf.allocate(second), envs={"PCIDEVICE_OTHER": hardware.SHARED_EDU})
        facts.update(other.refusal(config))
    with report.step("group not viable") as facts:
        nodes = ("/dev/vfio/vfio", f"/dev/vfio/{hardware.group(hardware.SHARED_EDU)}")
        hint = {"PCIDEVICE_EXAMPLE_COM_SHARED": hardware.SHARED_EDU}
        facts.update(other.refusal(cluster.container(devices=nodes, envs=hint)))
        facts["driver"] = hardware.driver(hardware.SHARED_RNG)

    with report.step("removed") as facts:
        pod.remove()
        wait_until(lambda: not hardware.vfio_users(), PATIENCE, "nobody has a VFIO group open")
        facts["drivers"] = drivers()
        facts["qemus"] = len(node.qemu_pids())
    with report.step("not bound") as facts:
        nodes = ("/dev/vfio/vfio", f"/dev/vfio/{hardware.group(third)}")
        facts.update(other.refusal(cluster.container(devices=nodes)))

    with report.step("granted by CDI") as facts:
        plugin.close()
        plugin.enter_context(device_plugin(kubelet, "cdi"))
        config = cluster.container(kubelet.plugins[NVME_RESOURCE].allocate(first), envs=lent)
        facts["cdi"] = [device.name for device in config.CDI_devices]
        facts["devices"] = [device.host_path for device in config.devices]
    with report.step("given again") as facts:
        books.grant("default", "other", "vm", (NVME_RESOURCE, [first]), in_books)
        facts["console"] = other.run(config)
    with report.step("killed") as facts:
        dead = other.kill(node)
        wait_until(lambda: not hardware.vfio_users(), PATIENCE, "nobody has a VFIO group open")
        status = client.status(dead)
        facts.update(state=pb.ContainerState.Name(status.state), reason=status.reason)
    with report.step("restarted by kubelet") as facts:
        config.metadata.attempt += 1
        facts["console"] = other.run(config)
        client.remove(dead)
        facts["drivers"] = drivers()
        facts.update(of_qemu(node))


def _down(node: Node, before: Snapshot, report: Report) -> None:
    with report.step("down") as facts:
        facts["log"] = node.log()[-6000:]
        node.down()
        facts["left"] = before.settled(seconds=60)
        facts["drivers"] = drivers()


def main() -> None:
    report = Report(sys.argv[1])
    failed = False
    with suppress(Exception), ExitStack() as stack:
        failed = True
        tell(report, stack)
        failed = False
    with report.step("end") as facts:
        facts["told"] = not failed


if __name__ == "__main__":
    main()
