"""Annotations for cloud-init and Ignition. Pure."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Final

from virtshim.annotations.options import Reader, VmOptions, flag, shown
from virtshim.guest.login import parse_keys
from virtshim.model.errors import InvalidRequest
from virtshim.model.yaml_text import parse_mapping
from virtshim.seed.sources import checked, data_source_parse_encoding, data_source_parse_key, data_source_parse_source

# What cloud-init tells the guest.

_USER_DATA_SOURCE: Final = "VirtletCloudInitUserDataSource"
_SOURCE_KEY: Final = f"{_USER_DATA_SOURCE}Key"
_SOURCE_ENCODING: Final = f"{_USER_DATA_SOURCE}Encoding"


def without_source(annotations: Mapping[str, str]) -> Iterator[str]:
    """Faults of annotations that belong to a source, or to its key, if the pod names no source."""
    for key in (_SOURCE_KEY, _SOURCE_ENCODING):
        if annotations.get(key) and not annotations.get(_USER_DATA_SOURCE):
            yield f"annotation {key}: belongs to {_USER_DATA_SOURCE}, which is missing; write that, or remove this one"
    if annotations.get(_SOURCE_ENCODING) == "base64" and not annotations.get(_SOURCE_KEY):
        yield f"annotation {_SOURCE_ENCODING}: belongs to a {_SOURCE_KEY}, which is missing; name one, or remove this one"


def _seed_type(options: VmOptions, text: str) -> VmOptions:
    kind = text.lower()
    if kind not in ("", "nocloud", "configdrive"):
        raise InvalidRequest(f"{shown(text)} is not a cloud-init image type; write nocloud or configdrive")
    return dataclasses.replace(options, config_drive=kind == "configdrive")


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
    return dataclasses.replace(options, user_data_overwrite=flag(text))


def _script(options: VmOptions, text: str) -> VmOptions:
    return dataclasses.replace(options, user_data_script=text)


def _force_dhcp(options: VmOptions, text: str) -> VmOptions:
    return dataclasses.replace(options, force_dhcp=flag(text))


def _ssh_keys(options: VmOptions, text: str) -> VmOptions:
    return dataclasses.replace(options, ssh_keys=parse_keys(text))


def _user_data_source(options: VmOptions, text: str) -> VmOptions:
    """Read before the annotation of its key."""
    source = data_source_parse_source(text, with_key=False) if text else None
    return dataclasses.replace(options, user_data_source=source)


def _user_data_key(options: VmOptions, text: str) -> VmOptions:
    key, source = data_source_parse_key(text) if text else "", options.user_data_source
    return dataclasses.replace(options, user_data_source=source and dataclasses.replace(source, key=key))


def _user_data_encoding(options: VmOptions, text: str) -> VmOptions:
    return dataclasses.replace(options, user_data_encoding=data_source_parse_encoding(text))


def _files_source(options: VmOptions, text: str) -> VmOptions:
    source = data_source_parse_source(text, with_key=False) if text else None
    return dataclasses.replace(options, files_source=source)


def _ssh_key_source(options: VmOptions, text: str) -> VmOptions:
    source = data_source_parse_source(text, with_key=True) if text else None
    return dataclasses.replace(options, ssh_key_source=source)


GUEST_DATA: Final[Mapping[str, Reader]] = {
    "VirtletCloudInitImageType": _seed_type,
    "VirtletCloudInitMetaData": _meta_data,
    "VirtletCloudInitUserData": _user_data,
    "VirtletCloudInitUserDataOverwrite": _overwrite,
    "VirtletCloudInitUserDataScript": _script,
    "VirtletSSHKeys": _ssh_keys,
    "VirtletForceDHCPNetworkConfig": _force_dhcp,
    _USER_DATA_SOURCE: _user_data_source,
    _SOURCE_KEY: _user_data_key,
    _SOURCE_ENCODING: _user_data_encoding,
    "VirtletSSHKeySource": _ssh_key_source,
    "VirtletFilesFromDataSource": _files_source,
}


OWN: Final = "virtshim.io/ignition"
IGNITION_SOURCE: Final = "virtshim.io/ignition-source"


def _own(options: VmOptions, text: str) -> VmOptions:
    return dataclasses.replace(options, ignition=checked(text) if text else "")


def _source(options: VmOptions, text: str) -> VmOptions:
    source = data_source_parse_source(text, with_key=True) if text else None
    return dataclasses.replace(options, ignition_source=source)


def ignition_of_two_places(annotations: Mapping[str, str]) -> Iterator[str]:
    """The fault of a pod that has both Ignition annotations."""
    if annotations.get(OWN) and annotations.get(IGNITION_SOURCE):
        yield f"annotation {IGNITION_SOURCE}: {OWN} is set too, but a guest has one configuration; remove one"


IGNITION_READERS: Final[Mapping[str, Reader]] = {OWN: _own, IGNITION_SOURCE: _source}
