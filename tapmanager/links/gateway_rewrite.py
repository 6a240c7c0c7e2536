"""What a guest sends to a router that is none goes to the gateway behind it (`ipv6.stand_in`). Pure.

The rule, in nft's language, a table for each router of each NIC:

    table bridge virtshim-tap0-1 {
      chain to-gateway { type filter hook prerouting priority -200; policy accept;
        iifname "tap0" ether daddr STAND-IN ether daddr set GATEWAY
      }
    }
"""

from __future__ import annotations

from collections.abc import Sequence

from tapmanager.links import nft


def rules(tap: str, number: int, mac: bytes, gateway: bytes) -> Sequence[bytes]:
    """Messages for `nft.batch`, which put this in the place of what was there: the chain stays, and no frame passes without a
    rule."""
    chain = nft.Chain(f"virtshim-{tap}-{number}", "to-gateway", nft.PREROUTING, -200)
    rewrite = nft.came_by(tap) + nft.is_at(nft.LINK, 0, mac) + nft.put_at(nft.LINK, 0, gateway)
    return [*nft.table_of(chain), nft.emptied(chain), nft.rule(chain, rewrite)]
