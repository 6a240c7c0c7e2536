"""The number of examples of hypothesis for a slow test. Examples differ from run to run, so a third is a fair sample."""

from __future__ import annotations

_SHARE = 3
_sampling = True


def take_all() -> None:
    """Tests that are imported from now on try every example."""
    global _sampling  # noqa: PLW0603
    _sampling = False


def examples(count: int, share: int = _SHARE) -> int:
    return -(-count // share) if _sampling else count
