"""The resolver's options (`ndots:5`), which neither network-config nor DHCP has a word for. No I/O.

cloud-init writes them itself, with its module resolv_conf, where the distribution leaves /etc/resolv.conf to it: Red Hat's and
SUSE's families, Alpine, Photon, Azure Linux. Elsewhere it says that the module is not for this distribution and does nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from virtshim.domain.network import Dns

_KEYS: Final = ("manage_resolv_conf", "resolv_conf")


def resolver_settings(dns: Dns, user_data: Mapping[str, Any]) -> dict[str, Any]:
    """For user-data: nothing without options, or if the pod's own user-data says what /etc/resolv.conf is to be."""
    if not dns.options or any(key in user_data for key in _KEYS):
        return {}
    wanted: dict[str, Any] = {}
    if dns.servers:
        wanted["nameservers"] = list(dns.servers)
    if dns.searches:
        wanted["searchdomains"] = list(dns.searches)
    wanted["options"] = dict(_option(text) for text in dns.options)
    return {"manage_resolv_conf": True, "resolv_conf": wanted}


def _option(text: str) -> tuple[str, bool | int | str]:
    """cloud-init writes a flag for True, `NAME:VALUE` for all else."""
    name, colon, value = text.partition(":")
    if not colon:
        return name, True
    return name, int(value) if value.isascii() and value.isdecimal() else value
