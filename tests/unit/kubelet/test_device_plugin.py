"""The device plugin works with a kubelet over real sockets."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from fakes.kubelet import FakeKubelet
from structlog.testing import capture_logs

from virtshim.devices.pools import HostFunction, Pool
from virtshim.devices.values import PciAddress
from virtshim.kubelet.device_plugin import (
    DevicePlugin,
    KubeletPlugins,
    ResourcePlugin,
    ResourceServer,
    cdi_file_qualified_name,
    write_cdi_file,
)

QAT = Pool("qat.intel.com/generic", vendor="8086", devices=frozenset({"37c9"}))
NVME = Pool("example.com/nvme", vendor="1b36")


def wait_until(true: Callable[[], object], what: str) -> None:
    until = time.monotonic() + 15
    while not true():
        assert time.monotonic() < until, f"not within 15 s: {what}"
        time.sleep(0.01)


def function(
    text: str, group: int, vendor: str = "8086", device: str = "37c9", driver: str = "vfio-pci"
) -> HostFunction:
    return HostFunction(
        PciAddress.parse(text), vendor, device, driver, driver == "vfio-pci", group, numa=1, has_vfio_node=True
    )


class Node:
    """A node's functions, and the plugin that offers them."""

    def __init__(self, directory: Path, deliver: str) -> None:
        self.functions = [function("0000:3d:01.0", 40), function("0000:3d:01.1", 41)]
        self.directory = directory
        self.cdi = directory / "cdi"
        pools = (QAT, NVME)
        plugins = KubeletPlugins(str(directory))
        cdi = deliver == "cdi"
        self._plugin = DevicePlugin(
            {
                pool.resource: ResourcePlugin(
                    pool, plugins, ResourceServer(pool, partial(cdi_file_qualified_name, pool) if cdi else None)
                )
                for pool in pools
            },
            pools,
            lambda: tuple(self.functions),
            partial(write_cdi_file, str(self.cdi)) if cdi else lambda _pool, _offers: None,
        )
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._plugin.run, args=(self._stopping, 0.02))

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(20)
        assert not self._thread.is_alive()


@pytest.fixture
def directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="vs-dp-"))  # pytest's own are too long for sockets
    yield path
    shutil.rmtree(path)


@contextlib.contextmanager
def plugin_and_kubelet(directory: Path, deliver: str = "nodes") -> Iterator[tuple[Node, FakeKubelet]]:
    kubelet, node = FakeKubelet(directory), Node(directory, deliver)
    kubelet.start()
    node.start()
    try:
        wait_until(lambda: len(kubelet.plugins) == 2 and all(p.lists for p in kubelet.plugins.values()), "registered")
        yield node, kubelet
    finally:
        node.stop()
        kubelet.stop()


def told(logs: list[MutableMapping[str, Any]], event: str) -> list[tuple[str, str]]:
    """(resource, reason) each."""
    return [(entry["resource"], entry["reason"]) for entry in logs if entry["event"] == event]


def test_kubelet_learns_of_each_resource_and_its_devices(directory) -> None:
    with plugin_and_kubelet(directory) as (_, kubelet):
        qat = kubelet.plugins["qat.intel.com/generic"]
        assert qat.lists == [{"0000:3d:01.0": "Healthy", "0000:3d:01.1": "Healthy"}]
        assert [node.ID for node in qat.last.devices[0].topology.nodes] == [1]
        assert kubelet.plugins["example.com/nvme"].lists == [{}]
    assert list(directory.glob("virtshim-*")) == []


def test_sockets_are_for_root_only(directory) -> None:
    with plugin_and_kubelet(directory):
        sockets = list(directory.glob("virtshim-*.sock"))
        assert [socket.stat().st_mode & 0o777 for socket in sockets] == [0o600, 0o600]


def test_a_container_gets_the_vfio_nodes_and_the_addresses(directory) -> None:
    with plugin_and_kubelet(directory) as (_, kubelet):
        answer = kubelet.plugins["qat.intel.com/generic"].allocate("0000:3d:01.1", "0000:3d:01.0")
        assert dict(answer.envs) == {"PCIDEVICE_QAT_INTEL_COM_GENERIC": "0000:3d:01.1,0000:3d:01.0"}
        assert [(node.host_path, node.container_path, node.permissions) for node in answer.devices] == [
            (path, path, "rw") for path in ("/dev/vfio/vfio", "/dev/vfio/41", "/dev/vfio/40")
        ]
        assert not answer.cdi_devices


def test_with_cdi_a_container_gets_names_that_the_file_defines(directory) -> None:
    with plugin_and_kubelet(directory, "cdi") as (node, kubelet):
        answer = kubelet.plugins["qat.intel.com/generic"].allocate("0000:3d:01.0")
        assert [device.name for device in answer.cdi_devices] == ["qat.intel.com/generic=0000:3d:01.0"]
        assert not answer.devices
        file = node.cdi / "virtshim-qat.intel.com_generic.json"
        written = json.loads(file.read_text())
        assert written["kind"] == "qat.intel.com/generic"
        assert [(device["name"], device["annotations"]) for device in written["devices"]] == [
            ("0000:3d:01.0", {"bdf": "0000:3d:01.0"}),
            ("0000:3d:01.1", {"bdf": "0000:3d:01.1"}),
        ]
        assert written["devices"][1]["containerEdits"]["deviceNodes"][1] == {
            "path": "/dev/vfio/41",
            "permissions": "rw",
        }
    assert file.exists(), "containers that were given a name are restarted with it"


def test_devices_whose_cdi_names_cannot_be_written_are_not_allocated(directory) -> None:
    (directory / "cdi").write_text("a file where the directory should be")
    with plugin_and_kubelet(directory, "cdi") as (_, kubelet):
        qat = kubelet.plugins["qat.intel.com/generic"]
        with pytest.raises(grpc.RpcError, match="CDI specification cannot be written"):
            qat.allocate("0000:3d:01.0")
        (directory / "cdi").unlink()
        wait_until(lambda: qat.lists[-1] == {"0000:3d:01.0": "Healthy", "0000:3d:01.1": "Healthy"}, "well again")


def test_a_failing_device_becomes_unhealthy_and_later_healthy_again(directory) -> None:
    with plugin_and_kubelet(directory) as (node, kubelet):
        qat = kubelet.plugins["qat.intel.com/generic"]
        node.functions[1] = function("0000:3d:01.1", 41, driver="c6xxvf")
        wait_until(lambda: qat.lists[-1] == {"0000:3d:01.0": "Healthy", "0000:3d:01.1": "Unhealthy"}, "unhealthy")
        with pytest.raises(grpc.RpcError) as refused:
            qat.allocate("0000:3d:01.1")
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "bound to c6xxvf" in refused.value.details()
        node.functions[1] = function("0000:3d:01.1", 41)
        wait_until(lambda: qat.lists[-1]["0000:3d:01.1"] == "Healthy", "well again")
        assert len(qat.lists) == 3, "kubelet is told of changes only"


def test_a_removed_device_is_not_listed_and_cannot_be_allocated(directory) -> None:
    with plugin_and_kubelet(directory) as (node, kubelet):
        qat = kubelet.plugins["qat.intel.com/generic"]
        del node.functions[0]
        wait_until(lambda: qat.lists[-1] == {"0000:3d:01.1": "Healthy"}, "gone")
        with pytest.raises(grpc.RpcError) as refused:
            qat.allocate("0000:3d:01.0")
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND


def test_a_device_of_two_resources_is_allocated_by_neither(directory) -> None:
    with plugin_and_kubelet(directory) as (node, kubelet):
        node.functions.append(function("0000:3d:02.0", 40, vendor="1b36"))
        wait_until(
            lambda: kubelet.plugins["example.com/nvme"].lists[-1] == {"0000:3d:02.0": "Unhealthy"}, "nvme is unhealthy"
        )
        wait_until(
            lambda: kubelet.plugins["qat.intel.com/generic"].lists[-1]["0000:3d:01.0"] == "Unhealthy", "and qat is"
        )
        with pytest.raises(grpc.RpcError, match="it is in"):
            kubelet.plugins["qat.intel.com/generic"].allocate("0000:3d:01.0")


def test_preference_is_for_one_numa_node(directory) -> None:
    with plugin_and_kubelet(directory) as (_, kubelet):
        chosen = kubelet.plugins["qat.intel.com/generic"].prefer(["0000:3d:01.0", "0000:3d:01.1"], 1, ("0000:3d:01.1",))
        assert chosen == ["0000:3d:01.1"]


def test_the_plugin_registers_again_with_a_restarted_kubelet(directory) -> None:
    with plugin_and_kubelet(directory) as (_, kubelet):
        kubelet.stop()
        kubelet.start()
        wait_until(lambda: len(kubelet.plugins) == 2, "registered again")
        qat = kubelet.plugins["qat.intel.com/generic"]
        wait_until(lambda: qat.lists, "devices are listed again")
        assert qat.allocate("0000:3d:01.0").envs


def test_a_removed_socket_is_created_again(directory) -> None:
    with plugin_and_kubelet(directory) as (_, kubelet):
        (directory / "virtshim-qat.intel.com_generic.sock").unlink()
        before = kubelet.registrations
        wait_until(lambda: kubelet.registrations > before, "registered again")
        assert (directory / "virtshim-qat.intel.com_generic.sock").exists()


def test_the_plugin_waits_for_kubelet_and_survives_a_refusal(directory) -> None:
    node, kubelet = Node(directory, "nodes"), FakeKubelet(directory)
    with capture_logs() as logs:
        node.start()
        wait_until(lambda: told(logs, "plugin.waiting_for_kubelet"), "it says that there is no kubelet")
    assert told(logs, "plugin.waiting_for_kubelet")[0] == (
        "qat.intel.com/generic",
        f"{directory}/kubelet.sock is not there: kubelet is not running",
    )
    try:
        kubelet.refuse = "the runtime is not ready"
        kubelet.start()
        wait_until(lambda: kubelet.registrations >= 3, "it goes on trying")
        kubelet.refuse = ""
        wait_until(lambda: len(kubelet.plugins) == 2, "registered")
    finally:
        node.stop()
        kubelet.stop()


def test_while_kubelet_hangs_the_watchdog_is_fed_and_a_stop_waits_for_one_call(directory) -> None:
    heard, pools = [], [Pool(f"a.b/{name}", vendor="8086") for name in "cde"]

    class Hanging(KubeletPlugins):
        def kubelet(self) -> tuple[int, int]:
            return (1, 1)

        def register(self, resource: str, endpoint: str) -> None:
            heard.append(resource)
            if resource == "a.b/d":
                stopping.set()

    stopping, hanging = threading.Event(), Hanging(str(directory))
    plugins = {pool.resource: ResourcePlugin(pool, hanging, ResourceServer(pool)) for pool in pools}
    DevicePlugin(plugins, pools, lambda: (), lambda _pool, _offers: None).run(
        stopping, 1.0, lambda: heard.append("alive")
    )
    assert heard[:4] == ["a.b/c", "alive", "a.b/d", "alive"]
    assert "a.b/e" not in heard


def test_a_refusal_is_logged_once_and_not_every_second(directory) -> None:
    node, kubelet = Node(directory, "nodes"), FakeKubelet(directory)
    kubelet.refuse = "no"
    kubelet.start()
    with capture_logs() as logs:
        node.start()
        wait_until(lambda: kubelet.registrations >= 6, "it goes on trying")
        node.stop()
    kubelet.stop()
    assert told(logs, "plugin.not_registered") == [
        ("qat.intel.com/generic", "INVALID_ARGUMENT no"),
        ("example.com/nvme", "INVALID_ARGUMENT no"),
    ]


def test_a_file_at_the_sockets_path_is_left_alone(directory) -> None:
    node, kubelet = Node(directory, "nodes"), FakeKubelet(directory)
    kubelet.start()
    (directory / "virtshim-qat.intel.com_generic.sock").write_text("mine")
    node.start()
    try:
        wait_until(lambda: "example.com/nvme" in kubelet.plugins, "the other resource is registered")
    finally:
        node.stop()
        kubelet.stop()
    assert (directory / "virtshim-qat.intel.com_generic.sock").read_text() == "mine"
