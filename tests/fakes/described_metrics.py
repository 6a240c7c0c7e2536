"""The daemons' own metrics in lists, for tests that compare them with documents and with scrapes."""

from virtshim.metrics import daemons
from virtshim.metrics.daemons import (
    PROXY_ADDED,
    PROXY_RUNTIME_SECONDS,
    PROXY_SECONDS,
    PROXY_UP,
    SPANS,
    Described,
)

OF_PROXY = (PROXY_SECONDS, PROXY_ADDED, PROXY_RUNTIME_SECONDS, PROXY_UP)
OF_BOTH = (SPANS,)
# Those of `virtshim serve` alone.
RECORDED = tuple(
    one for one in vars(daemons).values() if isinstance(one, Described) and one not in (*OF_PROXY, *OF_BOTH)
)
# Made by prometheus-client's ProcessCollector.
OF_PROCESS = (
    Described("process_cpu_seconds_total", "counter", "CPU time of the daemon."),
    Described("process_max_fds", "gauge", "Limit of open descriptors."),
    Described("process_open_fds", "gauge", "Open descriptors of the daemon."),
    Described("process_resident_memory_bytes", "gauge", "Resident memory of the daemon."),
    Described("process_start_time_seconds", "gauge", "When the daemon was started, in seconds since the epoch."),
    Described("process_virtual_memory_bytes", "gauge", "Size of the daemon's address space."),
)
