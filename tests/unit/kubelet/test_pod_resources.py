"""The client of kubelet's pod-resources API works over a real socket."""

import shutil
import socket as sockets
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.pod_resources import FakePodResources, serving

from virtshim.devices.values import KubeletGrant
from virtshim.kubelet.pod_resources import PodResourcesClient
from virtshim.model.errors import Unavailable


@pytest.fixture
def socket() -> Iterator[str]:
    """In a short path: its address holds 107 bytes."""
    directory = tempfile.mkdtemp(prefix="kr-")
    yield f"{directory}/kubelet.sock"
    shutil.rmtree(directory)


@pytest.fixture
def client(socket: str) -> Iterator[PodResourcesClient]:
    client = PodResourcesClient(socket, timeout=10.0)
    yield client
    client.close()


@pytest.mark.parametrize(("get", "asked"), [("works", ["Get"]), ("off", ["Get", "List"]), ("unknown", ["Get", "List"])])
def test_a_container_has_its_granted_devices_with_every_kubelet_api(
    get: str, asked: list[str], socket: str, client: PodResourcesClient
) -> None:
    kubelet = FakePodResources(get)
    kubelet.grant("default", "vm", "vm", ("intel.com/vf", ["0000:3b:00.1"]), ("example.com/gpu", ["17"]))
    kubelet.grant("default", "vm", "other", ("intel.com/vf", ["0000:3b:00.2"]))
    kubelet.grant("else", "vm", "vm", ("intel.com/vf", ["0000:3b:00.3"]))
    with serving(kubelet, socket):
        granted = client.granted("default", "vm", "vm")
    assert granted == (KubeletGrant("example.com/gpu", ("17",)), KubeletGrant("intel.com/vf", ("0000:3b:00.1",)))
    assert kubelet.asked == asked


def test_devices_of_one_resource_on_several_numa_nodes_are_one_grant(socket: str, client: PodResourcesClient) -> None:
    kubelet = FakePodResources()
    kubelet.grant("default", "vm", "vm", ("intel.com/vf", ["a", "b"]), ("intel.com/vf", ["c", "a"]))
    with serving(kubelet, socket):
        assert client.granted("default", "vm", "vm") == (KubeletGrant("intel.com/vf", ("a", "b", "c")),)


def test_the_pods_own_containers_are_listed_without_devices_too(socket: str, client: PodResourcesClient) -> None:
    kubelet = FakePodResources()
    kubelet.grant("default", "vm", "vm")
    kubelet.grant("default", "other", "prepare")
    with serving(kubelet, socket):
        assert client.own_containers("default", "vm") == ("vm",)
        assert client.own_containers("default", "none") is None


def test_without_a_kubelet_the_containers_of_a_pod_are_unknown(socket: str, client: PodResourcesClient) -> None:
    assert client.own_containers("default", "vm") is None
    with sockets.socket(sockets.AF_UNIX) as left:
        left.bind(socket)
    with pytest.raises(Unavailable, match="UNAVAILABLE"):
        client.own_containers("default", "vm")


@pytest.mark.parametrize("get", ["works", "off"])
def test_a_kubelet_that_limits_requests_is_asked_again(get: str, socket: str, client: PodResourcesClient) -> None:
    kubelet = FakePodResources(get)
    kubelet.grant("default", "vm", "vm")
    kubelet.refuses = 3
    with serving(kubelet, socket):
        assert client.own_containers("default", "vm") == ("vm",)
    assert kubelet.refuses == 0


def test_an_init_container_that_kubelet_does_not_list_has_the_pods_devices(
    socket: str, client: PodResourcesClient
) -> None:
    kubelet = FakePodResources()
    kubelet.grant("default", "vm", "vm", ("intel.com/vf", ["a"]))
    with serving(kubelet, socket):
        assert client.granted("default", "vm", "init") == (KubeletGrant("intel.com/vf", ("a",), of_pod=True),)


def test_a_container_without_devices_gets_none_of_other_containers(socket: str, client: PodResourcesClient) -> None:
    kubelet = FakePodResources()
    kubelet.grant("default", "vm", "vm")
    kubelet.grant("default", "vm", "other", ("intel.com/vf", ["a"]))
    with serving(kubelet, socket):
        assert client.granted("default", "vm", "vm") == ()


def test_a_pod_that_kubelet_does_not_know_has_no_devices(socket: str, client: PodResourcesClient) -> None:
    with serving(FakePodResources(), socket):
        assert client.granted("default", "vm", "vm") == ()


def test_a_kubelet_that_is_not_there_is_unavailable_and_the_message_says_where_it_was_looked_for(
    socket: str, client: PodResourcesClient
) -> None:
    with pytest.raises(Unavailable, match=rf"{socket}: the socket does not exist.*devices\.pod_resources_socket"):
        client.granted("default", "vm", "vm")


def test_a_socket_that_nobody_listens_on_is_unavailable_at_once(socket: str, client: PodResourcesClient) -> None:
    with sockets.socket(sockets.AF_UNIX) as left:
        left.bind(socket)
    with pytest.raises(Unavailable, match="UNAVAILABLE"):
        client.granted("default", "vm", "vm")


def test_a_kubelet_that_hangs_is_waited_for_no_longer_than_the_limit(socket: str) -> None:
    with sockets.socket(sockets.AF_UNIX) as silent:
        silent.bind(socket)
        silent.listen()
        client = PodResourcesClient(socket, timeout=0.05)
        with pytest.raises(Unavailable, match="DEADLINE_EXCEEDED"):
            client.granted("default", "vm", "vm")
        client.close()


def test_a_restarted_kubelet_is_found_again(socket: str, client: PodResourcesClient) -> None:
    kubelet = FakePodResources()
    kubelet.grant("default", "vm", "vm", ("intel.com/vf", ["a"]))
    with serving(kubelet, socket):
        client.granted("default", "vm", "vm")
    with pytest.raises(Unavailable):
        client.granted("default", "vm", "vm")
    assert not Path(socket).exists()
    with serving(kubelet, socket):
        assert client.granted("default", "vm", "vm") == (KubeletGrant("intel.com/vf", ("a",)),)


def test_while_kubelet_lists_two_pods_of_one_name_their_devices_are_unknown(
    socket: str, client: PodResourcesClient
) -> None:
    """A pod that was deleted by force is listed until its containers have ended."""
    kubelet = FakePodResources("off")
    kubelet.grant("default", "vm", "vm", ("intel.com/vf", ["a"]))
    kubelet.grant("default", "vm", "vm", pod_uid="later")
    with serving(kubelet, socket), pytest.raises(Unavailable, match="lists 2 pods default/vm: an earlier one"):
        client.granted("default", "vm", "vm")


def test_an_answer_about_another_pod_grants_nothing(socket: str, client: PodResourcesClient) -> None:
    kubelet = FakePodResources()
    kubelet.grant("else", "vm", "vm", ("intel.com/vf", ["a"]))
    kubelet.pods[("default", "vm", "")] = kubelet.pods.pop(("else", "vm", ""))
    with serving(kubelet, socket), pytest.raises(Unavailable, match="is about another pod"):
        client.granted("default", "vm", "vm")


def test_an_answer_that_is_too_long_grants_nothing(socket: str, client: PodResourcesClient) -> None:
    kubelet = FakePodResources()
    kubelet.grant("default", "vm", "vm", ("intel.com/vf", ["a" * 1024 * 17 * 1024]))
    with serving(kubelet, socket), pytest.raises(Unavailable, match="RESOURCE_EXHAUSTED"):
        client.granted("default", "vm", "vm")
