"""How many examples hypothesis tries of a test that costs seconds. They are others each time, so a third is a fair sample."""

from __future__ import annotations

_SHARE = 3
_sampling = True


def take_all() -> None:
    """Tests that are imported from now on try every example."""
    global _sampling  # noqa: PLW0603
    _sampling = False


def examples(count: int, share: int = _SHARE) -> int:
    return -(-count // share) if _sampling else count
