"""Reads pod annotations into VmOptions and reports all errors at once. Virtlet's annotations keep Virtlet's meaning. No
I/O.

A value that cannot be applied is an error and is never ignored: a wrong text, an unknown name of virtshim's, or a
missing feature. Names outside `Virtlet...` and `virtshim.io/...` belong to others.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Final

from virtshim.annotations import beside_containers
from virtshim.annotations.cloud_init import GUEST_DATA, IGNITION_READERS, ignition_of_two_places, without_source
from virtshim.annotations.cpu_setting import parse_cpu_setting
from virtshim.annotations.hardware import ANNOTATIONS
from virtshim.annotations.names import (
    ON_STOP_ANNOTATION,
    RESTORE_FROM_ANNOTATION,
    STATE_VOLUME_ANNOTATION,
    WARM_START_ANNOTATION,
)
from virtshim.annotations.options import (
    MAX_EXEC_PORTS,
    MAX_NIC_QUEUES,
    Reader,
    VmOptions,
    flag,
    shown,
)
from virtshim.annotations.profiles import PROFILE_ANNOTATION
from virtshim.devices.guest_view import mount_paths
from virtshim.model.errors import InvalidRequest
from virtshim.model.hardware import HardwareOptions
from virtshim.model.sandbox import BY_POD_NAME
from virtshim.model.text import is_object_name, parse_bytes
from virtshim.model.vm import CpuModel, DiskBus
from virtshim.model.yaml_text import MAX_TEXT_BYTES
from virtshim.volumes import empty_disks, memory_volumes
from virtshim.volumes.copies import SHARED_ANNOTATION
from virtshim.volumes.disk_images import DISK_IMAGES_ANNOTATION, disk_images_parse
from virtshim.volumes.pod_mounts import mount_path
from virtshim.volumes.root_volume import ON_CHANGE
from virtshim.volumes.sysprep import SYSPREP_ANNOTATION

# With this annotation, port 5900 of the pod is its VM's VNC server.
VNC_ANNOTATION: Final = "virtshim.io/vnc"
FORWARD_ANNOTATION: Final = "virtshim.io/forward"
# The VM that outlives the pod.
VM_ANNOTATION: Final = "virtshim.io/vm"
_ROOT_DISK: Final = "virtshim.io/root-disk"

_OWN_PREFIX: Final = "virtshim.io/"
_VIRTLET_PREFIX: Final = "virtlet"

_MAX_VCPUS: Final = 255
# More than any file system, or qcow2 with usual cluster sizes, can hold. It finds a typing error here, before qemu-img
# does.
_MAX_ROOT_BYTES: Final = 2**50
_MAX_MEMORY_BYTES: Final = 2**46
# Bits a second, within Kubernetes' limits.
_MIN_BANDWIDTH, _MAX_BANDWIDTH = 10**3, 10**15

# How many errors are listed: an error travels in the reply's trailers, which gRPC limits to 8 KiB.
_MAX_PROBLEMS: Final = 12
_MAX_PROBLEM_CHARS: Final = 400

_VM_NAME = re.compile(r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?")
_INTEGER = re.compile(r"[+-]?[0-9]+")
_UUID = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")


def parse_vm_options(annotations: Mapping[str, str]) -> VmOptions:
    """The options that the pod's annotations ask for. One InvalidRequest lists every problem."""
    options = VmOptions()
    problems: list[str] = []
    for key in sorted(annotations):
        reader = _READERS.get(key)
        if reader is None and not _is_ours(key):
            continue
        try:
            options = (reader or _unknown(key))(options, _bounded(annotations[key]))
        except InvalidRequest as error:
            problems.append(f"annotation {_name(key)}: {error}"[:_MAX_PROBLEM_CHARS])
    problems += [*without_source(annotations), *ignition_of_two_places(annotations), *_without_vm(options, annotations)]
    if options.vm:
        options = dataclasses.replace(options, keep_root_disk=True)
    if problems:
        raise InvalidRequest(_report(problems))
    return options


def known_names() -> Collection[str]:
    """The annotations of VMs."""
    return _READERS.keys()


def is_known(name: str) -> bool:
    """Whether it is an annotation of VMs."""
    return name in _READERS


def _of_hardware(read: Callable[[HardwareOptions, str], HardwareOptions]) -> Reader:
    return lambda options, text: dataclasses.replace(options, hardware=read(options.hardware, text))


def _report(problems: list[str]) -> str:
    if len(problems) == 1:
        return problems[0]
    listed = [f"({number}) {problem}" for number, problem in enumerate(problems[:_MAX_PROBLEMS], start=1)]
    if len(problems) > _MAX_PROBLEMS:
        listed.append(f"and {len(problems) - _MAX_PROBLEMS} more")
    return f"{len(problems)} annotations are wrong: " + ", ".join(listed)


def _is_ours(key: str) -> bool:
    return key.startswith(_OWN_PREFIX) or ("/" not in key and key.lower().startswith(_VIRTLET_PREFIX))


def _unknown(key: str) -> Reader:
    def read(_options: VmOptions, _text: str) -> VmOptions:
        spelled = {known.lower(): known for known in _READERS}
        near = difflib.get_close_matches(key[:100].lower(), spelled, n=1, cutoff=0.7)
        remedy = f"did you mean {spelled[near[0]]}?" if near else "remove it, or correct its name"
        raise InvalidRequest(f"there is no such annotation; {remedy}")

    return read


def _name(key: str) -> str:
    return key if key.isprintable() and len(key) <= 80 else shown(key)


def _bounded(text: str) -> str:
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise InvalidRequest("the text is not valid Unicode; correct it") from None
    if size > MAX_TEXT_BYTES:
        raise InvalidRequest(f"{size} bytes are too many; write at most {MAX_TEXT_BYTES}")
    return text


# --- values ----------------------------------------------------------------------------------------------------------


def _vcpus(options: VmOptions, text: str) -> VmOptions:
    if not _INTEGER.fullmatch(text):
        raise InvalidRequest(
            f"{shown(text)} is not a whole number; write 1 to {_MAX_VCPUS}, or remove it to follow the CPU limit"
        )
    digits = text.lstrip("+-").lstrip("0")
    if text.startswith("-") or not digits:
        return dataclasses.replace(options, vcpus=1)
    if len(digits) > 3 or int(digits) > _MAX_VCPUS:
        raise InvalidRequest(f"{shown(text)} is too many; write 1 to {_MAX_VCPUS}")
    return dataclasses.replace(options, vcpus=int(digits))


def _exec_ports(options: VmOptions, text: str) -> VmOptions:
    if not (text.isascii() and text.isdecimal() and len(text) <= 3 and int(text) <= MAX_EXEC_PORTS):
        raise InvalidRequest(f"{shown(text)} is not a number of ports; write 0 to {MAX_EXEC_PORTS}")
    return dataclasses.replace(options, exec_ports=int(text))


def _command(options: VmOptions, text: str) -> VmOptions:
    if text not in ("run", "ignore"):
        raise InvalidRequest(f"{shown(text)} is neither run nor ignore; write one of them")
    return dataclasses.replace(options, run_command=text == "run")


def _image_config(options: VmOptions, text: str) -> VmOptions:
    if text not in ("use", "ignore"):
        raise InvalidRequest(f"{shown(text)} is neither use nor ignore; write one of them")
    return dataclasses.replace(options, use_image_config=text == "use")


def _vnc(options: VmOptions, text: str) -> VmOptions:
    return dataclasses.replace(options, vnc=flag(text))


def _nic_queues(options: VmOptions, text: str) -> VmOptions:
    if not (text.isascii() and text.isdecimal() and len(text) <= 3 and 1 <= int(text) <= MAX_NIC_QUEUES):
        raise InvalidRequest(
            f"{shown(text)} is not a number of queues; write 1 to {MAX_NIC_QUEUES}, or remove it to get one per vCPU"
        )
    return dataclasses.replace(options, nic_queues=int(text))


def _network_filter(options: VmOptions, text: str) -> VmOptions:
    if text not in ("off", "mac", "mac+ip"):
        raise InvalidRequest(f"{shown(text)} is none of off, mac and mac+ip; write one of these, or remove it")
    return dataclasses.replace(options, network_filter=text)


def _bandwidth(direction: str) -> Reader:
    def read(options: VmOptions, text: str) -> VmOptions:
        bits = parse_bytes(text, _MAX_BANDWIDTH)
        if bits < _MIN_BANDWIDTH:
            raise InvalidRequest(f"{shown(text)} is less than 1k bits a second; write one like 10M")
        return dataclasses.replace(options, bandwidth=dataclasses.replace(options.bandwidth, **{direction: bits}))

    return read


def _forward(options: VmOptions, text: str) -> VmOptions:
    """Only checked here: it is read when a port is forwarded, and the VM does not depend on it."""
    if text not in ("address", "agent"):
        raise InvalidRequest(f"{shown(text)} is neither address nor agent; write one of them")
    return options


def _max_vcpus(options: VmOptions, text: str) -> VmOptions:
    if not re.fullmatch("[1-9][0-9]{0,2}", text) or int(text) > _MAX_VCPUS:
        raise InvalidRequest(f"{shown(text)} is not a number of vCPUs; write 1 to {_MAX_VCPUS}")
    return dataclasses.replace(options, max_vcpus=int(text))


def _max_memory(options: VmOptions, text: str) -> VmOptions:
    return dataclasses.replace(options, max_memory_bytes=parse_bytes(text, _MAX_MEMORY_BYTES))


def _disk_bus(options: VmOptions, text: str) -> VmOptions:
    if text not in ("", "scsi", "virtio", "sata"):
        raise InvalidRequest(f"{shown(text)} is not a disk driver; write virtio, scsi or sata")
    return dataclasses.replace(options, disk_bus=DiskBus(text) if text else None)


def _cpu_model(options: VmOptions, text: str) -> VmOptions:
    if text not in ("", "host-model"):
        raise InvalidRequest(f"{shown(text)} is not a CPU model; write host-model, or remove it for the node's choice")
    return dataclasses.replace(options, cpu_model=CpuModel(text))


def _cpu_setting(options: VmOptions, text: str) -> VmOptions:
    """Read after VirtletCPUModel, which it overrides."""
    if not text:
        return options
    model, details = parse_cpu_setting(text)
    return dataclasses.replace(options, cpu_model=model, cpu_details=details)


def _root_size(options: VmOptions, text: str) -> VmOptions:
    return dataclasses.replace(options, root_volume_bytes=parse_bytes(text, _MAX_ROOT_BYTES))


def _root_disk(options: VmOptions, text: str) -> VmOptions:
    if text not in ("", "container", "pod", "vm"):
        raise InvalidRequest(
            f"{shown(text)} is not a root disk lifetime; write pod to keep it for the pod's life, or remove it for a "
            "new one at each start"
        )
    return dataclasses.replace(options, keep_root_disk=text == "pod")


def _vm(options: VmOptions, text: str) -> VmOptions:
    if text and not _VM_NAME.fullmatch(text):
        raise InvalidRequest(
            f"{shown(text)} is not a VM's name; write up to 63 of a-z, 0-9 and -, or {BY_POD_NAME} in a StatefulSet"
        )
    return dataclasses.replace(options, vm=text)


def _on_stop(options: VmOptions, text: str) -> VmOptions:
    if text not in ("", "shutdown", "save"):
        raise InvalidRequest(f"{shown(text)} is neither shutdown nor save; write one of them")
    return dataclasses.replace(options, save_on_stop=text == "save")


def _state_volume(options: VmOptions, text: str) -> VmOptions:
    return dataclasses.replace(options, state_volume=mount_path(text))


def _restore_from(options: VmOptions, text: str) -> VmOptions:
    if text and not is_object_name(text):
        raise InvalidRequest(f"{shown(text)} is not the name of a node; write the one that `kubectl get nodes` shows")
    return dataclasses.replace(options, restore_from=text)


def _without_vm(options: VmOptions, annotations: Mapping[str, str]) -> Iterator[str]:
    """Faults of annotations that only a VM with a name of its own can have, and of those that it cannot have."""
    disk = annotations.get(_ROOT_DISK, "")
    if options.vm and disk in ("container", "pod"):
        yield (
            f"annotation {_ROOT_DISK}: {disk} contradicts {VM_ANNOTATION}, whose root disk stays with the VM; remove one of "
            "them"
        )
    if not options.vm and disk == "vm":
        yield f"annotation {_ROOT_DISK}: vm needs {VM_ANNOTATION}, which names the VM; write that, or pod"
    if not options.vm and options.save_on_stop:
        yield f"annotation {ON_STOP_ANNOTATION}: save needs {VM_ANNOTATION}, which names the VM; write that, or remove this"
    if options.state_volume and not options.save_on_stop:
        yield f"annotation {STATE_VOLUME_ANNOTATION}: it needs {ON_STOP_ANNOTATION}: save; write that, or remove this"
    if options.state_volume and options.hardware.tpm:
        yield (
            f"annotation {STATE_VOLUME_ANNOTATION}: the state of a TPM cannot be copied to a volume; remove the TPM "
            "(virtshim.io/tpm), or this"
        )
    if options.restore_from and not options.vm:
        yield f"annotation {RESTORE_FROM_ANNOTATION}: it needs {VM_ANNOTATION}, which names the VM; write that, or remove this"
    if options.restore_from and options.state_volume:
        yield (
            f"annotation {RESTORE_FROM_ANNOTATION}: {STATE_VOLUME_ANNOTATION} brings the VM to other nodes already; remove "
            "one of them"
        )


def _warm_start(options: VmOptions, text: str) -> VmOptions:
    return dataclasses.replace(options, warm_start=flag(text))


def _on_image_change(options: VmOptions, text: str) -> VmOptions:
    if text not in ("", "refuse", "replace"):
        raise InvalidRequest(
            f"{shown(text)} is neither refuse nor replace; write replace to overwrite the root disk on a volume at devicePath /, "
            "which loses all its data"
        )
    return dataclasses.replace(options, replace_root_disk=text == "replace")


def _kubelet_volumes(options: VmOptions, text: str) -> VmOptions:
    if text not in ("", "copied", "shared"):
        raise InvalidRequest(
            f"{shown(text)} is neither copied nor shared; write shared if the guest's agent may not run commands, or nothing"
        )
    return dataclasses.replace(options, share_kubelet_volumes=text == "shared")


def _empty_disks(options: VmOptions, text: str) -> VmOptions:
    return dataclasses.replace(options, empty_disks=empty_disks.parse(text))


def _disk_images(options: VmOptions, text: str) -> VmOptions:
    return dataclasses.replace(options, disk_images=disk_images_parse(text))


def _memory_volumes(options: VmOptions, text: str) -> VmOptions:
    return dataclasses.replace(options, memory_volumes=mount_paths(text, memory_volumes.MOST_MEMORY_VOLUMES))


def _sysprep(options: VmOptions, text: str) -> VmOptions:
    return dataclasses.replace(options, sysprep=mount_path(text))


def _system_uuid(options: VmOptions, text: str) -> VmOptions:
    if not _UUID.fullmatch(text) or not uuid.UUID(text).int:
        raise InvalidRequest(
            f"{shown(text)} is not a UUID; write 8-4-4-4-12 hex digits, such as 12345678-9abc-4def-8123-456789abcdef"
        )
    return dataclasses.replace(options, system_uuid=uuid.UUID(text))


# --- not supported yet: checked, then refused --------------------------------------------------------------------


def _not_yet(feature: str, remedy: str) -> InvalidRequest:
    return InvalidRequest(f"not supported yet: {feature}; {remedy}")


def _refused(syntax: Callable[[str], object], feature: str, remedy: str) -> Reader:
    """`syntax` raises InvalidRequest for a malformed text, and returns whether the text asks for the feature."""

    def read(options: VmOptions, text: str) -> VmOptions:
        if text and syntax(text):
            raise _not_yet(feature, remedy)
        return options

    return read


def _ignored(options: VmOptions, _text: str) -> VmOptions:
    return options


_READERS: Final[Mapping[str, Reader]] = {
    # Names the runtime that the pod is for. A CRI proxy reads it.
    "kubernetes.io/target-runtime": _ignored,
    # Read when the pod is made (`annotations.profiles`).
    PROFILE_ANNOTATION: _ignored,
    "virtshim.io/command": _command,
    "virtshim.io/exec-ports": _exec_ports,
    "virtshim.io/image-config": _image_config,
    "virtshim.io/max-vcpus": _max_vcpus,
    VNC_ANNOTATION: _vnc,
    FORWARD_ANNOTATION: _forward,
    "kubernetes.io/ingress-bandwidth": _bandwidth("ingress"),
    "kubernetes.io/egress-bandwidth": _bandwidth("egress"),
    beside_containers.NETWORK_FILTER_ANNOTATION: _network_filter,
    beside_containers.NIC_QUEUES_ANNOTATION: _nic_queues,
    **beside_containers.READERS,
    "virtshim.io/max-memory": _max_memory,
    "VirtletVCPUCount": _vcpus,
    "VirtletDiskDriver": _disk_bus,
    "VirtletCPUModel": _cpu_model,
    "VirtletLibvirtCPUSetting": _cpu_setting,
    "VirtletRootVolumeSize": _root_size,
    _ROOT_DISK: _root_disk,
    VM_ANNOTATION: _vm,
    ON_STOP_ANNOTATION: _on_stop,
    STATE_VOLUME_ANNOTATION: _state_volume,
    RESTORE_FROM_ANNOTATION: _restore_from,
    WARM_START_ANNOTATION: _warm_start,
    ON_CHANGE: _on_image_change,
    SHARED_ANNOTATION: _kubelet_volumes,
    empty_disks.ANNOTATION: _empty_disks,
    DISK_IMAGES_ANNOTATION: _disk_images,
    memory_volumes.ANNOTATION: _memory_volumes,
    **{one.name: _of_hardware(one.read) for one in ANNOTATIONS},
    SYSPREP_ANNOTATION: _sysprep,
    "VirtletSystemUUID": _system_uuid,
    **GUEST_DATA,
    **IGNITION_READERS,
    "VirtletChown9pfsMounts": _refused(flag, "changing the owner of shared directories", "remove it or write false"),
}
