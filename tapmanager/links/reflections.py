"""What a guest hears of itself. Pure.

A bridge in hairpin mode (Flannel's, Weave's) sends back what came, so that a pod reaches itself by a Service. It sends back
what was for everybody, too: a guest that asks whether its IPv6 address is somebody's (duplicate address detection) hears its
own question, and gives the address up. Linux marks its questions since 4.10, others do not; for containers the CNI plugin
switches the question off, which nobody can in a guest. Nobody else sends from its MAC; what is for it alone passes. In nft's
language:

    table bridge virtshim-reflections {
      chain from-outside { type filter hook prerouting priority -300; policy accept;
        iifname "eth0" ether saddr MAC @ll,0,8 & 1 != 0 drop
      }
    }
"""

from __future__ import annotations

from collections.abc import Sequence

from tapmanager.links import nft
from tapmanager.pod import Nic

_CHAIN = nft.Chain("virtshim-reflections", "from-outside", nft.PREROUTING, -300)
_TARGET, _SENDER = 0, 6
_FOR_MANY = b"\x01"


def rules(nics: Sequence[Nic]) -> Sequence[bytes]:
    """Messages for `nft.batch`."""
    made = [nft.rule(_CHAIN, nft.came_by(nic.link) + _is_reflected(nic)) for nic in nics]
    return [*nft.table_of(_CHAIN), *made] if made else []


def _is_reflected(nic: Nic) -> bytes:
    own = nft.is_at(nft.LINK, _SENDER, bytes.fromhex(nic.mac.replace(":", "")))
    return own + nft.has_bits(nft.LINK, _TARGET, _FOR_MANY) + nft.verdict(nft.DROP)
