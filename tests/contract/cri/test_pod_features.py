"""The feature table in docs/pods.md has every field of a pod in Kubernetes and CRI, and quotes the server's answers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from fakes.cri import Client, refused
from google.protobuf.descriptor import Descriptor

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.cri.validation import without_effect_of_container

pytestmark = pytest.mark.cri

CONFIGS = {"sandbox": pb.PodSandboxConfig.DESCRIPTOR, "container": pb.ContainerConfig.DESCRIPTOR}

# CRI's fields, by message. If one row describes a message as a whole, its fields are not listed. Add a new field here
# when docs/pods.md says what becomes of it.
MESSAGES = {
    "PodSandboxConfig": "metadata hostname log_directory dns_config port_mappings labels annotations linux windows",
    "PodSandboxMetadata": "name uid namespace attempt",
    "DNSConfig": "servers searches options",
    "PortMapping": "protocol container_port host_port host_ip",
    "LinuxPodSandboxConfig": "cgroup_parent security_context sysctls overhead resources",
    "LinuxSandboxSecurityContext": "namespace_options selinux_options run_as_user run_as_group readonly_rootfs "
    "supplemental_groups supplemental_groups_policy privileged seccomp seccomp_profile_path apparmor",
    "NamespaceOption": "network pid ipc target_id userns_options",
    "UserNamespace": "mode uids gids",
    "IDMapping": "host_id container_id length",
    "SELinuxOption": "user role type level",
    "SecurityProfile": "profile_type localhost_ref",
    "LinuxContainerResources": "cpu_period cpu_quota cpu_shares memory_limit_in_bytes oom_score_adj cpuset_cpus cpuset_mems "
    "hugepage_limits unified memory_swap_limit_in_bytes",
    "HugepageLimit": "page_size limit",
    "ContainerConfig": "metadata image command args working_dir envs mounts devices labels annotations log_path stdin stdin_once "
    "tty linux windows CDI_devices stop_signal",
    "ContainerMetadata": "name attempt",
    "ImageSpec": "image annotations user_specified_image runtime_handler image_ref",
    "KeyValue": "key value",
    "Mount": "container_path host_path readonly selinux_relabel propagation uidMappings gidMappings recursive_read_only image "
    "image_sub_path mount_options",
    "Device": "container_path host_path permissions",
    "CDIDevice": "name",
    "LinuxContainerConfig": "resources security_context",
    "LinuxContainerSecurityContext": "capabilities privileged namespace_options selinux_options run_as_user run_as_group "
    "run_as_username readonly_rootfs supplemental_groups supplemental_groups_policy apparmor apparmor_profile seccomp "
    "seccomp_profile_path no_new_privs masked_paths readonly_paths",
    "Capability": "add_capabilities drop_capabilities add_ambient_capabilities",
}
# Messages of nodes with Windows, which virtshim refuses as a whole.
_NOT_LOOKED_INTO = ("WindowsPodSandboxConfig", "WindowsContainerConfig")
_MESSAGE_IN_ROWS = frozenset(
    [
        "LinuxPodSandboxConfig",
        "LinuxContainerConfig",
        "LinuxSandboxSecurityContext",
        "LinuxContainerSecurityContext",
        "Capability",
    ]
)

# The fields of Kubernetes 1.36, core/v1. Ephemeral containers also have those of `of a container`.
FIELDS = {
    "PodSpec": "volumes initContainers containers ephemeralContainers restartPolicy terminationGracePeriodSeconds "
    "activeDeadlineSeconds dnsPolicy nodeSelector serviceAccountName serviceAccount automountServiceAccountToken nodeName "
    "hostNetwork hostPID hostIPC shareProcessNamespace securityContext imagePullSecrets hostname subdomain affinity "
    "schedulerName tolerations hostAliases priorityClassName priority dnsConfig readinessGates runtimeClassName "
    "enableServiceLinks preemptionPolicy overhead topologySpreadConstraints setHostnameAsFQDN os hostUsers schedulingGates "
    "resourceClaims resources hostnameOverride schedulingGroup",
    "Container": "name image command args workingDir ports envFrom env resources.limits resources.requests resources.claims "
    "resizePolicy restartPolicy restartPolicyRules volumeMounts volumeDevices livenessProbe readinessProbe startupProbe "
    "lifecycle.postStart lifecycle.preStop lifecycle.stopSignal terminationMessagePath terminationMessagePolicy "
    "imagePullPolicy securityContext stdin stdinOnce tty",
    "EphemeralContainer": "targetContainerName",
    "securityContext": "seLinuxOptions windowsOptions runAsUser runAsGroup runAsNonRoot supplementalGroups "
    "supplementalGroupsPolicy fsGroup sysctls fsGroupChangePolicy seccompProfile appArmorProfile seLinuxChangePolicy "
    "capabilities privileged readOnlyRootFilesystem allowPrivilegeEscalation procMount",
    "VolumeMount": "recursiveReadOnly subPath subPathExpr mountPropagation",
    "VolumeSource": "hostPath emptyDir gcePersistentDisk awsElasticBlockStore gitRepo secret nfs iscsi glusterfs "
    "persistentVolumeClaim rbd flexVolume cinder cephfs flocker downwardAPI fc azureFile configMap vsphereVolume quobyte "
    "azureDisk photonPersistentDisk projected portworxVolume scaleIO storageos csi ephemeral image",
}

Row = tuple[str, str, str, str]


@pytest.fixture(scope="session")
def table(pytestconfig: pytest.Config) -> list[Row]:
    text = (pytestconfig.rootpath / "docs/pods.md").read_text()
    lines = text.split("\n## Feature by feature\n")[1].split("\n## ")[0].split("\n")
    rows = [tuple(line.strip("|").split("|")) for line in lines if line.startswith("|")][2:]
    assert all(len(row) == 4 for row in rows), [row for row in rows if len(row) != 4]
    return [(a.strip(), b.strip(), c.strip(), d.strip()) for a, b, c, d in rows if b.strip()]


def names(cell: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", cell))


def test_each_row_of_the_feature_table_has_one_of_three_verdicts(table: list[Row], pytestconfig: pytest.Config) -> None:
    assert len(table) > 60
    assert [
        row for row in table if row[1].split(",")[0].split(":")[0] not in ("honoured", "refused", "impossible")
    ] == []
    assert [row for row in table if not row[2]] == []
    assert not any("ignored" in cell for row in table for cell in row)


def test_every_field_of_a_pods_spec_is_in_the_table(table: list[Row]) -> None:
    quoted = (name for row in table for cell in (row[0], row[2]) for name in names(cell))
    said = {word for name in quoted for word in re.findall(r"[\w.]+", name)}
    missing = {of: [name for name in text.split() if name not in said] for of, text in FIELDS.items()}
    missing["PodSpec"].remove("securityContext")
    missing["Container"].remove("securityContext")
    assert {of: names for of, names in missing.items() if names} == {}


def below(prefix: str, message: Descriptor) -> Iterator[str]:
    """The subjects of the rows: fields, or a whole message if it is not listed field by field."""
    for field in message.fields:
        inner = field.message_type
        if inner is not None and inner.name in _MESSAGE_IN_ROWS:
            yield from below(f"{prefix}.{field.name}", inner)
        else:
            yield f"{prefix}.{field.name}"


def test_every_field_of_cri_has_a_row_and_every_row_a_field(table: list[Row]) -> None:
    said = {name for row in table for name in names(row[3])}
    subjects = {name for prefix, message in CONFIGS.items() for name in below(prefix, message)}
    assert subjects - said == set()
    assert {name for name in said if field_of(name) is None} == set()


def field_of(name: str) -> Any:
    prefix, *parts = name.split(".")
    message: Descriptor | None = CONFIGS[prefix]
    field = None
    for part in parts:
        field = message.fields_by_name.get(part) if message else None
        message = field.message_type if field else None
    return field


def test_no_message_of_cri_has_a_field_that_the_table_does_not_know() -> None:
    there: dict[str, set[str]] = {}

    def look(message: Descriptor) -> None:
        there[message.name] = {field.name for field in message.fields}
        for field in message.fields:
            inner = field.message_type
            if inner is None or inner.GetOptions().map_entry or inner.name in (*there, *_NOT_LOOKED_INTO, "Int64Value"):
                continue
            if inner.file == message.file:
                look(inner)

    for message in CONFIGS.values():
        look(message)
    assert there == {name: set(text.split()) for name, text in MESSAGES.items()}


Refusal = tuple[str, dict[str, Any], str]
LOCALHOST = {"profile_type": "Localhost", "localhost_ref": "x"}
REFUSALS: list[Refusal] = [
    *(
        ("sandbox", {"linux": {"security_context": {"namespace_options": {field: "NODE"}}}}, says)
        for field, says in [
            ("network", "a virtual machine cannot share the host's; remove hostNetwork from the pod"),
        ]
    ),
    (
        "container",
        {"linux": {"security_context": {"namespace_options": {"pid": "TARGET", "target_id": "x"}}}},
        "nothing can be started beside the guest (kubectl debug --target)",
    ),
    (
        "sandbox",
        {"linux": {"security_context": {"namespace_options": {"userns_options": {"mode": "POD"}}}}},
        "user namespaces do not apply to a virtual machine, whose users are its own; remove hostUsers: false from the pod",
    ),
    (
        "container",
        {"linux": {"security_context": {"run_as_group": {"value": 1}}}},
        "set without run_as_user; set runAsUser too, or remove runAsGroup",
    ),
    ("sandbox", {"linux": {"sysctls": {"a b": "1"}}}, "is not a sysctl name"),
    *(
        (
            kind,
            {"linux": {"security_context": {profile: LOCALHOST}}},
            "of the node cannot be applied inside a guest; use RuntimeDefault: QEMU runs confined in any case",
        )
        for kind in ("sandbox", "container")
        for profile in ("seccomp", "apparmor")
    ),
    ("sandbox", {"windows": {}}, "is for nodes that run Windows; remove it"),
    ("container", {"windows": {}}, "is for nodes that run Windows; remove it"),
    (
        "container",
        {"linux": {"security_context": {"capabilities": {"drop_capabilities": ["FLY"]}}}},
        "is not a capability; write one of capabilities(7)",
    ),
    (
        "container",
        {"linux": {"security_context": {"capabilities": {"add_ambient_capabilities": ["CHOWN"]}}}},
        "commands in a guest have their user's capabilities",
    ),
    ("container", {"command": ["a\0"]}, "has a NUL character, which no program can receive; remove it"),
    ("container", {"linux": {"resources": {"memory_limit_in_bytes": 4096}}}, "a virtual machine needs"),
    (
        "container",
        {"mounts": [{"container_path": "/x", "host_path": "/x", "propagation": "PROPAGATION_BIDIRECTIONAL"}]},
        "mounts do not propagate out of a virtual machine; set mountPropagation: HostToContainer",
    ),
    (
        "container",
        {"mounts": [{"container_path": "/x", "host_path": "/x", "recursive_read_only": True}]},
        "is set without readonly",
    ),
    (
        "container",
        {"mounts": [{"container_path": "/x", "host_path": "/x", "mount_options": ["noexec"]}]},
        "cannot be applied in a virtual machine; remove them",
    ),
    (
        "container",
        {"mounts": [{"container_path": "/proc/x", "host_path": "/x"}]},
        "cannot be a volume; use another path",
    ),
    (
        "container",
        {"mounts": [{"container_path": "/x", "image": {"image": "x"}}]},
        "an image volume cannot be written; set readOnly: true",
    ),
    ("sandbox", {"labels": {"x": "x" * (600 << 10)}}, "shorten them"),
]


@pytest.mark.parametrize(("of", "changes", "says"), REFUSALS)
def test_the_table_quotes_the_servers_errors_verbatim(
    client: Client, table: list[Row], of: str, changes: dict[str, Any], says: str
) -> None:
    assert any(f'"{says}' in row[2] or f'{says}"' in row[2] for row in table), says
    with refused(grpc.StatusCode.INVALID_ARGUMENT, re.escape(says)):
        if of == "sandbox":
            client.run(**changes)
        else:
            client.create(client.run(), **changes)


def test_a_second_container_is_refused_with_the_error_of_the_table(client: Client, table: list[Row]) -> None:
    says = "cannot run in this pod: a pod is one virtual machine"
    assert any(f'"{says}"' in row[2] for row in table)
    sandbox = client.run()
    client.start(client.create(sandbox))
    with refused(grpc.StatusCode.FAILED_PRECONDITION, says):
        client.create(sandbox, "sidecar")


SELINUX = {"type": "x"}
CONTEXTS = {
    "privileged": {"privileged": True},
    "selinux_options": {"selinux_options": SELINUX},
    "masked_paths": {"masked_paths": ["/proc/x"]},
    "readonly_paths": {"readonly_paths": ["/proc/x"]},
    "seccomp": {"seccomp": {"profile_type": "RuntimeDefault"}},
    "apparmor": {"apparmor": {"profile_type": "RuntimeDefault"}},
    "capabilities": {"capabilities": {"drop_capabilities": ["ALL"]}},
    "no_new_privs": {"no_new_privs": True},
    "readonly_rootfs": {"readonly_rootfs": True},
    "run_as_user": {"run_as_user": {"value": 1}},
}


@pytest.mark.parametrize("context", CONTEXTS.values(), ids=CONTEXTS)
def test_settings_that_only_commands_can_have_are_named_in_the_log(context: dict[str, Any]) -> None:
    config = pb.ContainerConfig(
        linux=pb.LinuxContainerConfig(security_context=pb.LinuxContainerSecurityContext(**context))
    )
    assert without_effect_of_container(config)


def test_a_relabelled_volume_is_named_in_the_log() -> None:
    assert without_effect_of_container(pb.ContainerConfig(mounts=[pb.Mount(selinux_relabel=True)]))
