"""The texts of the files that set-up writes. With the defaults they say what the examples in deploy/ say: a test compares."""

from __future__ import annotations

from typing import Final

import yaml

MARK: Final = "# Written by `virtshim setup`; `virtshim setup --undo` takes it back unless it was changed.\n"

_KUBELET: Final = """\
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
containerRuntimeEndpoint: unix://{socket}
# {why}
cgroupDriver: {driver}
# A CNI plugin or a slow disk may take longer than the default of 2m.
runtimeRequestTimeout: 4m
# A reboot or shutdown of the node waits so long for pods to stop, VMs among them; logind has to wait as long.
shutdownGracePeriod: 2m
shutdownGracePeriodCriticalPods: 30s
"""
PULLS: Final = """\
# A VM image takes minutes. One pull at a time, kubelet's default, would hold up all other pods of the node meanwhile.
serializeImagePulls: false
maxParallelImagePulls: 3
"""
EVICTION: Final = """\
# kubelet evicts a little before its hard thresholds (100Mi; 10 % and 15 % of disk; 5 % of inodes), where a pod gets 1 s and a VM
# loses its power. So the guest of an evicted VM is shut down, if the shortage comes slowly. Disks: two points above, and below
# the 20 % that image garbage collection frees. Memory: an amount, because a node whose VMs fill what is allocatable has no
# percentage to spare; reserve it (systemReserved, kubeReserved).
evictionSoft:
  memory.available: 250Mi
  nodefs.available: 12%
  nodefs.inodesFree: 6%
  imagefs.available: 17%
  imagefs.inodesFree: 6%
# How long the shortage has to last.
evictionSoftGracePeriod:
  memory.available: 30s
  nodefs.available: 30s
  nodefs.inodesFree: 30s
  imagefs.available: 30s
  imagefs.inodesFree: 30s
# Seconds that an evicted pod has at most; its terminationGracePeriodSeconds counts if that is shorter. kubelet evicts no other
# pod while it waits.
evictionMaxPodGracePeriod: 60
"""
_TAINT: Final = """\
# Every pod here is a virtual machine: keep out what does not ask for one.
registerWithTaints:
- key: virtshim.io/vms
  value: "true"
  effect: NoSchedule
"""

LOGIND: Final = (
    MARK
    + """\
[Login]
# A shutdown or reboot waits so long for kubelet to stop its pods: no less than shutdownGracePeriod. The default, 5 s, is no time
# for a guest to shut down.
InhibitDelayMaxSec=150
"""
)

LIBVIRT_GUESTS: Final = (
    MARK
    + """\
# Shuts down at a reboot what kubelet has not stopped before.
URIS=qemu:///system
# kubelet makes pods anew; a VM that comes back by itself would have no network, and two owners.
ON_BOOT=ignore
# Not "suspend": memory that was saved is of no use to a pod that is made anew.
ON_SHUTDOWN=shutdown
# All at once; 0 would be one after another.
PARALLEL_SHUTDOWN=500
# Seconds for all of them.
SHUTDOWN_TIMEOUT=90
"""
)

RUNTIME_CLASS: Final = (
    MARK
    + """\
# kubectl apply -f this, once a cluster. Pods with the runtimeClassName of one of these become virtual machines on nodes
# labelled virtshim.io/vms=true. Which one: by the guest's memory.
apiVersion: node.k8s.io/v1
kind: RuntimeClass
metadata:
  name: virtshim
handler: virtshim
overhead:
  podFixed:
    # What QEMU needs beside the guest's memory, which is the container's own limit: 128Mi and 1/128 of that. Enough for 16Gi.
    memory: 256Mi
    cpu: 100m
scheduling:
  nodeSelector:
    virtshim.io/vms: "true"
  tolerations:
  - key: virtshim.io/vms
    operator: Exists
    effect: NoSchedule
---
apiVersion: node.k8s.io/v1
kind: RuntimeClass
metadata:
  name: virtshim-large
handler: virtshim
overhead:
  podFixed:
    # Enough for a guest of 112Gi.
    memory: 1Gi
    cpu: 100m
scheduling:
  nodeSelector:
    virtshim.io/vms: "true"
  tolerations:
  - key: virtshim.io/vms
    operator: Exists
    effect: NoSchedule
---
apiVersion: node.k8s.io/v1
kind: RuntimeClass
metadata:
  name: virtshim-huge
handler: virtshim
overhead:
  podFixed:
    # Enough for a guest of 496Gi.
    memory: 4Gi
    cpu: 100m
scheduling:
  nodeSelector:
    virtshim.io/vms: "true"
  tolerations:
  - key: virtshim.io/vms
    operator: Exists
    effect: NoSchedule
"""
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
    """`pulls`, `eviction`: whether it says how images are pulled, and when pods are evicted."""
    own = _KUBELET.format(socket=socket, driver=driver, why=why)
    return MARK + own + PULLS * pulls + EVICTION * eviction + _TAINT * taint


def fields_of(text: str) -> frozenset[str]:
    """Of a text that is part of a KubeletConfiguration."""
    return frozenset(yaml.safe_load(text))


def kubelet_order(unit: str) -> str:
    return f"{MARK}[Unit]\n# Wants, not Requires: kubelet must not stop when it is restarted.\nWants={unit}\nAfter={unit}\n"


def crictl(socket: str) -> str:
    return (
        f"{MARK}runtime-endpoint: unix://{socket}\nimage-endpoint: unix://{socket}\n"
        "timeout: 60  # otherwise crictl waits only 2 s; a VM may take longer to start\n"
    )
