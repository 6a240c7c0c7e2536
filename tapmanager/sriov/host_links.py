"""Links of the host that belong to pods' network functions, by netlink: implements `nic_functions.HostLinks`."""

from __future__ import annotations

import errno
import os
import secrets
import socket
import threading
import time
from typing import Any

from pyroute2 import IPRoute

from tapmanager.errors import TapmanagerError, internal
from tapmanager.links import netlink, netns, pod_links
from tapmanager.pod import NicFunction
from tapmanager.sriov import vf_messages
from tapmanager.sriov.vf_settings import VfSettings

# Cards refuse changes to a function while it is reset, as it is when its driver changes; in seconds.
_RESETS = 3.0
_POLL = 0.05
_BUSY = (errno.EAGAIN, errno.EBUSY)


class NetlinkHostLinks:
    def vf_settings(self, physical: str, number: int) -> VfSettings | None:
        """See the protocol."""
        with pod_links.netlink_errors(f"reading VF {number} of {physical}"), IPRoute() as ipr:
            for link in ipr.get_links(self._index(ipr, physical), ext_mask=vf_messages.EXT_MASK):
                return vf_messages.settings_of(link, number)
        return None

    def set_vf(self, physical: str, number: int, change: VfSettings) -> None:
        """See the protocol. Waits for a function that is busy with its reset."""
        try:
            message = vf_messages.request(socket.if_nametoindex(physical), number, change)
        except OSError as exc:
            raise _gone(physical) from exc
        until = time.monotonic() + _RESETS
        while (code := next(netlink.exchange(socket.NETLINK_ROUTE, message, 1))) in _BUSY and time.monotonic() < until:
            threading.Event().wait(_POLL)
        if code:
            raise internal(f"setting {change} for VF {number} of {physical}: the kernel refused: {os.strerror(code)}")

    def move_in(self, name: str, function: NicFunction, netns_path: str) -> None:
        """See the protocol. By a name that neither side has: the one it had in the pod is often taken on the host."""
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
        """See the protocol."""
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
