"""The proxy remembers a limited number of entries, and keeps those that are still used."""

import pytest

from virtshim.proxy.owners import Recent

pytestmark = pytest.mark.proxy


def test_an_entry_that_is_written_again_is_kept_longer() -> None:
    recent = Recent[str, int](2)
    for number, name in enumerate(("first", "second", "first", "third")):
        recent.put(name, number)
    assert [recent.get(name) for name in ("first", "second", "third")] == [2, None, 3]


def test_an_entry_that_is_read_is_kept_longer() -> None:
    recent = Recent[str, int](2)
    recent.put("first", 1)
    recent.put("second", 2)
    assert recent.get("first") == 1
    recent.put("third", 3)
    assert [recent.get(name) for name in ("first", "second", "third")] == [1, None, 3]
