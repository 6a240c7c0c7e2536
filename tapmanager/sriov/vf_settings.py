"""The settings of a virtual function, which the owner of the network card (an operator, a CNI plugin) has made. Pure.

The card's driver keeps them on the physical function, where the guest cannot change them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tapmanager.fields import MAC, BadField, Json, flag, number, refuse_unknown, text

NO_MAC = "00:00:00:00:00:00"
LINK_STATES = ("auto", "enable", "disable")  # by the kernel's number
PROTOCOLS: Mapping[int, str] = {0x8100: "802.1Q", 0x88A8: "802.1ad"}

_PROTOCOL = re.compile(r"802\.1Q|802\.1ad|0x[0-9a-f]{4}")
_MAX = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class VfSettings:
    """None: the card does not report the value, or (as a change) leave it. `mac`: NO_MAC if none is set. `vlan`: 0 for none.
    `protocol`: 802.1Q, 802.1ad, or an ethertype such as 0x9100. Rates in Mbit/s, 0 for no limit. `rss_query`: the function may
    read the card's RSS table and key."""

    mac: str | None = None
    vlan: int | None = None
    qos: int | None = None
    protocol: str | None = None
    min_tx_rate: int | None = None
    max_tx_rate: int | None = None
    spoof_check: bool | None = None
    link_state: str | None = None
    rss_query: bool | None = None
    trust: bool | None = None

    def __str__(self) -> str:
        told = ((name, getattr(self, name)) for name in self.__slots__)
        return " ".join(f"{name}={_word(value)}" for name, value in told if value is not None)

    def to_json(self) -> Json:
        """Omits values that the card does not report."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}

    @classmethod
    def from_json(cls, obj: Json, where: str) -> VfSettings:
        """Raises BadField."""
        refuse_unknown(obj, cls.__slots__, where)
        link_state = _text(obj, "link_state", where)
        if link_state not in (None, *LINK_STATES):
            raise BadField(f"{where}.link_state: must be one of {', '.join(LINK_STATES)}")
        return cls(
            mac=_matching(MAC, obj, "mac", where),
            vlan=_number(obj, "vlan", where, 4095),
            qos=_number(obj, "qos", where, _MAX),
            protocol=_matching(_PROTOCOL, obj, "protocol", where),
            min_tx_rate=_number(obj, "min_tx_rate", where, _MAX),
            max_tx_rate=_number(obj, "max_tx_rate", where, _MAX),
            spoof_check=_flag(obj, "spoof_check", where),
            link_state=link_state,
            rss_query=_flag(obj, "rss_query", where),
            trust=_flag(obj, "trust", where),
        )


@dataclass(frozen=True, slots=True)
class SettingMismatch:
    """A setting that differs on the card. `wanted` and `now` hold only its fields. `why`: the kernel's error when it was set,
    "" for none."""

    name: str
    wanted: VfSettings
    now: VfSettings
    why: str = ""

    def __str__(self) -> str:
        now = str(self.now) or "nothing"
        return f"{self.name}: {self.wanted} was set, the card has {now}" + (f" ({self.why})" if self.why else "")

    @property
    def is_unsafe(self) -> bool:
        """Whether the guest would be on another network than the owner intended, or could do more there."""
        if self.name in ("MAC", "VLAN"):
            return True
        return (self.name == "spoof-check" and self.wanted.spoof_check is True) or (
            self.name == "trust" and self.wanted.trust is False
        )


# The settings by kernel attribute, in the order of setting. Trust comes last, when all other settings confine the guest.
_TOGETHER: Mapping[str, tuple[str, ...]] = {
    "MAC": ("mac",),
    "VLAN": ("vlan", "qos", "protocol"),
    "transmit rate": ("min_tx_rate", "max_tx_rate"),
    "spoof-check": ("spoof_check",),
    "link state": ("link_state",),
    "RSS query": ("rss_query",),
    "trust": ("trust",),
}


def mismatched_settings(wanted: VfSettings, now: VfSettings) -> tuple[SettingMismatch, ...]:
    """The settings that differ in `now`, or are unknown there."""
    return tuple(
        SettingMismatch(name, _only(wanted, fields), _only(now, fields))
        for name, fields in _TOGETHER.items()
        if any(getattr(wanted, field) not in (None, getattr(now, field)) for field in fields)
    )


def without_new_privileges(wanted: VfSettings, before: VfSettings) -> VfSettings:
    """Returns `wanted` without the rights that `before` lacks, because somebody removed them on purpose."""
    return dataclasses.replace(
        wanted,
        trust=None if wanted.trust and not before.trust else wanted.trust,
        spoof_check=None if wanted.spoof_check is False and before.spoof_check is not False else wanted.spoof_check,
    )


def _only(settings: VfSettings, fields: Iterable[str]) -> VfSettings:
    return VfSettings(**{field: getattr(settings, field) for field in fields})


def _word(value: object) -> str:
    return str(value) if not isinstance(value, bool) else "on" if value else "off"


def _text(obj: Json, name: str, where: str) -> str | None:
    return text(obj, name, where) if obj.get(name) is not None else None


def _matching(pattern: re.Pattern[str], obj: Json, name: str, where: str) -> str | None:
    value = _text(obj, name, where)
    if value is not None and not pattern.fullmatch(value):
        raise BadField(f"{where}.{name}: {value[:40]!r} is not valid")
    return value


def _number(obj: Json, name: str, where: str, most: int) -> int | None:
    return number(obj, name, where, 0, most) if obj.get(name) is not None else None


def _flag(obj: Json, name: str, where: str) -> bool | None:
    return flag(obj, name, where) if obj.get(name) is not None else None
