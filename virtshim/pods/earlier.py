"""What a pod's new sandbox takes over from the pod's earlier sandboxes, and from the VM that it runs."""

from __future__ import annotations

from collections.abc import Mapping

from virtshim.model.ids import ImageDigest
from virtshim.model.sandbox import PodKey
from virtshim.model.vm import DiskBus
from virtshim.moves.ports import SavedVms
from virtshim.store.ports import Records


def root_disks(records: Records, pod: PodKey) -> Mapping[str, ImageDigest]:
    """The root disks that the pod's earlier sandboxes made."""
    found: dict[str, ImageDigest] = {}
    for earlier in records.sandboxes.all():  # in order of creation, so the newest one overrides
        if earlier.key.is_same_pod(pod):
            found.update(earlier.root_disks)
    return found


def disk_bus(records: Records, pod: PodKey) -> DiskBus:
    """The disk bus of the pod's first sandbox, because the guest on a kept disk knows that bus."""
    earlier = [other.disk_bus for other in records.sandboxes.all() if other.key.is_same_pod(pod)]
    return earlier[0] if earlier else DiskBus.VIRTIO


def known_nics(vms: SavedVms, pod: PodKey, vm: str) -> tuple[Mapping[str, str], Mapping[str, tuple[str, ...]]]:
    """The MACs and addresses of a VM that has run before: its guest knows them. All its containers have the same NICs."""
    macs: dict[str, str] = {}
    addresses: dict[str, tuple[str, ...]] = {}
    for known in vms.all() if vm else ():
        if (known.namespace, known.name) == (pod.namespace, vm):
            macs |= known.macs
            addresses |= known.addresses
    return macs, addresses
