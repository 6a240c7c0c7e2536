"""What may stay of a record, and what may not: `virtshim diag` removes what is not listed here."""

from __future__ import annotations

from typing import Final

# Fields of the records' dataclasses, and columns, that stay. A new one does not, until it is written here.
KEPT: Final = frozenset(
    (
        "added", "address", "addresses", "attempt", "beside_pod", "blocks", "bus", "cdi", "cgroup_parent", "changed",
        "changed_overhead", "changed_resources", "checkpointing", "claim", "claims", "code", "command_begun", "config",
        "container_id", "container_path", "container_port", "copied", "copies", "cpu_period", "cpu_quota", "cpu_shares",
        "cpuset_cpus", "cpuset_mems", "created_at", "destination", "device", "devices", "digest", "disk_bus", "dns",
        "boot", "domain", "domain_uuid", "driver", "dropped", "empty_disks", "ending", "error", "exit", "family",
        "fatal", "finished_at",
        "follows", "format", "frozen", "function", "gateway", "gid", "granted", "group", "groups", "guest", "host",
        "host_ip", "host_path", "host_port", "hostname", "hugepage_limits", "id", "identity", "image", "image_config",
        "image_id", "image_ref", "image_sub_path", "interfaces", "ip", "ipc", "ips", "is_file", "is_volume", "key", "kind",
        "labels",
        "log_directory", "log_file", "log_path", "mac", "max_memory_bytes", "max_vcpus", "memory_bytes", "memory_volumes",
        "metric", "mode",
        "memory_limit_bytes", "memory_swap_limit_bytes", "mounts", "mounts_confirmed",
        "mtu", "name", "namespace", "namespaces", "netns", "not_given",
        "network", "network_released", "no_new_privs", "oom_score_adj", "options", "overhead", "own_groups",
        "page_bytes", "passthrough", "path", "paused",
        "permissions", "phase", "pid", "pinned", "place", "pod_disk", "port_mappings", "priority",
        "protocol", "pulled_at", "readonly", "readonly_root", "reason", "recursive_read_only", "renewed",
        "repo_digests", "reset_failed_at", "resizing", "resource", "resources", "root_disks", "routes", "rules",
        "runtime_handler",
        "sandbox_id", "searches", "servers", "size", "size_bytes", "slot", "source", "started_at", "stdin",
        "stdin_once", "stop_asked", "stop_signal", "supplementary", "sysctls", "table", "table_routes", "tags",
        "taken", "target", "text", "tmpfs", "tree", "trouble", "troubles", "tty", "uid",
        "unified", "unmounted", "user", "user_image", "uuid", "value", "vcpus", "version_num", "virtual_size",
        "volumes", "working_dir", "written",
    )
)  # fmt: skip
# Those that do not: what people write into them is theirs.
WITHHELD: Final = frozenset(
    (
        "annotations", "args", "cmd", "command", "entrypoint", "env", "envs", "fetch_key", "message", "profile",
    )
)  # fmt: skip
# Whose keys are somebody else's names, and whose values are shown.
MAPS: Final = frozenset(
    (
        "hugepage_limits", "labels", "root_disks", "sysctls", "unified",
    )
)  # fmt: skip
# Annotations with a number, a word, a size or a path.
PLAIN_ANNOTATIONS: Final = frozenset(
    (
        "VirtletCPUModel", "VirtletChown9pfsMounts", "VirtletCloudInitImageType", "VirtletCloudInitUserDataOverwrite",
        "VirtletDiskDriver", "VirtletForceDHCPNetworkConfig", "VirtletRootVolumeSize", "VirtletSystemUUID",
        "VirtletVCPUCount", "io.kubernetes.container.hash", "io.kubernetes.container.restartCount",
        "io.kubernetes.container.terminationMessagePath", "io.kubernetes.container.terminationMessagePolicy",
        "io.kubernetes.pod.terminationGracePeriod", "kubernetes.io/config.seen", "kubernetes.io/config.source",
        "kubernetes.io/target-runtime", "virtshim.io/command", "virtshim.io/disk-images", "virtshim.io/disks",
        "virtshim.io/exec-ports", "virtshim.io/forward", "virtshim.io/image-config", "virtshim.io/kubelet-volumes",
        "virtshim.io/max-memory", "virtshim.io/max-vcpus", "virtshim.io/network-filter", "virtshim.io/nic-queues",
        "virtshim.io/profile", "virtshim.io/root-disk", "virtshim.io/sysprep",
        "virtshim.io/clock", "virtshim.io/cpu-topology", "virtshim.io/disk-cache", "virtshim.io/disk-io",
        "virtshim.io/firmware", "virtshim.io/hyperv", "virtshim.io/initrd", "virtshim.io/kernel",
        "virtshim.io/nic-model", "virtshim.io/tablet", "virtshim.io/tpm",
        "virtshim.io/video", "virtshim.io/watchdog",
        "virtshim.io/root-disk-on-image-change", "virtshim.io/vnc",
    )
)  # fmt: skip
