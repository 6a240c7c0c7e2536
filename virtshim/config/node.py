"""Settings of the daemons: directories, CRI, streams, logs, metrics, traces, and the tables of tapmanager and virtshim-shares."""

from __future__ import annotations

import ipaddress
from typing import Any, Literal, Self

from pydantic import ByteSize, field_validator, model_validator

from tapmanager import settings as tapmanager_settings
from virtshim.config.texts import AddressText, PathText, Section, setting
from virtshim.model.errors import InvalidRequest
from virtshim.model.text import PEER_PORT, host_and_port, is_object_name

_ALLOWED = "IP address and port, or `unix:/a/path`"
_PATH_OR_EMPTY = "absolute path, or empty"


class Metrics(Section):
    """[metrics]: `/metrics` of the daemons, for Prometheus; see [metrics.md](metrics.md)."""

    address: AddressText = setting(
        "127.0.0.1:10011",
        "address of `/metrics` of `virtshim serve`; empty: no metrics",
        allowed=_ALLOWED,
        why="loopback: there is no TLS, and metrics contain the names of pods",
    )
    proxy_address: AddressText = setting(
        "127.0.0.1:10012",
        "address of `/metrics` of `virtshim proxy`; empty: no metrics",
        allowed=_ALLOWED,
        why="the proxy is a separate program, so it needs a separate address",
    )


class Tracing(Section):
    """[tracing]: OpenTelemetry traces of `virtshim serve` and `virtshim proxy`; see [metrics.md](metrics.md#traces)."""

    endpoint: str = setting(
        "",
        "collector that receives spans by OTLP over gRPC; empty: no spans are created",
        allowed="`host:port` or `http://host:port` without TLS, `https://host:port` with it",
        pattern=r"^$|^(https?://)?[^/\s]+:\d+$",
        why="without a collector, the tracing library is not even loaded",
    )
    sampling: float = setting(
        1.0,
        "share of calls without a trace context that begin a trace",
        ge=0,
        le=1,
        why="kubelet decides for its own calls; calls that it repeats all the time never begin a trace here",
    )


Level = Literal["debug", "info", "warning", "error"]


class Paths(Section):
    """[paths]: directories. Running VMs use these paths, so change them only on a node without VMs."""

    state_dir: PathText = setting(
        "/var/lib/virtshim",
        "directory of records, images and disks; survives a reboot",
        why="distributions keep permanent data of services there",
    )
    run_dir: PathText = setting(
        "/run/virtshim",
        "directory of sockets; a reboot clears it",
        allowed="absolute path, 60 bytes at most",
        why="in memory, and short: the kernel allows 107 bytes for a socket's path",
    )


class Cri(Section):
    """[cri]: the CRI service that kubelet calls."""

    socket: str = setting(
        "",
        "CRI socket; default RUN_DIR/virtshim.sock",
        allowed="absolute path, or empty",
        why="follows paths.run_dir, so a second node on the same machine need not set it",
    )
    runtime_handlers: tuple[str, ...] = setting(
        ("virtshim",),
        "RuntimeClass handlers that virtshim accepts, in addition to the default handler",
        allowed="names",
        why="the handler of `deploy/kustomize/base/runtimeclass.yaml`",
    )
    cgroup_driver: Literal["auto", "systemd", "cgroupfs"] = setting(
        "auto",
        "cgroup driver that RuntimeConfig reports to kubelet; auto: systemd if systemd runs the machine",
        why="two owners of one cgroup tree undo each other's work; kubelet adopts the reported driver",
    )
    max_calls: int = setting(
        1024,
        "maximum number of concurrent calls, waiting calls included; 32 more are reserved for lists and Status",
        unit="calls",
        ge=8,
        le=8192,
        why="each StopContainer call waits for its grace period: enough for several calls for each pod of a full node",
    )
    pod_commands: int = setting(
        16,
        "most ExecSync commands of one pod at the same time",
        unit="commands",
        ge=1,
        le=4096,
        reload=True,
        why="a pod has a handful of probes and hooks; hanging commands of one pod must not block other pods",
    )
    reconcile_interval: float = setting(
        300.0,
        "time between two searches for leftovers; see When something dies",
        unit="s",
        ge=1,
        le=86400,
        reload=True,
        why="leftovers only take space, and each search reads all records and domains",
    )
    stop_timeout: float = setting(
        30.0,
        "longest time for the steps of an undo or a clean-up",
        unit="s",
        gt=0,
        why="a CNI plugin that works at all answers within this time; the next search repeats steps that ran out of time",
    )


class Streaming(Section):
    """[streaming]: exec, attach and port-forward, whose data kubelet relays."""

    address: str = setting(
        "127.0.0.1",
        "address on which exec, attach and port-forward are served",
        allowed="loopback address",
        why="kubelet runs on the same machine, and there is no TLS",
    )
    port: int = setting(
        0, "TCP port; 0: the kernel chooses one at each start", ge=0, le=65535, why="the port is never in use already"
    )
    sessions: int = setting(
        512,
        "maximum number of sessions of all pods together; the last quarter is reserved for pods that have no session",
        unit="sessions",
        ge=4,
        le=65536,
        reload=True,
        why="as many as fit into the memory limit of the systemd unit",
    )
    pod_sessions: int = setting(
        64,
        "maximum number of sessions of one pod: exec, attach and port-forward together",
        unit="sessions",
        ge=1,
        le=65536,
        reload=True,
        why="more than people open by hand; the clients of one pod must not use up all sessions",
    )
    pod_connections: int = setting(
        128,
        "maximum number of concurrent connections that are forwarded to one pod",
        unit="connections",
        ge=1,
        le=65536,
        reload=True,
        why="a browser opens six per site; benchmarks through port-forward stay below this number",
    )
    pod_bytes: ByteSize = setting(
        ByteSize(8 << 20),
        "maximum amount of data that was sent to one pod and that the pod has not read yet",
        unit="bytes",
        ge=1 << 20,
        reload=True,
        why="enough for a fast connection; the sum over all pods that do not read must fit into the unit's memory",
    )

    @field_validator("address")
    @classmethod
    def _loopback(cls, address: str) -> str:
        # A client that reaches the port and knows a token gets a shell in a guest, and there is no TLS. kubelet, which relays
        # its users' connections, runs on the same machine.
        if not ipaddress.ip_address(address).is_loopback:
            raise ValueError(
                "must be a loopback address, because kubelet relays its users' connections from this machine"
            )
        return address


class Peers(Section):
    """[peers]: connections between nodes, for moves of VMs; see [security.md](security.md#other-nodes)."""

    listen: AddressText = setting(
        "",
        "address on which this node serves other nodes; empty: it serves none",
        allowed="IP address and port, such as `0.0.0.0:10017`, or empty",
        why="a node serves no others until its operator has given it a certificate",
    )
    certificate: str = setting(
        "",
        "this node's certificate, for clients and servers, with the node's name as its only DNS name; empty: the node connects "
        "to no other",
        allowed=_PATH_OR_EMPTY,
        pattern="^(/|$)",
        why="each cluster has its own CA; new content of the file applies from the next connection on",
    )
    key: str = setting(
        "",
        "the certificate's private key, of root and with mode 0600; or 0640, if the group is root",
        allowed=_PATH_OR_EMPTY,
        pattern="^(/|$)",
        why="as `certificate`; all three may be in one file",
    )
    ca: str = setting(
        "",
        "certificates of the CA that signs all nodes' certificates, and nothing else",
        allowed=_PATH_OR_EMPTY,
        pattern="^(/|$)",
        why="as `certificate`. Anyone with a certificate of this CA can act as a node",
    )
    addresses: dict[str, str] = setting(
        {},
        "addresses of nodes, by their names; virtshim looks up the name of any other node in DNS",
        allowed='table such as `{node7 = "10.0.0.7"}`; `host` or `host:port`, port 10017 if there is none',
        reload=True,
        why="many networks resolve the names of their machines",
    )

    @field_validator("listen")
    @classmethod
    def _tcp(cls, listen: str) -> str:
        if listen.startswith("unix:"):
            raise ValueError(
                "must be an IP address and a port, such as 0.0.0.0:10017, because other nodes connect to it"
            )
        return listen

    @field_validator("addresses")
    @classmethod
    def _usable(cls, addresses: dict[str, str]) -> dict[str, str]:
        for node, address in addresses.items():
            if not is_object_name(node):
                raise ValueError(f"{node[:80]!r} is not the name of a node")
            try:
                host_and_port(address, PEER_PORT)
            except InvalidRequest as exc:
                raise ValueError(f"{node}: {exc}") from exc
        return addresses

    @model_validator(mode="after")
    def _all_files(self) -> Self:
        files = {"certificate": self.certificate, "key": self.key, "ca": self.ca}
        missing = [f"peers.{name}" for name, path in files.items() if not path]
        if missing and (self.listen or len(missing) < len(files)):
            raise ValueError(
                f"also set {', '.join(missing)}: connections between nodes need a certificate, its key and the CA"
            )
        return self


class Kubernetes(Section):
    """[kubernetes]: the API server. virtshim reads Secrets and ConfigMaps that pods name in annotations, and writes Events of
    pods."""

    kubeconfig: str = setting(
        "",
        "kubeconfig for reading Secrets and ConfigMaps that pods of the same namespace name, and for writing Events about "
        "problems of VMs; empty: such pods are refused, and problems appear only in the containers' logs",
        allowed="absolute path, or empty",
        reload=True,
        why="a node reads no Secrets until its operator grants the rights ([security.md](security.md#secrets-by-name))",
    )

    @field_validator("kubeconfig")
    @classmethod
    def _absolute(cls, kubeconfig: str) -> str:
        if kubeconfig and not kubeconfig.startswith("/"):
            raise ValueError("must be an absolute path, such as /etc/kubernetes/kubelet.conf")
        return kubeconfig


def _of_tapmanager(name: str) -> Any:
    """The setting as `tapmanager.settings` declares it."""
    one = tapmanager_settings.Settings.__dataclass_fields__[name]
    limits: dict[str, Any] = {"gt": 0, "le": tapmanager_settings.MOST_SECONDS} if isinstance(one.default, float) else {}
    return setting(one.default, **one.metadata["about"], **limits)


class Tapmanager(Section):
    """[tapmanager]: the daemon that owns pods' networks. It reads this table itself, from the files and from a flag for each
    setting, but not from the environment."""

    socket: PathText = _of_tapmanager("socket")
    state_dir: PathText = _of_tapmanager("state_dir")
    netns_dir: PathText = _of_tapmanager("netns_dir")
    cni_conf_dir: PathText = _of_tapmanager("cni_conf_dir")
    cni_bin_dir: tuple[PathText, ...] = _of_tapmanager("cni_bin_dir")
    qemu_user: str = _of_tapmanager("qemu_user")
    qemu_group: str = _of_tapmanager("qemu_group")
    cni_timeout: float = _of_tapmanager("cni_timeout")
    undo_timeout: float = _of_tapmanager("undo_timeout")
    filter: Literal["off", "mac", "mac+ip"] = _of_tapmanager("filter")
    filter_by_pod: bool = _of_tapmanager("filter_by_pod")
    vhost_net: bool = _of_tapmanager("vhost_net")
    cni_gc: bool = _of_tapmanager("cni_gc")
    log_level: Level = _of_tapmanager("log_level")


class Shares(Section):
    """[shares]: virtshim-shares, the daemon that serves volumes to VMs, and the network of pods with containers beside
    their VM. It reads this table itself, only from the files."""

    socket: PathText = setting(
        "/run/virtshim/shares.sock",
        "socket of virtshim-shares",
        why="beside the other sockets, in paths.run_dir",
    )
    virtiofsd: str = setting(
        "",
        "virtiofsd program; default: the path of the distribution",
        allowed="path, or empty",
        reload=True,
        why="virtiofsd of Debian, of Fedora and in Rust are found automatically; a change applies to VMs that start later",
    )
    passt: str = setting(
        "",
        "passt program, for pods with containers beside their VM; default: /usr/bin/passt",
        allowed="path, or empty",
        reload=True,
        why="distributions have it there; its AppArmor profile applies only to this path",
    )


class Log(Section):
    """[log]: logs of all `virtshim` programs. tapmanager has its own level, in its table."""

    level: Level = setting(
        "info", "lowest level that is logged", reload=True, why="one line per call; debug shows each step"
    )
    format: Literal["auto", "text", "json", "journal"] = setting(
        "auto",
        "auto: text on a terminal, journal fields under systemd, otherwise JSON lines",
        why="collectors read JSON and the journal, people read text",
    )
