"""Links of the host that belong to pods' network functions, by netlink: implements `nic_functions.HostLinks`."""

from __future__ import annotations

import os
import secrets
from typing import Any

from pyroute2 import IPRoute

from tapmanager import links, netns
from tapmanager.errors import internal
from tapmanager.pod import NicFunction

_EXT_MASK_VF = 1  # RTEXT_FILTER_VF: only then are VFs told


class NetlinkHostLinks:
    def vf_mac(self, physical: str, number: int) -> str:
        """See the protocol."""
        with links.talking(f"reading VF {number} of {physical}"), IPRoute() as ipr:
            for link in ipr.get_links(self._index(ipr, physical), ext_mask=_EXT_MASK_VF):
                known = link.get_attr("IFLA_VFINFO_LIST")
                for info in known.get_attrs("IFLA_VF_INFO") if known is not None else ():
                    mac = info.get_attr("IFLA_VF_MAC")
                    if mac is not None and mac["vf"] == number:
                        return str(mac["mac"])
        return ""

    def set_vf_mac(self, physical: str, number: int, mac: str) -> None:
        """See the protocol."""
        with links.talking(f"setting the MAC of VF {number} of {physical}"), IPRoute() as ipr:
            ipr.link("set", index=self._index(ipr, physical), vf={"vf": number, "mac": mac})

    def move_in(self, name: str, function: NicFunction, netns_path: str) -> None:
        """See the protocol. By a name that neither side has: the one it had in the pod is often taken on the host."""
        passing = f"vs{secrets.token_hex(6)}"
        with links.talking(f"moving {name} to the pod as {function.link}"), IPRoute() as ipr:
            index = self._index(ipr, name)
            ipr.link("set", index=index, state="down")
            ipr.link("set", index=index, ifname=passing)
            descriptor = os.open(netns_path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                ipr.link("set", index=index, net_ns_fd=descriptor)
            finally:
                os.close(descriptor)
        netns.run_inside(netns_path, lambda: _settle(passing, function))

    def is_in(self, name: str, netns_path: str) -> bool:
        """See the protocol."""
        return name in netns.run_inside(netns_path, lambda: {link.name for link in links.read()})

    def _index(self, ipr: Any, name: str) -> int:
        found = ipr.link_lookup(ifname=name)
        if not found:
            raise internal(f"the host's interface {name} is gone")
        return int(found[0])


def _settle(passing: str, function: NicFunction) -> None:
    with links.talking(f"naming {function.link}"), IPRoute() as ipr:
        index = int(ipr.link_lookup(ifname=passing)[0])
        ipr.link("set", index=index, ifname=function.link)
        ipr.link("set", index=index, mtu=function.mtu, address=function.mac)
        ipr.link("set", index=index, state="up")
        for address in function.link_addresses:
            ip, _, prefix = address.partition("/")
            ipr.addr("replace", index=index, address=ip, prefixlen=int(prefix))
