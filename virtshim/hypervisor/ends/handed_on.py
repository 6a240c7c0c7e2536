"""What of a VM the next one may have: libvirt is not through with it yet when QEMU has ended. Pure.

It gives devices their owners and labels back, and ends a TPM's swtpm, when it has seen QEMU's end, which is up to 200 ms after
the kernel has. A VM that takes one of them in between finds it taken, or taken away from it.
"""

from __future__ import annotations

from pathlib import PurePath

from lxml import etree

from virtshim.domain.ids import ContainerId


def is_there(definition: str, container: ContainerId) -> bool:
    """Whether that VM has a block device, UEFI's variables, a TPM, or a disk that it writes and that outlives its container."""
    domain = etree.fromstring(definition.encode())
    if domain.find("os/nvram") is not None or domain.find("devices/tpm") is not None:
        return True
    return any(_outlives(one, container) for one in domain.iterfind("devices/disk"))


def _outlives(disk: etree._Element, container: ContainerId) -> bool:
    source = disk.find("source")
    if disk.get("type") == "block":
        return True
    if source is None or disk.find("readonly") is not None:
        return False
    return PurePath(source.get("file", "")).parent.name != container.value
