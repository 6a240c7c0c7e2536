"""Each wrong request gets one clear gRPC error, and nothing is left behind (the leak check follows every test)."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import grpc
import pytest
from imageserver import serve_directory
from podclient import container_config, pod_config

from criproto.runtime_v1 import api_pb2 as pb

pytestmark = pytest.mark.e2e


def refused(code: grpc.StatusCode, call, *args) -> str:
    with pytest.raises(grpc.RpcError) as error:
        call(*args)
    assert error.value.code() is code, error.value.details()
    assert "Traceback" not in error.value.details()
    return error.value.details()


def test_a_pod_without_metadata_is_refused(cri):
    assert "metadata" in refused(grpc.StatusCode.INVALID_ARGUMENT, cri.run_pod, pb.PodSandboxConfig())


def test_a_container_in_an_unknown_sandbox_is_refused(cri):
    config = pod_config("x", "/nowhere")
    refused(grpc.StatusCode.NOT_FOUND, cri.create, "f" * 64, container_config("guest"), config)


def test_a_container_of_an_unknown_image_is_refused(cri, node):
    config = pod_config("x", f"{node.directory}/logs/x")
    pod = cri.run_pod(config)
    message = refused(grpc.StatusCode.NOT_FOUND, cri.create, pod, container_config("no/such:image"), config)
    assert "no/such:image" in message
    assert not cri.containers()


@pytest.mark.parametrize("name", ["UPPER CASE", "a//b:tag:tag", "guest@sha256:short", "\x01", "x" * 5000])
def test_a_malformed_image_name_is_refused(cri, name):
    refused(grpc.StatusCode.INVALID_ARGUMENT, cri.pull, name)


def test_all_faults_of_the_annotations_are_told_at_once(cri, node):
    bad = {"VirtletVCPUCount": "many", "VirtletDiskDriver": "floppy", "VirtletSystemUUID": "1"}
    config = pod_config("x", f"{node.directory}/logs/x", annotations=bad)
    message = refused(grpc.StatusCode.INVALID_ARGUMENT, cri.run_pod, config)
    for name in bad:
        assert name in message
    assert not cri.pods()


def test_a_taken_container_name_is_refused(cri, node, image_url):
    config = pod_config("x", f"{node.directory}/logs/x")
    pod = cri.run_pod(config)
    image = cri.pull(f"{image_url}/null.qcow2")
    cri.create(pod, container_config(image), config)
    refused(grpc.StatusCode.ALREADY_EXISTS, cri.create, pod, container_config(image, 256 << 20), config)
    assert len(cri.containers()) == 1


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """Images that must never be used."""
    target = tmp_path / "secret"
    target.write_bytes(b"\0" * 1024)
    run = lambda *argv: subprocess.run(argv, check=True, capture_output=True)  # noqa: E731
    run("qemu-img", "create", "-f", "qcow2", "-F", "raw", "-b", str(target), str(tmp_path / "backed.qcow2"))
    run("qemu-img", "create", "-f", "qcow2", "-o", f"data_file={tmp_path}/data", str(tmp_path / "split.qcow2"), "1M")
    (tmp_path / "empty.qcow2").write_bytes(b"")
    (tmp_path / "page.qcow2").write_bytes(b"<html>404, but with code 200</html>")
    return tmp_path


@pytest.mark.parametrize("image", ["backed.qcow2", "split.qcow2", "empty.qcow2", "page.qcow2"])
def test_a_dangerous_or_broken_image_is_refused(cri, node, hostile, image):
    before = set(os.listdir(f"{node.directory}/state/images/sha256"))
    with serve_directory(hostile) as url:
        message = refused(grpc.StatusCode.INVALID_ARGUMENT, cri.pull, f"{url.removeprefix('http://')}/{image}")
    assert image in message
    assert set(os.listdir(f"{node.directory}/state/images/sha256")) == before
    assert os.listdir(f"{node.directory}/state/images/incoming") == []


def test_a_wrong_digest_names_both(cri, image_url):
    wrong = "0" * 64
    message = refused(grpc.StatusCode.INVALID_ARGUMENT, cri.pull, f"{image_url}/null.qcow2@sha256:{wrong}")
    assert wrong in message


def test_an_unreachable_registry_is_unavailable(cri):
    message = refused(grpc.StatusCode.UNKNOWN, cri.pull, "127.0.0.1:1/some/disk:v1")
    assert message.startswith("RegistryUnavailable: ")
    assert "127.0.0.1:1" in message


def test_a_missing_image_is_not_found(cri, image_url, oci_registry):
    refused(grpc.StatusCode.NOT_FOUND, cri.pull, f"{image_url}/nothing.qcow2")
    refused(grpc.StatusCode.NOT_FOUND, cri.pull, f"{oci_registry.address}/nothing:v1")


@pytest.fixture
def cni_conf(node):
    """The node's own CNI configuration: restored after the test."""
    path = Path(node.directory, "cni/net.d/10-virtshim.conflist")
    text = path.read_text()
    yield path
    path.write_text(text)


def test_a_missing_cni_plugin_is_named(cri, node, cni_conf):
    conf = json.loads(cni_conf.read_text())
    conf["plugins"].append({"type": "no-such-plugin"})
    cni_conf.write_text(json.dumps(conf))
    with pytest.raises(grpc.RpcError) as error:
        cri.run_pod(pod_config("x", f"{node.directory}/logs/x"))
    assert "no-such-plugin" in error.value.details()
    assert not cri.pods()


def test_a_failing_cni_plugin_leaves_nothing(cri, node, cni_conf, tmp_path):
    conf = json.loads(cni_conf.read_text())
    conf["plugins"].append({"type": "static", "ipam": {"type": "static"}})
    cni_conf.write_text(json.dumps(conf))
    with pytest.raises(grpc.RpcError) as error:
        cri.run_pod(pod_config("x", f"{node.directory}/logs/x"))
    assert "IPAM" in error.value.details()
    assert not cri.pods()


def test_no_cni_configuration_makes_the_network_not_ready(cri, node, cni_conf):
    cni_conf.unlink()
    status = cri.runtime.Status(pb.StatusRequest()).status
    conditions = {condition.type: condition for condition in status.conditions}
    assert conditions["RuntimeReady"].status
    assert not conditions["NetworkReady"].status
    assert str(cni_conf.parent) in conditions["NetworkReady"].message
    with pytest.raises(grpc.RpcError):
        cri.run_pod(pod_config("x", f"{node.directory}/logs/x"))
    assert not cri.pods()


def test_what_is_not_there_yet_says_so(cri):
    with pytest.raises(grpc.RpcError) as error:
        cri.runtime.CheckpointPod(pb.CheckpointPodRequest(pod_sandbox_id="x"))
    assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "CheckpointPod" in error.value.details()
