"""VirtletLibvirtCPUSetting: the part of libvirt's CPU definition that Virtlet accepted, in YAML. Pure.

Virtlet passed it on unchanged. virtshim reads what says which CPU the guest sees. The number of CPUs and their topology
follow from the number of vCPUs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from virtshim.model.errors import InvalidRequest
from virtshim.model.vm import CpuDetails, CpuModel
from virtshim.model.yaml_text import parse_mapping

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_MODES: Final = {mode.value: mode for mode in CpuModel if mode is not CpuModel.DEFAULT}
_POLICIES: Final = ("force", "require", "optional", "disable", "forbid")
_FALLBACKS: Final = ("allow", "forbid")
_KEYS: Final = ("mode", "model", "features")
_MOST_FEATURES: Final = 64


def parse_cpu_setting(text: str) -> tuple[CpuModel, CpuDetails]:
    """Raises InvalidRequest. Keys are Go's field names, and Virtlet ignored their case."""
    setting = _lower(parse_mapping(text))
    if other := sorted(set(setting) - set(_KEYS)):
        raise InvalidRequest(
            f"{other[0][:40]!r} cannot be set; only {', '.join(_KEYS)} can (the number of CPUs: VirtletVCPUCount); remove it"
        )
    name, fallback = _model(setting.get("model"))
    mode = setting.get("mode", "custom" if name else "")
    if not isinstance(mode, str) or mode not in _MODES:
        raise InvalidRequest(f"mode {str(mode)[:40]!r} is not one of {', '.join(_MODES)}; write one of them")
    if (mode == CpuModel.CUSTOM.value) != bool(name):
        raise InvalidRequest(
            "mode custom needs a model, and no other mode has one; write model: {value: NAME}, or remove it"
        )
    return _MODES[mode], CpuDetails(name, fallback, _features(setting.get("features")))


def _lower(mapping: Mapping[str, Any]) -> dict[str, Any]:
    return {str(key).lower(): value for key, value in mapping.items()}


def _model(value: Any) -> tuple[str, bool]:
    """A model's name, and whether libvirt may use a similar model."""
    if value is None:
        return "", True
    fields = _lower(value) if isinstance(value, dict) else {"value": value}
    name, fallback = fields.get("value"), fields.get("fallback", "allow")
    if set(fields) - {"value", "fallback"} or fallback not in _FALLBACKS or not _is_name(name):
        raise InvalidRequest(
            "model is malformed; write model: {value: NAME, fallback: allow}, with a name of `virsh cpu-models x86_64`"
        )
    return str(name), fallback == "allow"


def _features(value: Any) -> tuple[tuple[str, str], ...]:
    items = value or []
    if not isinstance(items, list) or len(items) > _MOST_FEATURES:
        raise InvalidRequest(
            f"features is not a list of at most {_MOST_FEATURES}; write features: [{{name: vmx, policy: require}}]"
        )
    return tuple(_feature(item) for item in items)


def _feature(item: Any) -> tuple[str, str]:
    fields = _lower(item) if isinstance(item, dict) else {}
    name, policy = fields.get("name"), fields.get("policy", "require")
    if set(fields) - {"name", "policy"} or not _is_name(name) or policy not in _POLICIES:
        raise InvalidRequest(
            f"a feature is malformed; write {{name: vmx, policy: require}}, policy one of {', '.join(_POLICIES)}"
        )
    return str(name), policy


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and _NAME.fullmatch(value) is not None
