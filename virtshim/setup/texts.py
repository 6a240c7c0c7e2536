"""The texts of the files that setup writes. With default settings they equal the examples in deploy/; a test compares them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import yaml

MARK: Final = "# Written by `virtshim setup`; `virtshim setup --undo` reverts it unless it was changed.\n"

_KUBELET: Final = """\
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
containerRuntimeEndpoint: unix://{socket}
# {why}
cgroupDriver: {driver}
# A CNI plugin or a slow disk may take longer than the default of 2m.
runtimeRequestTimeout: 4m
# A reboot or shutdown of the node waits this long for pods to stop, including VMs. logind must wait at least as long.
shutdownGracePeriod: 2m
shutdownGracePeriodCriticalPods: 30s
"""
PULLS: Final = """\
# Pulling a VM image takes minutes. kubelet's default, one pull at a time, would delay all other pods of the node meanwhile.
serializeImagePulls: false
maxParallelImagePulls: 3
"""
EVICTION: Final = """\
# Soft thresholds a little above kubelet's hard ones (100Mi; 10 % and 15 % of disk; 5 % of inodes). At a hard threshold a pod gets
# 1 s, so a VM loses power. At a soft one the guest of an evicted VM is shut down, if the shortage grows slowly. Disks: two
# points above the hard threshold, and below the 20 % that image garbage collection frees. Memory: an amount, because a node
# whose VMs fill its allocatable memory has no percentage to spare; reserve the amount (systemReserved, kubeReserved).
evictionSoft:
  memory.available: 250Mi
  nodefs.available: 12%
  nodefs.inodesFree: 6%
  imagefs.available: 17%
  imagefs.inodesFree: 6%
# How long the shortage must last.
evictionSoftGracePeriod:
  memory.available: 30s
  nodefs.available: 30s
  nodefs.inodesFree: 30s
  imagefs.available: 30s
  imagefs.inodesFree: 30s
# Most seconds that an evicted pod gets; a shorter terminationGracePeriodSeconds takes precedence. kubelet evicts no other pod
# while it waits.
evictionMaxPodGracePeriod: 60
"""
_TAINT: Final = """\
# Every pod here becomes a virtual machine, so keep out pods that do not ask for one.
registerWithTaints:
- key: virtshim.io/vms
  value: "true"
  effect: NoSchedule
"""

LOGIND: Final = (
    MARK
    + """\
[Login]
# A shutdown or reboot waits this long for kubelet to stop its pods. It must be at least shutdownGracePeriod. The default, 5 s,
# is too short for a guest to shut down.
InhibitDelayMaxSec=150
"""
)

# Settings of libvirt-guests, with their reasons.
GUESTS_AT_REBOOT: Final = {
    "URIS": ("qemu:///system", "At a reboot, shuts down the VMs that kubelet has not stopped."),
    "ON_BOOT": (
        "ignore",
        "kubelet creates pods again; a VM that libvirt restarts would have no network, and two owners.",
    ),
    "ON_SHUTDOWN": ("shutdown", 'Not "suspend": a pod that is created again cannot use saved memory.'),
    "PARALLEL_SHUTDOWN": ("500", "All at the same time; 0 would mean one after another."),
    "SHUTDOWN_TIMEOUT": ("90", "Seconds for all of them."),
}

_CLASS: Final = """\
apiVersion: node.k8s.io/v1
kind: RuntimeClass
metadata:
  name: {name}
handler: {handler}
overhead:
  podFixed:
    # {why}
    memory: {memory}
    cpu: 100m
scheduling:
  nodeSelector:
    virtshim.io/vms: "true"
  tolerations:
  - key: virtshim.io/vms
    operator: Exists
    effect: NoSchedule
"""
_OWN_MEMORY: Final = "QEMU's own memory: 128Mi and 1/128 of the guest's memory, which is the container's limit."
_BESIDE: Final = "For a pod with containers beside the VM. In addition to QEMU's memory it has 64Mi for passt."
# Name, handler and overhead of each class, and the reason for the overhead.
_CLASSES: Final = (
    ("virtshim", "virtshim", "256Mi", f"{_OWN_MEMORY} Enough for a guest of 16Gi."),
    ("virtshim-large", "virtshim", "1Gi", "Enough for a guest of 112Gi."),
    ("virtshim-huge", "virtshim", "4Gi", "Enough for a guest of 496Gi."),
    ("virtshim-pod", "virtshim-pod", "320Mi", f"{_BESIDE} Enough for a guest of 16Gi."),
)
RUNTIME_CLASS: Final = (
    MARK
    + """\
# Apply this file once per cluster, with kubectl apply -f. Pods with the runtimeClassName of one of these classes become virtual
# machines on nodes labelled virtshim.io/vms=true. Choose the class by the guest's memory.
"""
    + "---\n".join(
        _CLASS.format(name=name, handler=handler, memory=memory, why=why) for name, handler, memory, why in _CLASSES
    )
)

CNI: Final = """\
{
  "cniVersion": "1.0.0",
  "name": "virtshim",
  "plugins": [
    {
      "type": "bridge",
      "bridge": "virtshim0",
      "isGateway": true,
      "ipMasq": true,
      "capabilities": {"ips": true},
      "ipam": {
        "type": "host-local",
        "dataDir": "/var/lib/virtshim/networks",
        "ranges": [[{"subnet": "10.88.0.0/16"}]],
        "routes": [{"dst": "0.0.0.0/0"}]
      }
    },
    {
      "type": "portmap",
      "capabilities": {"portMappings": true}
    }
  ]
}
"""


def kubelet_drop_in(
    socket: str, driver: str, why: str, *, taint: bool, pulls: bool = True, eviction: bool = True
) -> str:
    """kubelet's drop-in. `pulls`, `eviction`: whether it contains the settings of image pulls and of eviction."""
    own = _KUBELET.format(socket=socket, driver=driver, why=why)
    return MARK + own + PULLS * pulls + EVICTION * eviction + _TAINT * taint


def libvirt_guests(before: str = "", said: Collection[str] = ()) -> str:
    """The file of libvirt-guests: its text before setup, and the settings that this text lacks. `said`: those that it has."""
    lines = [
        line
        for key, (value, why) in GUESTS_AT_REBOOT.items()
        if key not in said
        for line in (f"# {why}", f"{key}={value}")
    ]
    return "\n".join([*([before] if before else []), *([MARK.rstrip()] if lines else []), *lines, ""])


def fields_of(text: str) -> frozenset[str]:
    """The fields in a part of a KubeletConfiguration."""
    return frozenset(yaml.safe_load(text))


def kubelet_order(unit: str) -> str:
    return f"{MARK}[Unit]\n# Wants, not Requires: kubelet must not stop when the service restarts.\nWants={unit}\nAfter={unit}\n"


def crictl(socket: str) -> str:
    return (
        f"{MARK}runtime-endpoint: unix://{socket}\nimage-endpoint: unix://{socket}\n"
        "timeout: 60  # crictl's default is 2 s, but a VM may take longer to start\n"
    )
