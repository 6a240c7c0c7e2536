"""What a VM cannot honour is refused by name; what ordinary pods carry is taken."""

import pytest
from fakes.cri import container, pod

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.cri import pod_fields
from virtshim.cri.log_once import LogOnce

NODE, POD, TARGET = pb.NODE, pb.POD, pb.TARGET
LOCALHOST = pb.SecurityProfile(profile_type=pb.SecurityProfile.Localhost, localhost_ref="my-profile")
DEFAULT = pb.SecurityProfile(profile_type=pb.SecurityProfile.RuntimeDefault)
ONE = [pb.IDMapping(host_id=65536, container_id=0, length=65536)]


def sandbox(**context: object) -> pb.PodSandboxConfig:
    return pod(linux=pb.LinuxPodSandboxConfig(security_context=pb.LinuxSandboxSecurityContext(**context)))


def of_container(**context: object) -> pb.ContainerConfig:
    return container(linux=pb.LinuxContainerConfig(security_context=pb.LinuxContainerSecurityContext(**context)))


def options(**modes: object) -> dict[str, pb.NamespaceOption]:
    return {"namespace_options": pb.NamespaceOption(**modes)}


BAD_CONTEXTS = [
    (options(network=NODE), "namespace_options.network", "hostNetwork"),
    (options(pid=NODE), "namespace_options.pid", "hostPID"),
    (options(ipc=NODE), "namespace_options.ipc", "hostIPC"),
    (options(pid=TARGET, target_id="x"), "namespace_options.pid is TARGET", "--target"),
    (options(userns_options=pb.UserNamespace(mode=POD, uids=ONE, gids=ONE)), "userns_options", "hostUsers"),
    (options(userns_options=pb.UserNamespace(mode=POD, uids=ONE * 2)), "userns_options", "hostUsers"),
    (options(userns_options=pb.UserNamespace(mode=POD)), "userns_options", "hostUsers"),
    (options(userns_options=pb.UserNamespace(mode=pb.CONTAINER)), "userns_options", "hostUsers"),
    (options(userns_options=pb.UserNamespace(mode=NODE, uids=ONE)), "userns_options", "hostUsers"),
    ({"run_as_group": pb.Int64Value(value=5)}, "run_as_group", "runAsUser"),
    ({"seccomp": LOCALHOST}, "seccomp: the profile 'my-profile'", "RuntimeDefault"),
    ({"seccomp_profile_path": "localhost/old"}, "seccomp: the profile 'old'", "RuntimeDefault"),
    ({"apparmor": LOCALHOST}, "apparmor: the profile 'my-profile'", "RuntimeDefault"),
]


@pytest.mark.parametrize(("context", "field", "remedy"), BAD_CONTEXTS)
def test_a_context_that_a_vm_cannot_honour_is_one_fault_of_sandbox_and_container(
    context: dict[str, object], field: str, remedy: str
) -> None:
    for faults in (
        pod_fields.sandbox_faults(sandbox(**context)),
        pod_fields.container_faults(of_container(**context)),
    ):
        (fault,) = faults
        assert field in fault
        assert remedy in fault


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"propagation": pb.PROPAGATION_HOST_TO_CONTAINER}, "propagation"),
        ({"propagation": pb.PROPAGATION_BIDIRECTIONAL}, "propagation"),
        ({"uidMappings": ONE}, "uidMappings"),
        ({"gidMappings": ONE}, "uidMappings"),
        ({"recursive_read_only": True}, "recursive_read_only"),
    ],
)
def test_a_mount_that_a_vm_cannot_have_is_refused_by_its_path(changes: dict[str, object], field: str) -> None:
    mounts = [pb.Mount(container_path="/fine"), pb.Mount(container_path="/data", **changes)]
    (fault,) = pod_fields.container_faults(container(mounts=mounts))
    assert fault.startswith(f"config.mounts[/data].{field}")


def test_image_volumes_may_come_and_are_no_fault() -> None:
    by_image = pb.Mount(container_path="/data", image=pb.ImageSpec(image="x"))
    by_path = pb.Mount(container_path="/more", image_sub_path="a")
    asked = container(mounts=[pb.Mount(container_path="/fine"), by_image, by_path])
    assert pod_fields.container_faults(asked) == []
    told = pod_fields.unimplemented(asked)
    assert told.startswith("config.mounts[/data].image, config.mounts[/more].image: ")
    assert pod_fields.unimplemented(container(mounts=[pb.Mount(container_path="/fine")])) == ""


def test_each_sysctl_is_named() -> None:
    linux = pb.LinuxPodSandboxConfig(sysctls={"net.core.somaxconn": "1", "kernel.shm_rmid_forced": "1"})
    faults = pod_fields.sandbox_faults(pod(linux=linux))
    assert [fault.split("]")[0] for fault in faults] == [
        "config.linux.sysctls[kernel.shm_rmid_forced",
        "config.linux.sysctls[net.core.somaxconn",
    ]


# What kubelet sends for a pod with the strictest common settings.
ORDINARY = of_container(
    namespace_options=pb.NamespaceOption(
        network=POD, pid=pb.CONTAINER, ipc=POD, userns_options=pb.UserNamespace(mode=NODE)
    ),
    capabilities=pb.Capability(drop_capabilities=["ALL"]),
    privileged=True,
    run_as_user=pb.Int64Value(value=1000),
    run_as_group=pb.Int64Value(value=1000),
    supplemental_groups=[5],
    supplemental_groups_policy=pb.Strict,
    no_new_privs=True,
    readonly_rootfs=True,
    masked_paths=["/proc/kcore"],
    readonly_paths=["/proc/sys"],
    seccomp=DEFAULT,
    seccomp_profile_path="runtime/default",
    apparmor=DEFAULT,
    apparmor_profile="runtime/default",
    selinux_options=pb.SELinuxOption(level="s0"),
)
ORDINARY.mounts.extend(
    pb.Mount(container_path=path, host_path="/x")
    for path in ("/var/run/secrets/kubernetes.io/serviceaccount", "/etc/hosts")
)
ORDINARY.mounts.add(container_path="/dev/termination-log", host_path="/var/lib/kubelet/pods/u/containers/vm/1")
ORDINARY.annotations["io.kubernetes.container.terminationMessagePath"] = "/dev/termination-log"


def test_an_ordinary_pod_is_taken_and_what_has_no_effect_is_logged_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert pod_fields.container_faults(ORDINARY) == []
    without_effect = pod_fields.container_without_effect(ORDINARY)
    assert {"seccomp", "apparmor", "capabilities", "kubelet_mounts", "no_new_privs"} <= set(without_effect)
    assert "mounts" not in without_effect
    logged = LogOnce()
    logged.without_effect(without_effect)
    logged.without_effect(without_effect)
    lines = [line for line in capsys.readouterr().out.splitlines() if "without_effect" in line]
    assert len(lines) == len(without_effect)


def test_a_bare_pod_has_nothing_without_effect() -> None:
    assert pod_fields.container_without_effect(container()) == {}
    assert pod_fields.sandbox_without_effect(pod()) == {}
    assert pod_fields.container_faults(container()) == []
    assert pod_fields.sandbox_faults(pod()) == []


def test_what_a_pod_asks_for_beyond_the_usual_is_told_by_kind() -> None:
    asked = container(
        command=["sh"], stdin=True, envs=[pb.KeyValue(key="A", value=b"b")], mounts=[pb.Mount(container_path="/data")]
    )
    assert set(pod_fields.container_without_effect(asked)) == {"mounts"}
