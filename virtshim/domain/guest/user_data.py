"""Documents that are laid over each other. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def merged(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    """Two documents as one: `upper` laid over `lower`, at every depth. Mappings are joined, lists are concatenated (lower first),
    anything else is replaced, also where the types differ. Neither argument is changed."""
    result = dict(lower)
    for key, value in upper.items():
        result[key] = _over(result[key], value) if key in result else value
    return result


def _over(lower: Any, upper: Any) -> Any:
    if isinstance(lower, Mapping) and isinstance(upper, Mapping):
        return merged(lower, upper)
    if isinstance(lower, list) and isinstance(upper, list):
        return [*lower, *upper]
    return upper
