"""Ordinary pods are accepted, and their fields without effect are logged once."""

import pytest
from fakes.cri import container, pod

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.cri import validation
from virtshim.cri.validation import LogOnce, without_effect_of_container, without_effect_of_sandbox

DEFAULT = pb.SecurityProfile(profile_type=pb.SecurityProfile.RuntimeDefault)

# What kubelet sends for a pod with the strictest common settings.
ORDINARY = container(
    linux=pb.LinuxContainerConfig(
        security_context=pb.LinuxContainerSecurityContext(
            namespace_options=pb.NamespaceOption(
                network=pb.POD, pid=pb.CONTAINER, ipc=pb.POD, userns_options=pb.UserNamespace(mode=pb.NODE)
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
    )
)
POD = "/var/lib/kubelet/pods/u"
ORDINARY.mounts.add(
    container_path="/var/run/secrets/kubernetes.io/serviceaccount",
    host_path=f"{POD}/volumes/kubernetes.io~projected/kube-api-access-x7d2p",
    readonly=True,
)
ORDINARY.mounts.add(container_path="/etc/hosts", host_path=f"{POD}/etc-hosts")
ORDINARY.mounts.add(container_path="/dev/termination-log", host_path=f"{POD}/containers/vm/1")
ORDINARY.annotations["io.kubernetes.container.terminationMessagePath"] = "/dev/termination-log"


def test_an_ordinary_pod_is_accepted_and_fields_without_effect_are_logged_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert validation.container_faults(ORDINARY) == []
    taken = without_effect_of_container(ORDINARY)
    assert {"seccomp", "apparmor", "capabilities", "readonly_rootfs"} <= set(taken)
    logged = LogOnce()
    logged.log(taken)
    logged.log(taken)
    lines = [line for line in capsys.readouterr().out.splitlines() if "without_effect" in line]
    assert len(lines) == len(taken)


def test_a_bare_pod_has_no_fields_without_effect() -> None:
    assert without_effect_of_container(container()) == {}
    assert without_effect_of_sandbox(pod()) == {}
    assert validation.container_faults(container()) == []
    assert validation.sandbox_faults(pod()) == []


def test_fields_that_have_an_effect_are_not_logged() -> None:
    asked = container(command=["sh"], stdin=True, envs=[pb.KeyValue(key="A", value=b"b")], mounts=ORDINARY.mounts[:2])
    assert without_effect_of_container(asked) == {}
