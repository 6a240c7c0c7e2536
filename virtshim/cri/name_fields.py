"""Names in a sandbox's message that end up in files of the guest or in CNI's arguments: what they may be made of. Pure."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from typing import Final

from criproto.runtime_v1 import api_pb2 as pb

# What tapmanager may put into CNI_ARGS, whose separators are ";" and "=". Kubernetes' own names are narrower than this.
_POD_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,252}")
_DOMAIN: Final = re.compile(r"\.|[A-Za-z0-9_]([A-Za-z0-9._-]{0,251}[A-Za-z0-9_.])?")
_HOSTNAME: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")
# `NAME` or `NAME:VALUE`, as in resolv.conf(5).
_OPTION: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}(:[A-Za-z0-9._-]{1,64})?")


def metadata_faults(meta: pb.PodSandboxMetadata) -> Iterator[str]:
    for field in ("name", "namespace", "uid"):
        value = getattr(meta, field)
        if not value:
            yield f"config.metadata.{field} is empty"
        elif not _POD_NAME.fullmatch(value):
            yield f"config.metadata.{field} {value[:80]!r}: it must be 1 to 253 letters, digits or . _ : @ -"


def dns_faults(config: pb.PodSandboxConfig) -> Iterator[str]:
    """Of the hostname and the resolver's settings: they become lines of files in the guest."""
    if config.hostname and not _HOSTNAME.fullmatch(config.hostname):
        yield f"config.hostname {config.hostname[:80]!r} is not a host name: use letters, digits, '-' and '.'"
    dns = config.dns_config
    for at, server in enumerate(dns.servers):
        try:
            ipaddress.ip_address(server)
        except ValueError:
            yield f"config.dns_config.servers[{at}] {server[:80]!r} is not an IP address"
    for at, search in enumerate(dns.searches):
        if not _DOMAIN.fullmatch(search):
            yield f"config.dns_config.searches[{at}] {search[:80]!r} is not a domain name"
    for at, option in enumerate(dns.options):
        if not _OPTION.fullmatch(option):
            yield f"config.dns_config.options[{at}] {option[:80]!r} is no resolver option; use NAME or NAME:VALUE"
