"""Fields that a VM cannot honour are refused by name, and so are names that could inject text elsewhere."""

import pytest
from fakes.cri import container, pod

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.cri import to_domain, validation
from virtshim.model.errors import InvalidRequest

NODE, POD, TARGET = pb.NODE, pb.POD, pb.TARGET
LOCALHOST = pb.SecurityProfile(profile_type=pb.SecurityProfile.Localhost, localhost_ref="my-profile")
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


def test_a_privileged_pod_may_name_a_localhost_profile() -> None:
    assert len(validation.container_faults(of_container(seccomp=LOCALHOST, apparmor=LOCALHOST))) == 2
    assert validation.container_faults(of_container(seccomp=LOCALHOST, apparmor=LOCALHOST, privileged=True)) == []
    assert validation.sandbox_faults(sandbox(seccomp=LOCALHOST, privileged=True)) == []


@pytest.mark.parametrize(("context", "field", "remedy"), BAD_CONTEXTS)
def test_a_security_context_that_a_vm_cannot_honour_is_one_fault_in_sandbox_and_container(
    context: dict[str, object], field: str, remedy: str
) -> None:
    for faults in (
        validation.sandbox_faults(sandbox(**context)),
        validation.container_faults(of_container(**context)),
    ):
        (fault,) = faults
        assert field in fault
        assert remedy in fault


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"propagation": pb.PROPAGATION_BIDIRECTIONAL}, "propagation"),
        ({"uidMappings": ONE}, "uidMappings"),
        ({"gidMappings": ONE}, "uidMappings"),
        ({"recursive_read_only": True}, "recursive_read_only is set without readonly"),
        (
            {"recursive_read_only": True, "readonly": True, "propagation": pb.PROPAGATION_HOST_TO_CONTAINER},
            "recursive_read_only: the guest could write to mounts that the node adds later",
        ),
    ],
)
def test_a_mount_that_a_vm_cannot_have_is_refused_by_its_path(changes: dict[str, object], field: str) -> None:
    mounts = [pb.Mount(container_path=path, host_path="/srv") for path in ("/fine", "/data")]
    mounts[1].MergeFrom(pb.Mount(**changes))
    (fault,) = validation.container_faults(container(mounts=mounts))
    assert fault.startswith(f"config.mounts[/data].{field}")


def test_a_mount_may_have_an_image_in_place_of_a_host_path() -> None:
    by_image = pb.Mount(container_path="/data", image=pb.ImageSpec(image="x"), readonly=True)
    part = pb.Mount(container_path="/part", image=pb.ImageSpec(image="x"), image_sub_path="etc/..x", readonly=True)
    claim = pb.Mount(container_path="/db", host_path="/var/lib/kubelet/pods/u/volumes/kubernetes.io~csi/p/mount")
    assert validation.container_faults(container(mounts=[by_image, part, claim])) == []


@pytest.mark.parametrize(
    ("mount", "says"),
    [
        (pb.Mount(image=pb.ImageSpec(image="x")), "readonly is false: an image volume cannot be written"),
        (pb.Mount(image=pb.ImageSpec(image="x"), readonly=True, host_path="/y"), "host_path and image are both set"),
        (pb.Mount(image_sub_path="a", host_path="/y"), "image_sub_path is set without image"),
        (pb.Mount(), "host_path and image are both empty"),
        *(
            (
                pb.Mount(image=pb.ImageSpec(image="x"), readonly=True, image_sub_path=path),
                "is not a path inside the image",
            )
            for path in ("/etc", "..", "a/../../b", "a\0b")
        ),
    ],
)
def test_a_mount_with_neither_an_image_nor_a_host_path_is_a_fault(mount: pb.Mount, says: str) -> None:
    mount.container_path = "/v\n"
    (fault,) = validation.container_faults(container(mounts=[mount]))
    assert fault.startswith("config.mounts[/v")
    assert says in fault
    assert "\n" not in fault


def test_sysctls_are_for_the_guest() -> None:
    linux = pb.LinuxPodSandboxConfig(
        sysctls={
            "net.core.somaxconn": "1",
            "net/ipv4/ip_unprivileged_port_start": "0",
            "net.ipv4.conf.eth0/100.forwarding": "1",
            "net.ipv4.ip_local_port_range": "1024\t65535",
        }
    )
    assert validation.sandbox_faults(pod(linux=linux)) == []


def test_each_invalid_sysctl_is_named() -> None:
    names = ("../../etc/passwd", "a", "net..ipv4", "net.-x", "net.ipv4.\n")
    faults = validation.sandbox_faults(pod(linux=pb.LinuxPodSandboxConfig(sysctls=dict.fromkeys(names, "1"))))
    assert len(faults) == len(names)
    assert all("securityContext.sysctls" in fault and "is not a sysctl name" in fault for fault in faults)
    (fault,) = validation.sandbox_faults(pod(linux=pb.LinuxPodSandboxConfig(sysctls={"net.core.somaxconn": "1\n2"})))
    assert fault.startswith("config.linux.sysctls[net.core.somaxconn]")
    assert "a value that no sysctl can have" in fault


def test_an_absurd_number_of_sysctls_is_refused() -> None:
    linux = pb.LinuxPodSandboxConfig(sysctls={f"net.a{n}": "1" * 4000 for n in range(20)})
    (fault,) = validation.sandbox_faults(pod(linux=linux))
    assert "config.linux.sysctls (securityContext.sysctls) hold 80130 bytes" in fault


# --- names that become lines of the guest's files, or arguments of CNI plugins


def config(**fields: object) -> pb.PodSandboxConfig:
    meta = pb.PodSandboxMetadata(name="web", namespace="default", uid="u-1")
    return pb.PodSandboxConfig(metadata=meta, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"hostname": "web-0.svc"},
        {"dns_config": pb.DNSConfig(servers=["10.0.0.10", "fd00::a"], searches=["svc.cluster.local", "_x.y."])},
        {"dns_config": pb.DNSConfig(searches=["."], options=["ndots:5", "edns0", "single-request-reopen"])},
    ],
)
def test_ordinary_values_from_kubelet_are_accepted(fields: dict[str, object]) -> None:
    assert to_domain.sandbox_config(config(**fields), "").hostname == fields.get("hostname", "")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"hostname": "web\nroot"}, "config.hostname"),
        ({"hostname": "-web"}, "config.hostname"),
        ({"dns_config": pb.DNSConfig(servers=["10.0.0.10\noptions rotate"])}, r"config.dns_config.servers\[0\]"),
        ({"dns_config": pb.DNSConfig(searches=["a", "svc\tlocal"])}, r"config.dns_config.searches\[1\]"),
        ({"dns_config": pb.DNSConfig(searches=[""])}, r"config.dns_config.searches\[0\]"),
        ({"dns_config": pb.DNSConfig(options=["ndots: 5"])}, r"config.dns_config.options\[0\]"),
        ({"dns_config": pb.DNSConfig(options=["ndots:5\x7f"])}, r"config.dns_config.options\[0\]"),
    ],
)
def test_a_value_that_could_inject_lines_is_refused_and_the_field_named(fields: dict[str, object], named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        to_domain.sandbox_config(config(**fields), "")


@pytest.mark.parametrize("field", ["name", "namespace", "uid"])
@pytest.mark.parametrize("value", ["", "a;b=c", "a\nb", "-a", "x" * 254])
def test_a_pod_name_that_cni_cannot_take_is_refused_and_the_field_named(field: str, value: str) -> None:
    wanted = config()
    setattr(wanted.metadata, field, value)
    with pytest.raises(InvalidRequest, match=rf"config\.metadata\.{field}"):
        to_domain.sandbox_key(wanted)
