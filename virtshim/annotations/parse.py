"""Reads pod annotations into VmOptions and reports all errors at once. Virtlet's annotations keep Virtlet's meaning. Pure.

A value that cannot be applied is an error and is never ignored: a wrong text, an unknown name of virtshim's, or a
missing feature. Names outside `Virtlet...` and `virtshim.io/...` belong to others.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from virtshim.annotations import beside_containers
from virtshim.annotations.cloud_init import GUEST_DATA, IGNITION_READERS, ignition_of_two_places, without_source
from virtshim.annotations.cpu_setting import parse_cpu_setting
from virtshim.annotations.hardware import ANNOTATIONS, Annotation
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
    one_of,
    sets,
    shown,
)
from virtshim.annotations.profiles import PROFILE_ANNOTATION
from virtshim.devices.guest_view import mount_paths
from virtshim.model.errors import InvalidRequest
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


def _of_hardware(one: Annotation) -> Reader:
    return lambda options, text: dataclasses.replace(
        options, hardware=dataclasses.replace(options.hardware, **{one.field: one.read(text)})
    )


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


def _vcpus(text: str) -> int:
    if not _INTEGER.fullmatch(text):
        raise InvalidRequest(
            f"{shown(text)} is not a whole number; write 1 to {_MAX_VCPUS}, or remove the annotation to follow the CPU limit"
        )
    digits = text.lstrip("+-").lstrip("0")
    if text.startswith("-") or not digits:
        return 1
    if len(digits) > 3 or int(digits) > _MAX_VCPUS:
        raise InvalidRequest(f"{shown(text)} is too many; write 1 to {_MAX_VCPUS}")
    return int(digits)


def _number(least: int, most: int, fault: str) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not (text.isascii() and text.isdecimal() and len(text) <= 3 and least <= int(text) <= most):
            raise InvalidRequest(f"{shown(text)} is {fault}")
        return int(text)

    return read


def _bandwidth(direction: str) -> Reader:
    def read(options: VmOptions, text: str) -> VmOptions:
        bits = parse_bytes(text, _MAX_BANDWIDTH)
        if bits < _MIN_BANDWIDTH:
            raise InvalidRequest(f"{shown(text)} is less than 1k bits a second; write one like 10M")
        return dataclasses.replace(options, bandwidth=dataclasses.replace(options.bandwidth, **{direction: bits}))

    return read


_check_forward = one_of({"address": None, "agent": None}, "neither address nor agent; write one of them")


def _forward(options: VmOptions, text: str) -> VmOptions:
    """Only checked here: it is read when a port is forwarded, and the VM does not depend on it."""
    _check_forward(text)
    return options


def _max_vcpus(text: str) -> int:
    if not re.fullmatch("[1-9][0-9]{0,2}", text) or int(text) > _MAX_VCPUS:
        raise InvalidRequest(f"{shown(text)} is not a number of vCPUs; write 1 to {_MAX_VCPUS}")
    return int(text)


def _cpu_setting(options: VmOptions, text: str) -> VmOptions:
    """Read after VirtletCPUModel, which it overrides."""
    if not text:
        return options
    model, details = parse_cpu_setting(text)
    return dataclasses.replace(options, cpu_model=model, cpu_details=details)


def _vm(text: str) -> str:
    if text and not _VM_NAME.fullmatch(text):
        raise InvalidRequest(
            f"{shown(text)} is not a VM's name; write up to 63 of a-z, 0-9 and -, or {BY_POD_NAME} in a StatefulSet"
        )
    return text


def _restore_from(text: str) -> str:
    if text and not is_object_name(text):
        raise InvalidRequest(f"{shown(text)} is not the name of a node; write the one that `kubectl get nodes` shows")
    return text


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


def _system_uuid(text: str) -> uuid.UUID:
    if not _UUID.fullmatch(text) or not uuid.UUID(text).int:
        raise InvalidRequest(
            f"{shown(text)} is not a UUID; write 8-4-4-4-12 hex digits, such as 12345678-9abc-4def-8123-456789abcdef"
        )
    return uuid.UUID(text)


def _chown(options: VmOptions, text: str) -> VmOptions:
    if flag(text):
        raise InvalidRequest("not supported yet: changing the owner of shared directories; remove it or write false")
    return options


def _ignored(options: VmOptions, _text: str) -> VmOptions:
    return options


_READERS: Final[Mapping[str, Reader]] = {
    # Names the runtime that the pod is for. A CRI proxy reads it.
    "kubernetes.io/target-runtime": _ignored,
    # Read when the pod is made (`annotations.profiles`).
    PROFILE_ANNOTATION: _ignored,
    "virtshim.io/command": sets(
        "run_command", one_of({"run": True, "ignore": False}, "neither run nor ignore; write one of them")
    ),
    "virtshim.io/exec-ports": sets(
        "exec_ports", _number(0, MAX_EXEC_PORTS, f"not a number of ports; write 0 to {MAX_EXEC_PORTS}")
    ),
    "virtshim.io/image-config": sets(
        "use_image_config", one_of({"use": True, "ignore": False}, "neither use nor ignore; write one of them")
    ),
    "virtshim.io/max-vcpus": sets("max_vcpus", _max_vcpus),
    VNC_ANNOTATION: sets("vnc", flag),
    FORWARD_ANNOTATION: _forward,
    "kubernetes.io/ingress-bandwidth": _bandwidth("ingress"),
    "kubernetes.io/egress-bandwidth": _bandwidth("egress"),
    beside_containers.NETWORK_FILTER_ANNOTATION: sets(
        "network_filter",
        one_of(
            {word: word for word in ("off", "mac", "mac+ip")},
            "none of off, mac and mac+ip; write one of these, or remove the annotation",
        ),
    ),
    beside_containers.NIC_QUEUES_ANNOTATION: sets(
        "nic_queues",
        _number(
            1,
            MAX_NIC_QUEUES,
            f"not a number of queues; write 1 to {MAX_NIC_QUEUES}, or remove the annotation to get one per vCPU",
        ),
    ),
    **beside_containers.READERS,
    "virtshim.io/max-memory": sets("max_memory_bytes", lambda text: parse_bytes(text, _MAX_MEMORY_BYTES)),
    "VirtletVCPUCount": sets("vcpus", _vcpus),
    "VirtletDiskDriver": sets(
        "disk_bus",
        one_of({"": None, **{bus.value: bus for bus in DiskBus}}, "not a disk driver; write virtio, scsi or sata"),
    ),
    "VirtletCPUModel": sets(
        "cpu_model",
        one_of(
            {"": CpuModel.DEFAULT, "host-model": CpuModel.HOST_MODEL},
            "not a CPU model; write host-model, or remove the annotation to let the node choose",
        ),
    ),
    "VirtletLibvirtCPUSetting": _cpu_setting,
    "VirtletRootVolumeSize": sets("root_volume_bytes", lambda text: parse_bytes(text, _MAX_ROOT_BYTES)),
    _ROOT_DISK: sets(
        "keep_root_disk",
        one_of(
            {"": False, "container": False, "pod": True, "vm": False},
            "not a root disk lifetime; write pod to keep the disk for the pod's life, or remove the annotation to get a new disk "
            "at each start",
        ),
    ),
    VM_ANNOTATION: sets("vm", _vm),
    ON_STOP_ANNOTATION: sets(
        "save_on_stop",
        one_of({"": False, "shutdown": False, "save": True}, "neither shutdown nor save; write one of them"),
    ),
    STATE_VOLUME_ANNOTATION: sets("state_volume", mount_path),
    RESTORE_FROM_ANNOTATION: sets("restore_from", _restore_from),
    WARM_START_ANNOTATION: sets("warm_start", flag),
    ON_CHANGE: sets(
        "replace_root_disk",
        one_of(
            {"": False, "refuse": False, "replace": True},
            "neither refuse nor replace; write replace to overwrite the root disk on a volume at devicePath /, which loses "
            "all its data",
        ),
    ),
    SHARED_ANNOTATION: sets(
        "share_kubelet_volumes",
        one_of(
            {"": False, "copied": False, "shared": True},
            "neither copied nor shared; write shared if the guest's agent may not run commands, or nothing",
        ),
    ),
    empty_disks.ANNOTATION: sets("empty_disks", empty_disks.parse),
    DISK_IMAGES_ANNOTATION: sets("disk_images", disk_images_parse),
    memory_volumes.ANNOTATION: sets(
        "memory_volumes", lambda text: mount_paths(text, memory_volumes.MOST_MEMORY_VOLUMES)
    ),
    **{one.name: _of_hardware(one) for one in ANNOTATIONS},
    SYSPREP_ANNOTATION: sets("sysprep", mount_path),
    "VirtletSystemUUID": sets("system_uuid", _system_uuid),
    **GUEST_DATA,
    **IGNITION_READERS,
    "VirtletChown9pfsMounts": _chown,
}
# The annotations of VMs.
KNOWN: Final = _READERS.keys()
