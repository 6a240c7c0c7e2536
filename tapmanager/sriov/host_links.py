"""Changes the host's links of pods' network functions through netlink. Implements `nic_functions.HostLinks`."""

from __future__ import annotations

import errno
import os
import secrets
import socket
import struct
import threading
import time
from typing import Any

from pyroute2 import IPRoute

from tapmanager.errors import TapmanagerError, internal
from tapmanager.links import netlink, netns, pod_links
from tapmanager.links.netlink import ACK, REQUEST, attribute, message, nested
from tapmanager.network_values import mac_bytes
from tapmanager.pod import NicFunction
from tapmanager.sriov.vf_settings import LINK_STATES, PROTOCOLS, VfSettings

# A virtual function's settings as the kernel reports them (IFLA_VF_INFO) and takes them (RTM_SETLINK). Pure.
#
# Numbers and structures are from linux/if_link.h. The request is made here, not by pyroute2: its IFLA_VF_VLAN_INFO
# ends before the structure's padding, and the kernel refuses it as too short.

# RTEXT_FILTER_VF: needed to get the functions at all. RTEXT_FILTER_SKIP_STATS: with counters, the functions of a card with very
# many of them do not fit into one attribute.
EXT_MASK = 1 | 8

_RTM_SETLINK = 19
_VFINFO_LIST, _VF_INFO, _VLAN_INFO = 22, 1, 1
_MAC, _SPOOF_CHECK, _LINK_STATE, _RATE, _RSS_QUERY, _TRUST, _VLAN_LIST = 1, 4, 5, 6, 7, 9, 12
_UNKNOWN = 0xFFFFFFFF  # what the kernel reports for drivers that report nothing


def settings_of(link: Any, number: int) -> VfSettings | None:
    """Reads the settings from pyroute2's link message, requested with EXT_MASK. None if it does not report the function."""
    known = link.get_attr("IFLA_VFINFO_LIST")
    for info in known.get_attrs("IFLA_VF_INFO") if known is not None else ():
        mac = info.get_attr("IFLA_VF_MAC")
        if mac is not None and mac["vf"] == number:
            return _settings(str(mac["mac"]), info)
    return None


def _settings(mac: str, info: Any) -> VfSettings:
    vlan, qos, protocol = _vlan(info)
    rate = info.get_attr("IFLA_VF_RATE")
    link_state = _value(info, "IFLA_VF_LINK_STATE", "link_state")
    return VfSettings(
        mac=mac,
        vlan=vlan,
        qos=qos,
        protocol=protocol,
        min_tx_rate=rate["min_tx_rate"] if rate is not None else None,
        max_tx_rate=rate["max_tx_rate"] if rate is not None else None,
        spoof_check=_switch(info, "IFLA_VF_SPOOFCHK", "spoofchk"),
        link_state=LINK_STATES[link_state] if link_state is not None and link_state < len(LINK_STATES) else None,
        rss_query=_switch(info, "IFLA_VF_RSS_QUERY_EN", "rss_query_en"),
        trust=_switch(info, "IFLA_VF_TRUST", "trust"),
    )


def _vlan(info: Any) -> tuple[int | None, int | None, str | None]:
    """The list has at most one member, which includes the protocol. Kernels before 4.9 have no list, and only 802.1Q."""
    listed = info.get_attr("IFLA_VF_VLAN_LIST")
    found = listed.get_attr("IFLA_VF_VLAN_INFO") if listed is not None else info.get_attr("IFLA_VF_VLAN")
    if found is None:
        return None, None, None
    vlan, qos = found["vlan"], found["qos"]
    number = found["proto"] if listed is not None and (vlan or qos) else 0x8100  # without a VLAN it means nothing
    return vlan, qos, PROTOCOLS.get(number, f"{number:#06x}")


def _value(info: Any, kind: str, name: str) -> int | None:
    found = info.get_attr(kind)
    return None if found is None or found[name] == _UNKNOWN else int(found[name])


def _switch(info: Any, kind: str, name: str) -> bool | None:
    value = _value(info, kind, name)
    return None if value is None else bool(value)


def request_of(index: int, number: int, change: VfSettings) -> bytes:
    """One message with all settings of `change` for VF `number` of the link `index`. The kernel applies them in turn, and
    stops at the first that the card refuses."""
    head = struct.pack("=BxHiII", socket.AF_UNSPEC, 0, index, 0, 0)
    info = nested(_VF_INFO, *_attributes(number, change))
    return message(_RTM_SETLINK, REQUEST | ACK, 1, head + nested(_VFINFO_LIST, info))


def _attributes(number: int, change: VfSettings) -> list[bytes]:
    found = []
    if change.mac is not None:
        found.append(attribute(_MAC, struct.pack("=I32s", number, mac_bytes(change.mac))))
    if change.vlan is not None:
        packed = struct.pack("=III", number, change.vlan, change.qos or 0) + struct.pack("!Hxx", _protocol(change))
        found.append(nested(_VLAN_LIST, attribute(_VLAN_INFO, packed)))
    if change.max_tx_rate is not None:
        found.append(attribute(_RATE, struct.pack("=III", number, change.min_tx_rate or 0, change.max_tx_rate)))
    numbers = (
        (_SPOOF_CHECK, change.spoof_check),
        (_LINK_STATE, None if change.link_state is None else LINK_STATES.index(change.link_state)),
        (_RSS_QUERY, change.rss_query),
        (_TRUST, change.trust),
    )
    found += [attribute(kind, struct.pack("=II", number, value)) for kind, value in numbers if value is not None]
    return found


def _protocol(change: VfSettings) -> int:
    numbers = {name: number for number, name in PROTOCOLS.items()}
    name = change.protocol or "802.1Q"
    return numbers[name] if name in numbers else int(name, 16)


# Seconds to wait: a card refuses changes of a function during its reset, which a change of its driver causes.
_RESETS = 3.0
_POLL = 0.05
_BUSY = (errno.EAGAIN, errno.EBUSY)


class NetlinkHostLinks:
    def vf_settings(self, physical: str, number: int) -> VfSettings | None:
        with pod_links.netlink_errors(f"reading VF {number} of {physical}"), IPRoute() as ipr:
            for link in ipr.get_links(self._index(ipr, physical), ext_mask=EXT_MASK):
                return settings_of(link, number)
        return None

    def set_vf(self, physical: str, number: int, change: VfSettings) -> None:
        """Waits for a function that is busy with its reset."""
        try:
            message = request_of(socket.if_nametoindex(physical), number, change)
        except OSError as exc:
            raise _gone(physical) from exc
        until = time.monotonic() + _RESETS
        while (code := next(netlink.exchange(socket.NETLINK_ROUTE, message, 1))) in _BUSY and time.monotonic() < until:
            threading.Event().wait(_POLL)
        if code:
            raise internal(f"setting {change} for VF {number} of {physical}: the kernel refused: {os.strerror(code)}")

    def move_in(self, name: str, function: NicFunction, netns_path: str) -> None:
        """Uses a temporary name, because the name in the pod is often in use on the host."""
        temporary_name = f"vs{secrets.token_hex(6)}"
        with pod_links.netlink_errors(f"moving {name} to the pod as {function.link}"), IPRoute() as ipr:
            index = self._index(ipr, name)
            ipr.link("set", index=index, state="down")
            ipr.link("set", index=index, ifname=temporary_name)
            descriptor = os.open(netns_path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                ipr.link("set", index=index, net_ns_fd=descriptor)
            finally:
                os.close(descriptor)
        netns.run_inside(netns_path, lambda: _configure(temporary_name, function))

    def is_in(self, name: str, netns_path: str) -> bool:
        return name in netns.run_inside(netns_path, lambda: {link.name for link in pod_links.read()})

    def _index(self, ipr: Any, name: str) -> int:
        found = ipr.link_lookup(ifname=name)
        if not found:
            raise _gone(name)
        return int(found[0])


def _gone(name: str) -> TapmanagerError:
    return internal(f"the host's interface {name} is gone")


def _configure(temporary_name: str, function: NicFunction) -> None:
    with pod_links.netlink_errors(f"naming {function.link}"), IPRoute() as ipr:
        index = int(ipr.link_lookup(ifname=temporary_name)[0])
        ipr.link("set", index=index, ifname=function.link)
        ipr.link("set", index=index, mtu=function.mtu, address=function.mac)
        if function.alias:
            ipr.link("set", index=index, ifalias=function.alias)
        ipr.link("set", index=index, state="up")
        pod_links.put_addresses(ipr, index, function.link, function.link_addresses)
