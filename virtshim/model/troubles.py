"""What can be wrong with a running VM, and how its pod's owner learns of it. No I/O.

This is the only list of kinds. Metrics, Events and log lines name them, so a kind must keep its name.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from virtshim.model.text import escaped

# Characters of a trouble's text in a log line or an Event. The API server accepts 1024.
_LONGEST: Final = 800
# The beginning of virtshim's own lines in a container's log.
PREFIX: Final = "virtshim: "


class TroubleKind(enum.Enum):
    """The names in labels and log lines; an Event's reason is the same name in CamelCase."""

    # The VM does not run.
    DISK_FULL = "disk_full"
    PAUSED = "paused"
    PAUSED_EXTERNALLY = "paused_externally"
    SUSPENDED = "suspended"
    # Something on the node that the VM uses has failed or is missing.
    DEVICE_ERRORS = "device_errors"
    CDI_LEFT_OUT = "cdi_left_out"
    VOLUMES_GONE = "volumes_gone"
    # Something could not be set up in the guest.
    VOLUMES_NOT_MOUNTED = "volumes_not_mounted"
    VOLUMES_UNCONFIRMED = "volumes_unconfirmed"
    COPIES_NOT_RENEWED = "copies_not_renewed"
    EMPTY_DISKS_NOT_MOUNTED = "empty_disks_not_mounted"
    BLOCK_VOLUMES_NOT_LINKED = "block_volumes_not_linked"
    SYSCTLS_NOT_SET = "sysctls_not_set"
    ROUTES_NOT_SET = "routes_not_set"
    ADDRESSES_NOT_SET = "addresses_not_set"

    @property
    def reason(self) -> str:
        """The reason of an Event."""
        return "".join(word.capitalize() for word in self.value.split("_"))

    @property
    def stops_the_vm(self) -> bool:
        """Whether the guest does not run, so that it cannot answer either."""
        return self in _STANDS_STILL

    @property
    def is_of_set_up(self) -> bool:
        """Whether only the guest's set-up shows it, so that a virtshim that has just started does not know."""
        return self in _OF_SET_UP


_STANDS_STILL: Final = frozenset(
    {TroubleKind.DISK_FULL, TroubleKind.PAUSED, TroubleKind.PAUSED_EXTERNALLY, TroubleKind.SUSPENDED}
)
_OF_SET_UP: Final = frozenset(
    {
        TroubleKind.VOLUMES_NOT_MOUNTED,
        TroubleKind.VOLUMES_UNCONFIRMED,
        TroubleKind.COPIES_NOT_RENEWED,
        TroubleKind.EMPTY_DISKS_NOT_MOUNTED,
        TroubleKind.BLOCK_VOLUMES_NOT_LINKED,
        TroubleKind.SYSCTLS_NOT_SET,
        TroubleKind.ROUTES_NOT_SET,
        TroubleKind.ADDRESSES_NOT_SET,
    }
)


@dataclass(frozen=True, slots=True)
class Trouble:
    """`text`: for people, what is wrong and what to do about it."""

    kind: TroubleKind
    text: str


@dataclass(frozen=True, slots=True)
class TroubleChange:
    """A trouble that has begun, whose text has changed, or that is over."""

    trouble: Trouble
    is_over: bool = False

    @property
    def text(self) -> str:
        """The text, printable and of bounded length, because a guest may have written a part of it."""
        return escaped(self.trouble.text, _LONGEST)

    @property
    def line(self) -> str:
        """A line for the container's log, without its line end."""
        name = self.trouble.kind.value
        return f"{PREFIX}{name} is over" if self.is_over else f"{PREFIX}{name}: {self.text}"


def changes(before: Sequence[Trouble], now: Sequence[Trouble]) -> list[TroubleChange]:
    """Ended troubles first, then new ones and those with a new text."""
    present = {one.kind for one in now}
    over = [TroubleChange(one, is_over=True) for one in before if one.kind not in present]
    return over + [TroubleChange(one) for one in now if one not in before]


def text_of_troubles(troubles: Iterable[Trouble]) -> str:
    """All troubles in one text for the container's message, "" for none."""
    return "; ".join(one.text for one in troubles)


def merged(before: Sequence[Trouble], new: Sequence[Trouble]) -> tuple[Trouble, ...]:
    """`before`, with troubles of the same kinds replaced by `new`."""
    kinds = {one.kind for one in new}
    return (*(one for one in before if one.kind not in kinds), *new)
