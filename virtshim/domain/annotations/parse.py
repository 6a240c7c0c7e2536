"""Pod annotations -> VmOptions, all errors at once. Virtlet's names keep Virtlet's meaning. No I/O.

A value that cannot be honoured is an error, never ignored: wrong text, a name of ours that does not exist, or a feature
that is not there yet. Names outside `Virtlet...` and `virtshim.io/...` belong to others.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import uuid
from collections.abc import Callable, Mapping
from typing import Final

from virtshim.domain.annotations.cpu_setting import parse_cpu_setting
from virtshim.domain.annotations.options import MAX_EXEC_PORTS, VmOptions
from virtshim.domain.annotations.quantity import parse_bytes
from virtshim.domain.errors import InvalidRequest
from virtshim.domain.guest.login import parse_keys
from virtshim.domain.vm import CpuModel, DiskBus
from virtshim.domain.volumes import disk_images, empty_disks
from virtshim.domain.volumes.copies import SHARED_ANNOTATION
from virtshim.domain.volumes.root_volume import ON_CHANGE
from virtshim.domain.yaml_text import MAX_TEXT_BYTES, parse_mapping

# Port 5900 of a pod with it is its VM's VNC server.
VNC_ANNOTATION: Final = "virtshim.io/vnc"
FORWARD_ANNOTATION: Final = "virtshim.io/forward"

_OWN_PREFIX: Final = "virtshim.io/"
_VIRTLET_PREFIX: Final = "virtlet"

_MAX_VCPUS: Final = 255
# More than any file system or qcow2 with usual cluster sizes can hold; a typing error is found here, not by qemu-img.
_MAX_ROOT_BYTES: Final = 2**50
_MAX_MEMORY_BYTES: Final = 2**46

# An error travels in the trailers of the reply, which gRPC limits to 8 KiB.
_MAX_PROBLEMS: Final = 12
_MAX_PROBLEM_CHARS: Final = 400

_INTEGER = re.compile(r"[+-]?[0-9]+")
_UUID = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_SOURCE = re.compile(r"(?:secret|configmap)/[a-z0-9](?:[a-z0-9.-]*[a-z0-9])?")
_SOURCE_WITH_KEY = re.compile(_SOURCE.pattern + r"(?:/[-._a-zA-Z0-9]+)?")
_DATA_KEY = re.compile(r"[-._a-zA-Z0-9]+")

# A reader takes the options so far and the annotation's text, and gives the options with it; InvalidRequest carries what
# is wrong and the remedy, the caller adds the annotation's name.
_Reader = Callable[[VmOptions, str], VmOptions]


def parse_vm_options(annotations: Mapping[str, str]) -> VmOptions:
    """What the pod's annotations ask for. One InvalidRequest lists every problem."""
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
    if problems:
        raise InvalidRequest(_report(problems))
    return options


def _report(problems: list[str]) -> str:
    if len(problems) == 1:
        return problems[0]
    listed = [f"({number}) {problem}" for number, problem in enumerate(problems[:_MAX_PROBLEMS], start=1)]
    if len(problems) > _MAX_PROBLEMS:
        listed.append(f"and {len(problems) - _MAX_PROBLEMS} more")
    return f"{len(problems)} annotations are wrong: " + ", ".join(listed)


def _is_ours(key: str) -> bool:
    return key.startswith(_OWN_PREFIX) or ("/" not in key and key.lower().startswith(_VIRTLET_PREFIX))


def _unknown(key: str) -> _Reader:
    def read(_options: VmOptions, _text: str) -> VmOptions:
        spelled = {known.lower(): known for known in _READERS}
        near = difflib.get_close_matches(key[:100].lower(), spelled, n=1, cutoff=0.7)
        remedy = f"did you mean {spelled[near[0]]}?" if near else "remove it, or correct its name"
        raise InvalidRequest(f"there is no such annotation; {remedy}")

    return read


def _name(key: str) -> str:
    return key if key.isprintable() and len(key) <= 80 else _shown(key)


def _shown(text: str) -> str:
    """Printable, and short enough to be one of several in a message."""
    return repr(text[:80])


def _bounded(text: str) -> str:
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise InvalidRequest("the text is not valid Unicode; correct it") from None
    if size > MAX_TEXT_BYTES:
        raise InvalidRequest(f"{size} bytes are too many; write at most {MAX_TEXT_BYTES}")
    return text


# --- values ----------------------------------------------------------------------------------------------------------


def _flag(text: str) -> bool:
    if text not in ("true", "false", ""):
        raise InvalidRequest(f"{_shown(text)} is neither true nor false; write true, or remove it")
    return text == "true"


def _vcpus(options: VmOptions, text: str) -> VmOptions:
    if not _INTEGER.fullmatch(text):
        raise InvalidRequest(
            f"{_shown(text)} is not a whole number; write 1 to {_MAX_VCPUS}, or remove it to follow the CPU limit"
        )
    digits = text.lstrip("+-").lstrip("0")
    if text.startswith("-") or not digits:
        return dataclasses.replace(options, vcpus=1)
    if len(digits) > 3 or int(digits) > _MAX_VCPUS:
        raise InvalidRequest(f"{_shown(text)} is too many; write 1 to {_MAX_VCPUS}")
    return dataclasses.replace(options, vcpus=int(digits))


def _exec_ports(options: VmOptions, text: str) -> VmOptions:
    if not (text.isascii() and text.isdecimal() and len(text) <= 3 and int(text) <= MAX_EXEC_PORTS):
        raise InvalidRequest(f"{_shown(text)} is not a number of ports; write 0 to {MAX_EXEC_PORTS}")
    return dataclasses.replace(options, exec_ports=int(text))


def _command(options: VmOptions, text: str) -> VmOptions:
    if text not in ("run", "ignore"):
        raise InvalidRequest(f"{_shown(text)} is neither run nor ignore; write one of them")
    return dataclasses.replace(options, run_command=text == "run")


def _image_config(options: VmOptions, text: str) -> VmOptions:
    if text not in ("use", "ignore"):
        raise InvalidRequest(f"{_shown(text)} is neither use nor ignore; write one of them")
    return dataclasses.replace(options, use_image_config=text == "use")


def _vnc(options: VmOptions, text: str) -> VmOptions:
    return dataclasses.replace(options, vnc=_flag(text))


def _forward(options: VmOptions, text: str) -> VmOptions:
    """Read again when a port is forwarded; nothing of the VM depends on it."""
    if text not in ("address", "agent"):
        raise InvalidRequest(f"{_shown(text)} is neither address nor agent; write one of them")
    return options


def _max_vcpus(options: VmOptions, text: str) -> VmOptions:
    if not re.fullmatch("[1-9][0-9]{0,2}", text) or int(text) > _MAX_VCPUS:
        raise InvalidRequest(f"{_shown(text)} is not a number of vCPUs; write 1 to {_MAX_VCPUS}")
    return dataclasses.replace(options, max_vcpus=int(text))


def _max_memory(options: VmOptions, text: str) -> VmOptions:
    return dataclasses.replace(options, max_memory_bytes=parse_bytes(text, _MAX_MEMORY_BYTES))


def _disk_bus(options: VmOptions, text: str) -> VmOptions:
    if text not in ("", "scsi", "virtio"):
        raise InvalidRequest(f"{_shown(text)} is not a disk driver; write scsi or virtio")
    return dataclasses.replace(options, disk_bus=DiskBus(text) if text else None)


def _cpu_model(options: VmOptions, text: str) -> VmOptions:
    if text not in ("", "host-model"):
        raise InvalidRequest(f"{_shown(text)} is not a CPU model; write host-model, or remove it for the node's choice")
    return dataclasses.replace(options, cpu_model=CpuModel(text))


def _cpu_setting(options: VmOptions, text: str) -> VmOptions:
    """It is read after VirtletCPUModel, and beats it."""
    if not text:
        return options
    model, details = parse_cpu_setting(text)
    return dataclasses.replace(options, cpu_model=model, cpu_details=details)


def _root_size(options: VmOptions, text: str) -> VmOptions:
    return dataclasses.replace(options, root_volume_bytes=parse_bytes(text, _MAX_ROOT_BYTES))


def _root_disk(options: VmOptions, text: str) -> VmOptions:
    if text not in ("", "container", "pod"):
        raise InvalidRequest(
            f"{_shown(text)} is not a root disk lifetime; write pod to keep it for the pod's life, or remove it for a "
            "new one at each start"
        )
    return dataclasses.replace(options, keep_root_disk=text == "pod")


def _on_image_change(options: VmOptions, text: str) -> VmOptions:
    if text not in ("", "refuse", "replace"):
        raise InvalidRequest(
            f"{_shown(text)} is neither refuse nor replace; write replace to have a volume at devicePath / written anew, and "
            "all lost that is on it"
        )
    return dataclasses.replace(options, replace_root_disk=text == "replace")


def _kubelet_volumes(options: VmOptions, text: str) -> VmOptions:
    if text not in ("", "copied", "shared"):
        raise InvalidRequest(
            f"{_shown(text)} is neither copied nor shared; write shared if the guest's agent may not run commands, or nothing"
        )
    return dataclasses.replace(options, share_kubelet_volumes=text == "shared")


def _empty_disks(options: VmOptions, text: str) -> VmOptions:
    return dataclasses.replace(options, empty_disks=empty_disks.parse(text))


def _disk_images(options: VmOptions, text: str) -> VmOptions:
    return dataclasses.replace(options, disk_images=disk_images.parse(text))


def _system_uuid(options: VmOptions, text: str) -> VmOptions:
    if not _UUID.fullmatch(text) or not uuid.UUID(text).int:
        raise InvalidRequest(
            f"{_shown(text)} is not a UUID; write 8-4-4-4-12 hex digits, such as 12345678-9abc-4def-8123-456789abcdef"
        )
    return dataclasses.replace(options, system_uuid=uuid.UUID(text))


def _seed_type(options: VmOptions, text: str) -> VmOptions:
    kind = text.lower()
    if kind == "configdrive":
        raise _not_yet("config drive seeds", "remove it or write nocloud")
    if kind not in ("", "nocloud"):
        raise InvalidRequest(f"{_shown(text)} is not a cloud-init image type; write nocloud")
    return options


def _meta_data(options: VmOptions, text: str) -> VmOptions:
    meta_data = parse_mapping(text)
    try:
        json.dumps(meta_data, allow_nan=False)
    except (TypeError, ValueError):
        raise InvalidRequest(
            "a value cannot be written as JSON (a date, binary data, .nan or .inf); put it in quotes"
        ) from None
    return dataclasses.replace(options, meta_data=meta_data)


def _user_data(options: VmOptions, text: str) -> VmOptions:
    return dataclasses.replace(options, user_data=parse_mapping(text))


def _overwrite(options: VmOptions, text: str) -> VmOptions:
    return dataclasses.replace(options, user_data_overwrite=_flag(text))


def _script(options: VmOptions, text: str) -> VmOptions:
    return dataclasses.replace(options, user_data_script=text)


def _force_dhcp(options: VmOptions, text: str) -> VmOptions:
    return dataclasses.replace(options, force_dhcp=_flag(text))


def _ssh_keys(options: VmOptions, text: str) -> VmOptions:
    return dataclasses.replace(options, ssh_keys=parse_keys(text))


# --- not supported yet: checked, then refused --------------------------------------------------------------------


def _not_yet(feature: str, remedy: str) -> InvalidRequest:
    return InvalidRequest(f"not supported yet: {feature}; {remedy}")


def _refused(syntax: Callable[[str], object], feature: str, remedy: str) -> _Reader:
    """`syntax` raises InvalidRequest for malformed text and is true if the text asks for the feature."""

    def read(options: VmOptions, text: str) -> VmOptions:
        if text and syntax(text):
            raise _not_yet(feature, remedy)
        return options

    return read


def _matching(pattern: re.Pattern[str], form: str) -> Callable[[str], bool]:
    def check(text: str) -> bool:
        if not pattern.fullmatch(text):
            raise InvalidRequest(f"{_shown(text)} is malformed; the form is {form}")
        return True

    return check


_INSTEAD: Final = "remove it, or write the text into"
_source = _matching(_SOURCE, "secret/NAME or configmap/NAME")
_source_with_key = _matching(_SOURCE_WITH_KEY, "secret/NAME[/KEY] or configmap/NAME[/KEY]")
_data_key = _matching(_DATA_KEY, "a key of the Secret or ConfigMap (letters, digits, '-', '_', '.')")
_encoding = _matching(re.compile("plain|base64"), "plain or base64")


def _ignored(options: VmOptions, _text: str) -> VmOptions:
    return options


_READERS: Final[Mapping[str, _Reader]] = {
    # Says which runtime the pod is for; a CRI proxy reads it.
    "kubernetes.io/target-runtime": _ignored,
    "virtshim.io/command": _command,
    "virtshim.io/exec-ports": _exec_ports,
    "virtshim.io/image-config": _image_config,
    "virtshim.io/max-vcpus": _max_vcpus,
    VNC_ANNOTATION: _vnc,
    FORWARD_ANNOTATION: _forward,
    "virtshim.io/max-memory": _max_memory,
    "VirtletVCPUCount": _vcpus,
    "VirtletDiskDriver": _disk_bus,
    "VirtletCPUModel": _cpu_model,
    "VirtletLibvirtCPUSetting": _cpu_setting,
    "VirtletRootVolumeSize": _root_size,
    "virtshim.io/root-disk": _root_disk,
    ON_CHANGE: _on_image_change,
    SHARED_ANNOTATION: _kubelet_volumes,
    empty_disks.ANNOTATION: _empty_disks,
    disk_images.ANNOTATION: _disk_images,
    "VirtletSystemUUID": _system_uuid,
    "VirtletCloudInitImageType": _seed_type,
    "VirtletCloudInitMetaData": _meta_data,
    "VirtletCloudInitUserData": _user_data,
    "VirtletCloudInitUserDataOverwrite": _overwrite,
    "VirtletCloudInitUserDataScript": _script,
    "VirtletSSHKeys": _ssh_keys,
    "VirtletForceDHCPNetworkConfig": _force_dhcp,
    "VirtletCloudInitUserDataSource": _refused(
        _source, "user-data from a Secret or ConfigMap", f"{_INSTEAD} VirtletCloudInitUserData"
    ),
    "VirtletCloudInitUserDataSourceKey": _refused(
        _data_key, "user-data from a Secret or ConfigMap", f"{_INSTEAD} VirtletCloudInitUserDataScript"
    ),
    "VirtletCloudInitUserDataSourceEncoding": _refused(
        _encoding, "user-data from a Secret or ConfigMap", f"{_INSTEAD} VirtletCloudInitUserDataScript"
    ),
    "VirtletSSHKeySource": _refused(
        _source_with_key, "SSH keys from a Secret or ConfigMap", f"{_INSTEAD} VirtletSSHKeys"
    ),
    "VirtletFilesFromDataSource": _refused(
        _source, "files from a Secret or ConfigMap", "remove it, or use write_files in VirtletCloudInitUserData"
    ),
    "VirtletChown9pfsMounts": _refused(_flag, "changing the owner of shared directories", "remove it or write false"),
}
