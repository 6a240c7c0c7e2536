"""`virtshim diag` leaves secrets out of its archive."""

from __future__ import annotations

import base64
import dataclasses
import json
import typing
from typing import Any

import pytest

from virtshim.annotations.parse import KNOWN
from virtshim.cli.diag.secrets import KEPT, MAPS, PLAIN_ANNOTATIONS, WITHHELD, Secrets
from virtshim.devices.values import BorrowedDevice, DeviceCondition
from virtshim.model.container import ContainerSpec, ContainerStatus
from virtshim.model.image import Image
from virtshim.model.sandbox import Sandbox
from virtshim.store.schema import metadata

PLANTED = "planted-S3cret/value"


def field_names(kind: Any, seen: set[Any]) -> set[str]:
    """Field names of a dataclass and of the dataclasses in it."""
    names: set[str] = set()
    for inner in typing.get_args(kind):
        names |= field_names(inner, seen)
    if dataclasses.is_dataclass(kind) and kind not in seen:
        seen.add(kind)
        hints = typing.get_type_hints(kind)
        for one in dataclasses.fields(kind):
            names |= {one.name} | field_names(hints[one.name], seen)
    return names


def test_each_field_of_a_record_is_listed_as_kept_or_removed() -> None:
    """A new field is removed by default, until it is added to one of the two lists."""
    seen: set[Any] = set()
    names: set[str] = set()
    for kind in (Sandbox, ContainerSpec, ContainerStatus, Image, BorrowedDevice, DeviceCondition):
        names |= field_names(kind, seen)
    assert names - KEPT - WITHHELD == set()
    assert set() == KEPT & WITHHELD
    assert names >= MAPS


def test_each_column_is_listed_as_kept_or_removed() -> None:
    columns = {column.name for table in metadata.sorted_tables for column in table.columns}
    assert columns - KEPT == {"document"}


def test_annotations_with_data_are_removed() -> None:
    """A new column is removed by default, until it is listed."""
    data = {
        "VirtletCloudInitMetaData", "VirtletCloudInitUserData", "VirtletCloudInitUserDataScript", "VirtletSSHKeys",
        "VirtletLibvirtCPUSetting", "VirtletCloudInitUserDataSource", "VirtletSSHKeySource", "VirtletFilesFromDataSource",
    }  # fmt: skip
    assert data <= KNOWN
    assert data & PLAIN_ANNOTATIONS == set()


@pytest.mark.parametrize(
    "record",
    [
        {"annotations": {"VirtletCloudInitUserData": f"password: {PLANTED}"}},
        {"annotations": {"example.com/anything": PLANTED}},
        {
            "annotations": {
                "kubectl.kubernetes.io/last-applied-configuration": json.dumps({"env": [{"value": PLANTED}]})
            }
        },
        {"envs": [["NAME", base64.b64encode(PLANTED.encode()).decode()]]},
        {"image_config": {"env": [f"NAME={PLANTED}"], "cmd": ["serve", PLANTED]}},
        {"command": ["serve", f"--pass={PLANTED}"], "args": [PLANTED, "two"]},
        {"network": {"fetch_key": PLANTED}},
        {"exit": {"message": f"it said {PLANTED}"}},
        {"a_new_field": {"of": [PLANTED]}},
        [{"deeper": [{"annotations": {"x": {"y": PLANTED}}}]}],
    ],
)
def test_secrets_of_pods_are_removed_from_records_and_from_texts_that_repeat_them(record: Any) -> None:
    secrets = Secrets()
    assert PLANTED not in json.dumps(secrets.record(record))
    assert base64.b64encode(PLANTED.encode()).decode() not in json.dumps(secrets.record(record))
    assert PLANTED not in secrets.cleaned(f"the log of somebody else: {PLANTED}.")


def test_fields_that_identify_a_pod_are_kept() -> None:
    record = {
        "key": {"namespace": "shop", "name": "db-0", "uid": "u-1"},
        "labels": {"app": "database-of-the-shop"},
        "annotations": {"VirtletVCPUCount": "4"},
        "envs": [["KUBERNETES_SERVICE_HOST", base64.b64encode(b"10.96.0.1").decode()], ["SHELL", "L2Jpbi9iYXNo"]],
    }
    secrets = Secrets()
    kept: Any = secrets.record(record)
    assert kept["key"] == record["key"]
    assert kept["labels"] == record["labels"]
    assert kept["annotations"] == record["annotations"]
    assert [name for name, _ in kept["envs"]] == ["KUBERNETES_SERVICE_HOST", "SHELL"]
    text = "10.96.0.1 via 10.0.0.1 for shop/db-0, /bin/bash"
    assert secrets.cleaned(text) == text


@pytest.mark.parametrize(
    "text",
    [
        f"Authorization: Bearer {PLANTED}",
        f"authorization: Basic {base64.b64encode(PLANTED.encode()).decode()}",
        f'{{"auths": {{"ghcr.io": {{"password": "{PLANTED}"}}}}}}',
        f'{{"event": "{{\\"registry_token\\": \\"{PLANTED}\\"}}"}}',
        f"registry.password={PLANTED} retry=3",
        f"  identity_token: '{PLANTED}'",
        f"<graphics type='vnc' passwd='{PLANTED}'/>",
        f"GET https://me:{PLANTED}@example.com/disk.qcow2".replace("/value", "value"),
        f"pull me:{PLANTED}@example.com/disk.qcow2".replace("/value", "value"),
        f"GET https://example.com/disk?X-Amz-Signature={PLANTED}&x=1",
        f"/usr/bin/kubelet --token {PLANTED} --v 2",
        f"virtshim pull --creds me:{PLANTED} example.com/disk.qcow2",
        f"skopeo copy --src-creds=me:{PLANTED} docker://x dir:y",
        f"MYSQL_ROOT_PASSWORD={PLANTED}",
        f"//server/share /mnt cifs user=me,password={PLANTED},vers=3",
        "eyJhbGciOiJSUzI1NiIsImtpZCI6IiJ9.eyJpc3MiOiJwbGFudGVkIn0.c2lnbmF0dXJl planted".replace(" planted", ""),
        "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIplantedplantedplanted me@host",
        "-----BEGIN OPENSSH PRIVATE KEY-----\nplanted\nplanted\n-----END OPENSSH PRIVATE KEY-----",
        "cut off\n" + "plantedplantedplantedplanted\n" * 3 + "-----END RSA PRIVATE KEY-----",
    ],
)
def test_text_that_looks_like_a_secret_is_removed_everywhere(text: str) -> None:
    cleaned = Secrets().cleaned(text)
    assert "[removed]" in cleaned
    for part in ("planted", "S3cret", base64.b64encode(PLANTED.encode()).decode(), "eyJpc3Mi"):
        assert part not in cleaned


@pytest.mark.parametrize("piece", ["a.", "a:", "a:b."])
def test_a_long_hostile_line_is_scanned_in_linear_time(piece: str) -> None:
    """The time limit of a test is the check: quadratic scanning would take hours."""
    line = piece * (2 << 20)
    assert Secrets().cleaned(line) == line


@pytest.mark.parametrize(
    "text",
    [
        "default via 10.88.0.1 dev eth0 proto static",
        "-A CNI-HOSTPORT-DNAT -p tcp -m comment --comment \"dnat name: \\\"kubenet\\\" id: \\\"abc\\\"\"",
        '{"event": "run_sandbox.ready", "tokens": 3, "secret": null}',
        "image docker.io/library/busybox@sha256:" + "0f" * 32,
        "unix:///run/virtshim/virtshim.sock kubernetes.io~secret/db-password",
    ],
)  # fmt: skip
def test_other_text_stays_as_it_is(text: str) -> None:
    assert Secrets().cleaned(text) == text


def test_definitions_lose_their_keys_and_passwords() -> None:
    secrets = Secrets()
    kept = secrets.definition(
        b"<domain xmlns:q='http://libvirt.org/schemas/domain/qemu/1.0'><name>vm</name>"
        b"<metadata><r:record xmlns:r='https://virtshim.io/record/1'>planted-record</r:record></metadata>"
        b"<sysinfo><oemStrings><entry>planted-oem</entry></oemStrings></sysinfo>"
        b"<graphics type='vnc' passwd='planted-vnc' socket='/run/vnc.sock'/><!-- planted -->"
        b"<q:commandline><q:env name='VIRTSHIM_FETCH_KEY' value='planted-key-1'/><q:env name='VIRTSHIM_CONFINE' value='seccomp'/>"
        b"<q:env name='OTHER' value='planted-2'/></q:commandline></domain>"
    )
    assert "planted" not in kept
    assert "seccomp" in kept
    assert "/run/vnc.sock" in kept
    assert secrets.cleaned("FETCH planted-key-1") == "FETCH [removed]"


def test_foreign_configurations_lose_values_whose_names_mean_secret() -> None:
    kept = Secrets().configuration(
        {
            "name": "net",
            "kubernetes": {"kubeconfig": "/etc/cni/kubeconfig", "k8s_auth_token": PLANTED},
            "env": [{"name": "X", "value": PLANTED}],
            "info": json.dumps({"config": {"annotations": {"a": PLANTED}}}),
            "headers": {"x": [PLANTED]},
        }
    )
    assert PLANTED not in json.dumps(kept)
    assert "/etc/cni/kubeconfig" in json.dumps(kept)
