"""A PCI function of the host as it is now, for display: its driver, and the settings that its network card has for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class CardFunction:
    """`driver`: "" for none. `card`: the interface of the network card whose VF `number` it is, "" if it is none. `settings`:
    what the card says of it, by tapmanager's names (vlan, trust ...)."""

    driver: str
    card: str = ""
    number: int = 0
    settings: Mapping[str, str | int | bool] = field(default_factory=dict)

    @property
    def vlan(self) -> str:
        """`100`, `100 (802.1ad)`; "" for none."""
        number, protocol = self.settings.get("vlan"), self.settings.get("protocol")
        return f"{number}" + (f" ({protocol})" if protocol not in (None, "802.1Q") else "") if number else ""
