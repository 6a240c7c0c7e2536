"""Settings of the daemons themselves: directories, CRI, streams, logs, and the tables of tapmanager and virtshim-shares."""

from __future__ import annotations

import ipaddress
from typing import Literal

from pydantic import ByteSize, field_validator

from virtshim.config.texts import AddressText, PathText, Section, setting

# Settings of what is told about the daemons: to Prometheus, and to a collector of traces.

_ALLOWED = "IP address and port, or `unix:/a/path`"


class Metrics(Section):
    """[metrics]: `/metrics` of the daemons, for Prometheus; see metrics.md."""

    address: AddressText = setting(
        "127.0.0.1:10011",
        "where `/metrics` of `virtshim serve` is; empty: nowhere",
        allowed=_ALLOWED,
        why="loopback: there is no TLS, and the names of pods are told",
    )
    proxy_address: AddressText = setting(
        "127.0.0.1:10012",
        "where `/metrics` of `virtshim proxy` is; empty: nowhere",
        allowed=_ALLOWED,
        why="a program of its own needs an address of its own",
    )


class Tracing(Section):
    """[tracing]: OpenTelemetry traces of `virtshim serve` and `virtshim proxy`; see tracing.md."""

    endpoint: str = setting(
        "",
        "collector that spans are sent to by OTLP over gRPC; empty: none is made",
        allowed="`host:port` or `http://host:port` without TLS, `https://host:port` with it",
        pattern=r"^$|^(https?://)?[^/\s]+:\d+$",
        why="nothing of it is loaded then",
    )
    sampling: float = setting(
        1.0,
        "share of calls that begin a trace, of those that come without one",
        ge=0,
        le=1,
        why="kubelet decides for its own calls; those that it repeats all the time never begin one here",
    )


Level = Literal["debug", "info", "warning", "error"]


class Paths(Section):
    """[paths]: where things are. A VM knows them by these paths: change them on a node without VMs."""

    state_dir: PathText = setting(
        "/var/lib/virtshim",
        "records, images, disks; survives a reboot",
        why="where distributions keep what services must not lose",
    )
    run_dir: PathText = setting(
        "/run/virtshim",
        "sockets; gone after a reboot",
        allowed="absolute path, 60 bytes at most",
        why="a file system in memory, and short: the kernel takes 107 bytes for a socket's path",
    )


class Cri(Section):
    """[cri]: what kubelet calls."""

    socket: str = setting(
        "",
        "CRI socket; default RUN_DIR/virtshim.sock",
        allowed="absolute path, or empty",
        why="follows paths.run_dir, so that two nodes on a machine need one setting less",
    )
    runtime_handlers: tuple[str, ...] = setting(
        ("virtshim",),
        "RuntimeClass handlers this node answers to, beside the default one",
        allowed="names",
        why="the handler of `deploy/runtimeclass.yaml`",
    )
    cgroup_driver: Literal["auto", "systemd", "cgroupfs"] = setting(
        "auto",
        "what RuntimeConfig tells kubelet; auto: systemd where systemd runs the machine",
        why="two owners of one cgroup tree undo each other's work; kubelet adopts what it is told",
    )
    max_calls: int = setting(
        1024,
        "calls served at once, waiting ones included; lists and Status have their own 32",
        unit="calls",
        ge=8,
        le=8192,
        why="a StopContainer waits out its grace: several for each pod of a full node",
    )
    pod_commands: int = setting(
        16,
        "commands of ExecSync that one pod may run at once",
        unit="commands",
        ge=1,
        le=4096,
        reload=True,
        why="probes and hooks are a handful; a pod whose commands hang must not take the others' places",
    )
    reconcile_interval: float = setting(
        300.0,
        "time between two searches for leftovers; see When something dies",
        unit="s",
        ge=1,
        le=86400,
        reload=True,
        why="leftovers cost room, not correctness, and a look reads all records and domains",
    )
    stop_timeout: float = setting(
        30.0,
        "time that undo and clean-up steps may take",
        unit="s",
        gt=0,
        why="a CNI plugin that answers at all does within it; what is over time is done by the next search",
    )


class Streaming(Section):
    """[streaming]: exec, attach and port-forward, which kubelet relays."""

    address: str = setting(
        "127.0.0.1",
        "address of exec, attach and port-forward; a loopback one",
        allowed="loopback address",
        why="kubelet is on the same machine, and there is no TLS",
    )
    port: int = setting(
        0, "its TCP port; 0: the kernel chooses one at each start", ge=0, le=65535, why="never taken by somebody else"
    )
    sessions: int = setting(
        512,
        "sessions of all pods; the last quarter is for pods without one",
        unit="sessions",
        ge=4,
        le=65536,
        reload=True,
        why="what the memory limit of the unit has room for",
    )
    pod_sessions: int = setting(
        64,
        "sessions of one pod: exec, attach and port-forward together",
        unit="sessions",
        ge=1,
        le=65536,
        reload=True,
        why="more than people open by hand; one pod's clients must not take all",
    )
    pod_connections: int = setting(
        128,
        "connections that are forwarded to one pod at once",
        unit="connections",
        ge=1,
        le=65536,
        reload=True,
        why="a browser opens six to a site; a benchmark through port-forward stays below it",
    )
    pod_bytes: ByteSize = setting(
        ByteSize(8 << 20),
        "data sent to one pod that it has not read",
        unit="bytes",
        ge=1 << 20,
        reload=True,
        why="keeps a fast line busy; times all pods that do not read it must fit into the unit's memory",
    )

    @field_validator("address")
    @classmethod
    def _loopback(cls, address: str) -> str:
        # Whoever reaches the port and learns a token has a shell in a guest, and there is no TLS: kubelet, which relays its
        # users' connections, is on the same machine.
        if not ipaddress.ip_address(address).is_loopback:
            raise ValueError("must be a loopback address: kubelet relays its users' connections from this machine")
        return address


class Kubernetes(Section):
    """[kubernetes]: the API server. It is asked for Secrets and ConfigMaps that pods name in annotations, and it gets Events of
    pods."""

    kubeconfig: str = setting(
        "",
        "file by which Secrets and ConfigMaps are read that pods of their namespace name, and by which pods get Events of their "
        "VMs' troubles; empty: such pods are refused, and troubles are in the containers' logs only",
        allowed="absolute path, or empty",
        reload=True,
        why="a node reads no Secrets until its operator says with what rights ([security.md](security.md#secrets-by-name))",
    )

    @field_validator("kubeconfig")
    @classmethod
    def _absolute(cls, kubeconfig: str) -> str:
        if kubeconfig and not kubeconfig.startswith("/"):
            raise ValueError("must be an absolute path, such as /etc/kubernetes/kubelet.conf")
        return kubeconfig


class Tapmanager(Section):
    """[tapmanager]: what owns pods' networks, and reads this table by itself: the files alone, and a flag for each setting."""

    # A test holds names and defaults together with `tapmanager.settings`.
    socket: PathText = setting("/run/virtshim/tapmanager.sock", "its socket", why="beside the others, in paths.run_dir")
    state_dir: PathText = setting(
        "/var/lib/virtshim/tapmanager",
        "its ledger: records of attached pods",
        why="must outlive a reboot: CNI's DEL needs what ADD was given",
    )
    netns_dir: PathText = setting(
        "/run/netns", "where network namespaces get their names", why="where `ip netns` looks, so that people find them"
    )
    cni_conf_dir: PathText = setting(
        "/etc/cni/net.d", "CNI configuration; the first file by name is used", why="where network add-ons put it"
    )
    cni_bin_dir: tuple[PathText, ...] = setting(
        ("/opt/cni/bin", "/usr/lib/cni", "/usr/libexec/cni"),
        "where CNI plugins are looked for",
        allowed="absolute paths, one at least",
        why="where add-ons, Debian and Fedora put them",
    )
    qemu_user: str = setting(
        "",
        "user or uid that QEMU runs as; default: the distribution's own",
        allowed="name or number",
        why="libvirt-qemu or qemu, whichever is there",
    )
    qemu_group: str = setting(
        "",
        "group or gid of VMs' users: `libvirt.qemu_group`; default: that of `qemu_user`",
        allowed="name or number",
        why="the group that /dev/kvm belongs to",
    )
    cni_timeout: float = setting(
        90.0,
        "longest run of one CNI plugin",
        unit="s",
        gt=0,
        le=3600,
        reload=True,
        why="below kubelet's own limit of four minutes for RunPodSandbox",
    )
    undo_timeout: float = setting(
        30.0,
        "longest clean-up after a failed attach",
        unit="s",
        gt=0,
        le=3600,
        reload=True,
        why="the caller waits for it; what is left is removed with the pod",
    )
    filter: Literal["off", "mac", "mac+ip"] = setting(
        "mac+ip",
        "forged senders that VMs cannot send, where CNI gave addresses",
        reload=True,
        why="as a container without NET_RAW; see [network.md](network.md#forged-senders). Of pods that come later",
    )
    filter_by_pod: bool = setting(
        False,
        "whether a pod's annotation may ask for a weaker filter",
        reload=True,
        why="pods' authors are not trusted",
    )
    vhost_net: bool = setting(
        True,
        "whether the kernel moves guests' frames (vhost-net), where /dev/vhost-net works",
        reload=True,
        why="QEMU is woken for no frame; false keeps that part of the kernel out of guests' reach. Of VMs that start later",
    )
    cni_gc: bool = setting(
        False,
        "free, at the start, what CNI holds for pods that are not tapmanager's",
        why="true frees the leases of other runtimes' pods on the network: [network.md](network.md#status-gc-and-check)",
    )
    log_level: Level = setting(
        "info", "from which level on it logs", reload=True, why="one line for each pod that comes or goes"
    )


class Shares(Section):
    """[shares]: virtshim-shares, the program that serves volumes to VMs. It reads this table by itself, from the files alone."""

    socket: PathText = setting(
        "/run/virtshim/shares.sock",
        "socket of the program that serves volumes to VMs",
        why="beside the others, in paths.run_dir",
    )
    virtiofsd: str = setting(
        "",
        "the virtiofsd that it starts; default: where distributions have it",
        allowed="path, or empty",
        reload=True,
        why="Debian's, Fedora's and the Rust one are found by themselves; VMs that run keep theirs",
    )


class Log(Section):
    """[log]: of all programs of `virtshim`; the table of tapmanager has a level of its own."""

    level: Level = setting(
        "info", "from which level on it logs", reload=True, why="one line a call; debug shows each step"
    )
    format: Literal["auto", "text", "json", "journal"] = setting(
        "auto",
        "auto: text on a terminal, fields of systemd's journal under systemd, else JSON lines",
        why="collectors read JSON and the journal, people text",
    )
