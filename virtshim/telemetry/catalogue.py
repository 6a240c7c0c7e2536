"""The metrics of the daemons themselves: what they are called, what they mean, by what they are counted. Pure.

Those of VMs and pods are families of `virtshim.metrics`, which CRI carries as well. docs/metrics.md lists both; a test compares.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

# Upper bounds in seconds. Lists take milliseconds, a start seconds, a stop or a pull minutes.
_OF_CALLS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 240.0)
_OF_STEPS: Final = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_OF_PULLS: Final = (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0, 3600.0)
_OF_ROUNDS: Final = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0)
# What the proxy adds is fractions of a millisecond.
_ADDED: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 1.0)


@dataclass(frozen=True, slots=True)
class Described:
    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


# --- counted as it happens

RPC_SECONDS: Final = Described(
    "virtshim_rpc_duration_seconds",
    "histogram",
    "Calls on the CRI socket, by their end; a stream's last until its client leaves.",
    ("method", "code"),
    _OF_CALLS,
)
RPCS_RUNNING: Final = Described("virtshim_rpcs_running", "gauge", "Calls under way, streams included.")
START_STEP_SECONDS: Final = Described(
    "virtshim_start_phase_duration_seconds",
    "histogram",
    "Parts of pods' starts: network (CNI, tap), admission, devices, disk, seed, empty_disks, define (libvirt's definition), "
    "cgroup, volumes, libvirt (until QEMU runs), agent (from there on, until the guest's agent has first answered).",
    ("phase", "result"),
    _OF_STEPS,
)
PULL_SECONDS: Final = Described(
    "virtshim_image_pull_duration_seconds",
    "histogram",
    "Pulls by result: ok, or the kind of error.",
    ("result",),
    _OF_PULLS,
)
PULL_BYTES: Final = Described(
    "virtshim_image_pull_bytes_total", "counter", "Sizes of the images that were pulled, as they lie on disk."
)
PULLS_RUNNING: Final = Described("virtshim_image_pulls_running", "gauge", "Pulls under way.")
IMAGES_REMOVED: Final = Described(
    "virtshim_image_gc_removed_total",
    "counter",
    "Unused images that virtshim has removed because their file system was fuller than images.gc_high_percent.",
)
RECONCILE_SECONDS: Final = Described(
    "virtshim_reconcile_duration_seconds",
    "histogram",
    "Comparisons of records and world while serving, by result: ok, or the kind of error.",
    ("result",),
    _OF_ROUNDS,
)
LEAKS: Final = Described(
    "virtshim_leaks_found_total",
    "counter",
    "Things that nobody owned any more, found at start or while serving, by kind.",
    ("kind",),
)
EXITS: Final = Described(
    "virtshim_vmi_exits_total",
    "counter",
    "Ends of VMs by reason: Completed, Error, OOMKilled, StartError, Unknown.",
    ("reason",),
)

RECORDED: Final = (
    RPC_SECONDS,
    RPCS_RUNNING,
    START_STEP_SECONDS,
    PULL_SECONDS,
    PULL_BYTES,
    PULLS_RUNNING,
    IMAGES_REMOVED,
    RECONCILE_SECONDS,
    LEAKS,
    EXITS,
)

# --- read when Prometheus asks

BUILD: Final = Described(
    "virtshim_build_info", "gauge", "1, with virtshim's and Python's version.", ("version", "python")
)
UP: Final = Described(
    "virtshim_up",
    "gauge",
    "1 for each part that virtshim needs and that answers: libvirt, network (tapmanager and CNI), database.",
    ("part",),
)
VMIS: Final = Described("virtshim_vmis", "gauge", "VMs by phase: creating, created, running, exited ...", ("phase",))
PODS: Final = Described("virtshim_pods", "gauge", "Pod sandboxes by state: ready or notready.", ("state",))
UNFINISHED: Final = Described("virtshim_repairs_unfinished", "gauge", "Repairs that could not be made yet.")
STORE_BYTES: Final = Described(
    "virtshim_store_bytes", "gauge", "Bytes on disk of images, and of containers with their disks.", ("store",)
)
CNI_SECONDS: Final = Described(
    "virtshim_cni_duration_seconds",
    "histogram",
    "Runs of CNI plugins, by command (ADD, DEL), since tapmanager was started.",
    ("command", "plugin"),
)
CNI_ERRORS: Final = Described(
    "virtshim_cni_errors_total", "counter", "Those of them that failed or were killed.", ("command", "plugin")
)
SCRAPE_SECONDS: Final = Described(
    "virtshim_scrape_duration_seconds", "gauge", "How long the numbers of this answer took to be read."
)
SCRAPE_AGE: Final = Described(
    "virtshim_scrape_sample_age_seconds", "gauge", "How old the numbers of VMs in this answer are."
)
SCRAPE_LATE: Final = Described(
    "virtshim_scrape_late",
    "gauge",
    "1 if newer numbers of VMs did not come in time, and these are the last ones.",
)

THREADS: Final = Described(
    "virtshim_thread_up",
    "gauge",
    "1 for each of virtshim's own threads that should run and does, 0 for one that has died: restart virtshim, VMs run on.",
    ("thread",),
)

SAMPLED: Final = (BUILD, UP, VMIS, PODS, UNFINISHED, STORE_BYTES, CNI_SECONDS, CNI_ERRORS)
SCRAPED: Final = (SCRAPE_SECONDS, SCRAPE_AGE, SCRAPE_LATE, THREADS)

# --- of VMs, beside those of `virtshim.metrics`

START_TIME: Final = Described(
    "virtshim_vmi_start_time_seconds",
    "gauge",
    "When the VM was started, in seconds since the epoch.",
)
TROUBLE: Final = Described(
    "virtshim_vmi_trouble",
    "gauge",
    "1 for a VM that runs and makes no progress, or lacks something: crictl inspect has the message.",
)
TROUBLES: Final = Described(
    "virtshim_vm_troubles",
    "gauge",
    "Troubles of a VM that runs, by kind; no sample for a kind that it does not have.",
    ("kind",),
)
FILESYSTEM_SIZE: Final = Described(
    "virtshim_vmi_filesystem_capacity_bytes",
    "gauge",
    "Size of a file system in the guest, as its agent tells, each minute.",
    ("disk_name", "file_system_type", "mount_point"),
)
FILESYSTEM_USED: Final = Described(
    "virtshim_vmi_filesystem_used_bytes",
    "gauge",
    "Bytes in use of a file system in the guest, as its agent tells, each minute.",
    ("disk_name", "file_system_type", "mount_point"),
)
OF_VMS: Final = (START_TIME, TROUBLE, TROUBLES, FILESYSTEM_SIZE, FILESYSTEM_USED)

# --- of the proxy

PROXY_SECONDS: Final = Described(
    "virtshim_proxy_rpc_duration_seconds",
    "histogram",
    "Calls on the proxy's socket, by their end.",
    ("method", "code"),
    _OF_CALLS,
)
PROXY_ADDED: Final = Described(
    "virtshim_proxy_added_seconds",
    "histogram",
    "Time of such a call in which no runtime was waited for: what the proxy adds. Streams are not in it.",
    buckets=_ADDED,
)
PROXY_RUNTIME_SECONDS: Final = Described(
    "virtshim_proxy_runtime_rpc_duration_seconds",
    "histogram",
    "Calls to each runtime, by their end.",
    ("runtime", "method", "code"),
    _OF_CALLS,
)
PROXY_UP: Final = Described(
    "virtshim_proxy_runtime_up", "gauge", "1 for a runtime that has answered last time it was asked.", ("runtime",)
)
OF_PROXY: Final = (PROXY_SECONDS, PROXY_ADDED, PROXY_RUNTIME_SECONDS, PROXY_UP)

SPANS: Final = Described(
    "virtshim_trace_spans_total",
    "counter",
    "Spans of traces by result: sent, refused (by the collector, or not reached) or dropped (too many waited).",
    ("result",),
)
OF_BOTH: Final = (SPANS,)

# Of prometheus-client's own collector.
OF_PROCESS: Final = (
    Described("process_cpu_seconds_total", "counter", "CPU time of the daemon."),
    Described("process_max_fds", "gauge", "Most descriptors it may have open."),
    Described("process_open_fds", "gauge", "Descriptors it has open."),
    Described("process_resident_memory_bytes", "gauge", "Its memory in RAM."),
    Described("process_start_time_seconds", "gauge", "When it was started, in seconds since the epoch."),
    Described("process_virtual_memory_bytes", "gauge", "Its address space."),
)
