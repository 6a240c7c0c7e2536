"""Replaces names of Secrets and ConfigMaps in a pod's annotations by their data. Pure."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

from virtshim.annotations.cloud_init import IGNITION_SOURCE
from virtshim.annotations.options import VmOptions
from virtshim.guest.login import parse_keys
from virtshim.model.errors import InvalidRequest, ShimError
from virtshim.seed.sources import (
    AUTHORIZED_KEYS,
    DEFAULT_KEY,
    Data,
    DataSource,
    checked,
    files_of,
    mapping_of,
    merged,
    text_of,
)

_USER_DATA = "VirtletCloudInitUserDataSource"
_SSH_KEYS = "VirtletSSHKeySource"
_FILES = "VirtletFilesFromDataSource"


def with_data(options: VmOptions, namespace: str, read: Callable[[DataSource], Data]) -> VmOptions:
    """`read`: reads an object of the pod's namespace; only objects that annotations name are read. Raises ShimError
    with the annotation and the object."""
    if (source := options.user_data_source) is not None:
        with _named(source, _USER_DATA, namespace):
            options = _user_data(options, source, read)
    if (source := options.ssh_key_source) is not None:
        with _named(source, _SSH_KEYS, namespace):
            options = _ssh_keys(options, source, read)
    if (source := options.files_source) is not None:
        with _named(source, _FILES, namespace):
            options = dataclasses.replace(options, files=files_of(read(source)))
    if (source := options.ignition_source) is not None:
        with _named(source, IGNITION_SOURCE, namespace):
            options = _ignition(options, source, read)
    return options


def sources(options: VmOptions) -> list[DataSource]:
    """All sources that the annotations name."""
    named = (options.user_data_source, options.ssh_key_source, options.files_source, options.ignition_source)
    return [source for source in named if source is not None]


def _user_data(options: VmOptions, source: DataSource, read: Callable[[DataSource], Data]) -> VmOptions:
    """With a key, the text is the whole user-data, unless the pod has a script of its own."""
    if source.key:
        text = text_of(read(source), source.key, options.user_data_encoding)
        return dataclasses.replace(options, user_data_script=text)
    if options.user_data_overwrite and options.user_data:
        return options
    return dataclasses.replace(options, user_data=merged(mapping_of(read(source)), options.user_data))


def _ssh_keys(options: VmOptions, source: DataSource, read: Callable[[DataSource], Data]) -> VmOptions:
    """The source's keys come before the pod's own."""
    if options.user_data_overwrite and options.ssh_keys:
        return options
    key = source.key or AUTHORIZED_KEYS
    text = text_of(read(source), key)
    try:
        found = parse_keys(text)
    except InvalidRequest as exc:
        raise InvalidRequest(f"key {key!r}: {exc}") from None
    return dataclasses.replace(options, ssh_keys=(*found, *options.ssh_keys))


def _ignition(options: VmOptions, source: DataSource, read: Callable[[DataSource], Data]) -> VmOptions:
    key = source.key or DEFAULT_KEY
    text = text_of(read(source), key)
    try:
        return dataclasses.replace(options, ignition=checked(text))
    except InvalidRequest as exc:
        raise InvalidRequest(f"key {key!r}: {exc}") from None


@contextlib.contextmanager
def _named(source: DataSource, annotation: str, namespace: str) -> Iterator[None]:
    try:
        yield
    except ShimError as exc:
        raise type(exc)(f"{source.field_name(annotation, namespace)}: {exc}") from exc
