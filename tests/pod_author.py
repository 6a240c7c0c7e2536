"""Hostile values in pods and containers, and their expected outcome.

An `Attempt` is refused by an error that names the field; a `Harmless` one makes an ordinary VM.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
from fakes.world import IMAGE

from criproto.runtime_v1 import api_pb2 as pb

INVALID, NOT_FOUND, UNIMPLEMENTED = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.UNIMPLEMENTED,
)
FORGED = "x\n2026-01-01T00:00:00Z [info] forged\x1b[2J"
BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
NODE, TARGET = pb.NamespaceMode.Value("NODE"), pb.NamespaceMode.Value("TARGET")


def meta(**changes: Any) -> dict[str, Any]:
    fields = {"name": "web", "namespace": "default", "uid": "uid-of-web"} | changes
    return {"metadata": pb.PodSandboxMetadata(**fields)}


def notes(**annotations: str) -> dict[str, Any]:
    return {"annotations": annotations}


def note(key: str, value: str) -> dict[str, Any]:
    return {"annotations": {key: value}}


def dns(**fields: Any) -> dict[str, Any]:
    return {"dns_config": pb.DNSConfig(**fields)}


def pod_linux(**fields: Any) -> dict[str, Any]:
    return {"linux": pb.LinuxPodSandboxConfig(**fields)}


def pod_context(**fields: Any) -> dict[str, Any]:
    return pod_linux(security_context=pb.LinuxSandboxSecurityContext(**fields))


def shares(**fields: Any) -> dict[str, Any]:
    return pod_context(namespace_options=pb.NamespaceOption(**fields))


def resources(**fields: Any) -> dict[str, Any]:
    return {"linux": pb.LinuxContainerConfig(resources=pb.LinuxContainerResources(**fields))}


def context(**fields: Any) -> dict[str, Any]:
    return {"linux": pb.LinuxContainerConfig(security_context=pb.LinuxContainerSecurityContext(**fields))}


def mount(**fields: Any) -> dict[str, Any]:
    return {"mounts": [pb.Mount(**{"container_path": "/x", "host_path": "/etc"} | fields)]}


def device(**fields: str) -> dict[str, Any]:
    return {"devices": [pb.Device(**fields)]}


@dataclass(frozen=True)
class Attempt:
    """`says`: a part of the error."""

    what: str
    changes: Mapping[str, Any]
    says: str = ""
    code: grpc.StatusCode = INVALID

    def __str__(self) -> str:
        return self.what.replace(" ", "_")


REFUSED_PODS = [
    Attempt("a name that leads out of a directory", meta(name="../../etc/cron.d/x"), r"config\.metadata\.name"),
    Attempt("a name that adds CNI arguments", meta(name="web;IgnoreUnknown=1;IP=10.0.0.1"), r"config\.metadata\.name"),
    Attempt("a namespace that adds CNI arguments", meta(namespace="a;K8S_POD_NAME=b"), r"config\.metadata\.namespace"),
    Attempt("a uid of another directory", meta(uid="../other"), r"config\.metadata\.uid"),
    Attempt("a uid with a line break", meta(uid=FORGED), r"config\.metadata\.uid"),
    Attempt("a name with a zero byte", meta(name="web\0"), r"config\.metadata\.name"),
    Attempt("a name that reads backwards", meta(name="web\u202egpj"), r"config\.metadata\.name"),
    Attempt("a name of a mebibyte", meta(name="a" * (1 << 20)), r"config\.metadata\.name"),
    Attempt("a name that is an option", meta(name="--help"), r"config\.metadata\.name"),
    Attempt("a host name with another line for /etc/hosts", {"hostname": "web\n6.6.6.6 api"}, r"config\.hostname"),
    Attempt("a host name that a shell would run", {"hostname": "$(reboot)"}, r"config\.hostname"),
    Attempt("a host name of a mebibyte", {"hostname": "a" * (1 << 20)}, r"config\.hostname"),
    Attempt(
        "a name server with an option behind it", dns(servers=["10.0.0.1\noptions x"]), r"dns_config\.servers\[0\]"
    ),
    Attempt("a search domain with a name server behind it", dns(searches=["x\nnameserver 6.6.6.6"]), r"searches\[0\]"),
    Attempt("a resolver option with a line break", dns(options=["ndots:5\nnameserver 6.6.6.6"]), r"options\[0\]"),
    Attempt("a log directory that is relative", {"log_directory": "../../etc"}, r"config\.log_directory"),
    Attempt("a log directory with a zero byte", {"log_directory": "/var/log\0/etc"}, r"config\.log_directory"),
    Attempt("a log directory that no file system takes", {"log_directory": "/" + "a" * 5000}, r"config\.log_directory"),
    Attempt("a cgroup above its parent", pod_linux(cgroup_parent="/kubepods/../../system.slice"), "cgroup_parent"),
    Attempt("a cgroup with a line break", pod_linux(cgroup_parent="/kubepods/\n0"), "cgroup_parent"),
    Attempt("a slice that is a path", pod_linux(cgroup_parent="../a.slice"), "cgroup_parent"),
    Attempt("the host's network", shares(network=NODE), "hostNetwork"),
    Attempt("the host's processes", shares(pid=NODE), "hostPID"),
    Attempt("the host's IPC", shares(ipc=NODE), "hostIPC"),
    Attempt("another container's processes", shares(pid=TARGET), "pid is TARGET"),
    Attempt("a sysctl above its directory", pod_linux(sysctls={"net.../../etc/passwd": "x"}), "not a sysctl name"),
    Attempt("a seccomp profile above its directory", pod_context(seccomp_profile_path="localhost/../../x"), "seccomp"),
    Attempt(
        "a host port that is none",
        {"port_mappings": [pb.PortMapping(container_port=80, host_port=70000)]},
        r"port_mappings\.host_port",
    ),
    Attempt(
        "a host address that is none",
        {"port_mappings": [pb.PortMapping(container_port=80, host_port=80, host_ip="0; reboot")]},
        r"port_mappings\.host_ip",
    ),
    Attempt("an emulator of one's own", note("virtshim.io/emulator", "/bin/sh"), "virtshim.io/emulator"),
    Attempt("an annotation that forges a line of the log", note(f"virtshim.io/{FORGED}", "1"), "virtshim.io/x"),
    Attempt("an annotation with a zero byte in its name", note("Virtlet\0VCPUCount", "1"), "Virtlet"),
    Attempt("more vCPUs than there are", notes(VirtletVCPUCount="9" * 400), "VirtletVCPUCount"),
    Attempt("a disk bus that is XML", notes(VirtletDiskDriver="virtio'/><disk/>"), "VirtletDiskDriver"),
    Attempt("a CPU model that is XML", notes(VirtletCPUModel="</cpu><devices/>"), "VirtletCPUModel"),
    Attempt("a CPU setting that is XML", notes(VirtletLibvirtCPUSetting='model: "</cpu><devices/>"'), "CPUSetting"),
    Attempt("a UUID that is a path", notes(VirtletSystemUUID="../../../../etc/passwd"), "VirtletSystemUUID"),
    Attempt("a root disk of a zettabyte", notes(VirtletRootVolumeSize="1e21"), "VirtletRootVolumeSize"),
    Attempt("a root disk of less than nothing", notes(VirtletRootVolumeSize="-1Gi"), "VirtletRootVolumeSize"),
    Attempt("a number that takes long to be read", notes(VirtletRootVolumeSize="1e" + "9" * 50), "RootVolumeSize"),
    Attempt("a disk of the host for its root disk", note("virtshim.io/root-disk", "/dev/sda"), "virtshim.io/root-disk"),
    Attempt("memory without end", note("virtshim.io/max-memory", "1e400"), "virtshim.io/max-memory"),
    Attempt("a thousand serial ports", note("virtshim.io/exec-ports", "1000"), "virtshim.io/exec-ports"),
    Attempt("a screen elsewhere", note("virtshim.io/vnc", "0.0.0.0:5900"), "virtshim.io/vnc"),
    Attempt("a forward elsewhere", note("virtshim.io/forward", "127.0.0.1:10250"), "virtshim.io/forward"),
    Attempt("user data that grows to a gigabyte", notes(VirtletCloudInitUserData=BOMB), "VirtletCloudInitUserData"),
    Attempt(
        "user data that runs Python",
        notes(VirtletCloudInitUserData="!!python/object/apply:os.system [id]"),
        "VirtletCloudInitUserData",
    ),
    Attempt("user data without a bottom", notes(VirtletCloudInitUserData="[" * 100_000), "VirtletCloudInitUserData"),
    Attempt("user data that includes itself", notes(VirtletCloudInitUserData="a: &a [*a]"), "VirtletCloudInitUserData"),
    Attempt("meta-data that is no JSON", notes(VirtletCloudInitMetaData="a: .nan"), "VirtletCloudInitMetaData"),
    Attempt("a file of a Secret that is not its own", notes(VirtletFilesFromDataSource="secret/../x"), "DataSource"),
    Attempt(
        "keys with user data behind them", notes(VirtletSSHKeys="ssh-rsa AAAA\nruncmd: [reboot]"), "VirtletSSHKeys"
    ),
    Attempt("a megabyte of annotations", note("a", "x" * (1 << 20)), r"config\.labels and config\.annotations"),
    Attempt("a megabyte of labels", {"labels": {"a": "x" * (1 << 20)}}, r"config\.labels and config\.annotations"),
]

REFUSED_CONTAINERS = [
    Attempt("a log above the pod's directory", {"log_path": "../../../etc/cron.d/x"}, r"config\.log_path"),
    Attempt("a log elsewhere", {"log_path": "/etc/cron.d/x"}, r"config\.log_path"),
    Attempt("a log that is the directory", {"log_path": "vm/.."}, r"config\.log_path"),
    Attempt("a log by way of what is above", {"log_path": "vm/../../x.log"}, r"config\.log_path"),
    Attempt("a log with a zero byte", {"log_path": "vm/0.log\0/etc"}, r"config\.log_path"),
    Attempt("a log that no file system takes", {"log_path": "a" * 300}, r"config\.log_path"),
    Attempt("no image", {"image": pb.ImageSpec()}, r"config\.image\.image"),
    Attempt(
        "a file of the node as its image", {"image": pb.ImageSpec(image="file:///etc/shadow")}, "file:///etc", NOT_FOUND
    ),
    Attempt("a path of the node as its image", {"image": pb.ImageSpec(image="/var/lib/virtshim/state.db")}, "image"),
    Attempt("an image with a line break", {"image": pb.ImageSpec(image=f"guest:{FORGED}")}, "image"),
    Attempt("an image that was not pulled", {"image": pb.ImageSpec(image="other.test/x")}, "other.test/x", NOT_FOUND),
    Attempt("a digest that is a path", {"image": pb.ImageSpec(image="sha256:../../state.db")}, "image"),
    Attempt(
        "a name of a mebibyte", {"metadata": pb.ContainerMetadata(name="a" * (1 << 20))}, r"config\.metadata\.name"
    ),
    Attempt("a name with a zero byte", {"metadata": pb.ContainerMetadata(name="a\0b")}, r"config\.metadata\.name"),
    Attempt("a name with a line break", {"metadata": pb.ContainerMetadata(name=FORGED)}, "title|metadata"),
    Attempt("a mount that spreads to the host", mount(propagation=pb.PROPAGATION_BIDIRECTIONAL), "propagation"),
    Attempt("mount options", mount(mount_options=["suid", "dev"]), "mount_options"),
    Attempt("a mount with users of its own", mount(uidMappings=[pb.IDMapping(length=1)]), "uidMappings"),
    Attempt("a mount of nowhere", mount(container_path=""), r"mounts.*container_path"),
    Attempt("an image as a volume", mount(image=pb.ImageSpec(image=IMAGE)), r"\]\.host_path and image are both set"),
    Attempt("an image as a volume to write to", mount(host_path="", image=pb.ImageSpec(image=IMAGE)), r"\]\.readonly"),
    Attempt(
        "a directory above an image",
        mount(host_path="", image=pb.ImageSpec(image=IMAGE), readonly=True, image_sub_path="../sha256"),
        "image_sub_path",
    ),
    Attempt("a volume over the guest's root", mount(container_path="/x/../"), "root directory"),
    Attempt("a volume with a zero byte", mount(container_path="/a\0b"), "must be an absolute path"),
    Attempt("a volume that is no path of the node", mount(host_path="../etc"), "must be an absolute path"),
    Attempt("a command with a zero byte", {"command": ["/bin/sh", "-c", "a\0b"]}, r"config\.command"),
    Attempt("an argument with a zero byte", {"args": ["a\0b"]}, r"config\.args"),
    Attempt("a directory with a zero byte", {"working_dir": "/srv\0/../etc"}, r"config\.working_dir"),
    Attempt("a user with a password's colon", context(run_as_username="root:x"), "run_as_username"),
    Attempt("a user with a zero byte", context(run_as_username="root\0"), "run_as_username"),
    Attempt("a user beyond all users", context(run_as_user=pb.Int64Value(value=1 << 40)), "user or group ID"),
    Attempt("a user below all users", context(run_as_user=pb.Int64Value(value=-1)), "user or group ID"),
    Attempt("a seccomp profile that is a path", context(seccomp_profile_path="/etc/shadow"), "seccomp_profile_path"),
    Attempt("an AppArmor profile of the node", context(apparmor_profile="localhost/libvirtd"), "apparmor"),
    Attempt("CPUs with a line break", resources(cpuset_cpus="0\n1"), "cpuset_cpus"),
    Attempt("memory nodes that are a path", resources(cpuset_mems="../0"), "cpuset_mems"),
    Attempt("less memory than none", resources(memory_limit_in_bytes=-5), "memory_limit"),
    Attempt("a quota without a bottom", resources(cpu_quota=-(1 << 60)), "cpu_quota"),
    Attempt("a place behind all others for the OOM killer", resources(oom_score_adj=-5000), "oom_score_adj"),
    Attempt("a cgroup's file elsewhere", resources(unified={"../../cgroup.procs": "1"}), "unified"),
    Attempt("a cgroup's file with two values", resources(unified={"memory.high": "1\n2"}), "unified"),
    Attempt(
        "huge pages whose size is a path",
        resources(hugepage_limits=[pb.HugepageLimit(page_size="../2MB", limit=1 << 21)]),
        "hugepage",
    ),
    Attempt("a device that is no path", device(host_path="sda"), r"config\.devices"),
    Attempt("a device with a line break", device(host_path="/dev/vfio/1\n"), r"config\.devices"),
    Attempt("a device with rights that there are not", device(host_path="/dev/vfio/1", permissions="x"), "permissions"),
    Attempt("a megabyte of annotations", note("a", "x" * (1 << 20)), r"config\.labels and config\.annotations"),
]


@dataclass(frozen=True)
class Harmless:
    what: str
    pod: Mapping[str, Any] = field(default_factory=dict)
    container: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.what.replace(" ", "_")


HARMLESS = [
    Harmless("labels with control characters", {"labels": {"a": FORGED, "</metadata>": "<x/>"}}),
    Harmless("annotations that are XML", note("x", "</metadata><devices><hostdev/></devices>")),
    Harmless("an owner mark of one's own", note("https://virtshim.io/domain/1", "<owner node='other'/>")),
    Harmless("a CDI device in the pod's own annotations", note("cdi.k8s.io/x", "vendor.com/gpu=0")),
    Harmless("a device that Multus would name", note("k8s.v1.cni.cncf.io/networks", f"../../{FORGED}")),
    Harmless("another runtime", note("kubernetes.io/target-runtime", "../../bin/sh")),
    Harmless(
        "an environment that is a command line", container={"envs": [pb.KeyValue(key="A B;reboot", value=b"\0\n")]}
    ),
    Harmless(
        "variables that are the wrapper's", container={"envs": [pb.KeyValue(key="VIRTSHIM_EMULATOR", value=b"/x")]}
    ),
    Harmless("a loader's variable", container={"envs": [pb.KeyValue(key="LD_PRELOAD", value=b"/tmp/x.so")]}),
    Harmless("all that a container may be given", container=context(privileged=True)),
    Harmless("all capabilities", container=context(capabilities=pb.Capability(add_capabilities=["ALL"]))),
    Harmless("a command with control characters", container={"command": ["/bin/sh", "-c", FORGED]}),
    Harmless("a mebibyte of arguments", container={"args": ["x" * (1 << 20)]}),
    Harmless("a working directory that is above", container={"working_dir": "/../../etc"}),
    Harmless("a container that is called as a path", container={"metadata": pb.ContainerMetadata(name="../../x")}),
    Harmless("a container that is called as XML", container={"metadata": pb.ContainerMetadata(name="<&\"'>")}),
    Harmless(
        "a termination message that is above", container=note("io.kubernetes.container.terminationMessagePath", "/../x")
    ),
    Harmless("a stop signal that there is not", container={"stop_signal": 64}),
]


def judge(error: grpc.RpcError, attempt: Attempt) -> None:
    details = error.details() or ""
    assert error.code() is attempt.code, details
    assert re.search(attempt.says, details), details
    assert details.isprintable(), "it goes into logs and terminals"
    assert len(details) < 6100
    assert "Traceback" not in details
