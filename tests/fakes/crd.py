"""Objects of the CustomResourceDefinition in deploy/, checked as the API server checks them: types, unknown fields, CEL rules."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import yaml
from cel_expr_python import cel  # type: ignore[import-untyped]

_FILE = Path(__file__).resolve().parents[2] / "deploy/kustomize/overlays/cluster/virtualmachine.yaml"
# A VirtualMachine with every field of its spec.
EXAMPLE: dict[str, Any] = {
    "apiVersion": "virtshim.io/v1alpha1",
    "kind": "VirtualMachine",
    "metadata": {"name": "db", "labels": {"any": "thing"}},
    "spec": {
        "state": "Running",
        "drain": "Move",
        "stayOnNode": True,
        "restartedAt": "2026-01-31T12:00:00Z",
        "moveTo": "node2",
        "template": {
            "metadata": {"annotations": {"virtshim.io/vnc": "true"}, "labels": {"app": "db"}},
            "spec": {
                "runtimeClassName": "virtshim-large",
                "nodeSelector": {"disk": "ssd"},
                "containers": [{"name": "db", "image": "db", "resources": {"limits": {"memory": "2Gi"}}}],
                "volumes": [{"name": "state", "persistentVolumeClaim": {"claimName": "db"}}],
            },
        },
    },
}
_ENVIRONMENT = cel.NewEnv(variables={"self": cel.Type.DYN})


@functools.cache
def definition() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(_FILE.read_text())
    return found


def schema() -> dict[str, Any]:
    found: dict[str, Any] = definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return found


def defaulted(document: Any, here: dict[str, Any] | None = None) -> Any:
    """The object with the schema's defaults."""
    here = schema() if here is None else here
    if isinstance(document, dict):
        properties = here.get("properties", {})
        with_defaults = {name: one["default"] for name, one in properties.items() if "default" in one} | document
        return {name: defaulted(value, properties.get(name, {})) for name, value in with_defaults.items()}
    if isinstance(document, list):
        return [defaulted(one, here.get("items", {})) for one in document]
    return document


def faults(document: dict[str, Any]) -> list[str]:
    """[] for an object that the API server takes from somebody who is strict about unknown fields, as `kubectl` is."""
    return unknown(document) or broken_rules(document)


def broken_rules(document: dict[str, Any]) -> list[str]:
    """The rules of values are asked only if the schema is kept."""
    whole = pruned(defaulted(document))
    found = [f"{error.json_path}: {error.message}" for error in jsonschema.Draft7Validator(schema()).iter_errors(whole)]
    return found or list(_broken(whole, schema()))


def unknown(document: dict[str, Any]) -> list[str]:
    return [f'unknown field "{path}"' for path in _unknown(document, schema(), "")]


def pruned(document: Any, here: dict[str, Any] | None = None, path: str = "") -> Any:
    """The object without unknown fields."""
    here = schema() if here is None else here
    if isinstance(document, dict):
        return {
            name: pruned(one, found, f"{path}.{name}".lstrip("."))
            for name, one in document.items()
            if (found := _field(here, name, path)) is not None
        }
    if isinstance(document, list):
        return [pruned(one, here.get("items", {}), f"{path}[]") for one in document]
    return document


def _unknown(value: Any, here: dict[str, Any], path: str) -> Iterator[str]:
    if isinstance(value, dict):
        for name, one in value.items():
            own = f"{path}.{name}".lstrip(".")
            found = _field(here, name, path)
            if found is None:
                yield own
            else:
                yield from _unknown(one, found, own)
    elif isinstance(value, list):
        for number, one in enumerate(value):
            yield from _unknown(one, here.get("items", {}), f"{path}[{number}]")


def _field(here: dict[str, Any], name: str, path: str) -> dict[str, Any] | None:
    """The schema of a field of an object; {} takes everything; None: it is unknown."""
    is_open = here == {} or here.get("x-kubernetes-preserve-unknown-fields") or path == "metadata"
    found: dict[str, Any] | None = here.get("properties", {}).get(name) or here.get("additionalProperties")
    return found or ({} if is_open else None)


@functools.cache
def _program(rule: str) -> Any:
    return _ENVIRONMENT.compile(rule)


def _broken(value: Any, here: dict[str, Any]) -> Iterator[str]:
    for one in here.get("x-kubernetes-validations", ()):
        if _program(one["rule"]).eval(data={"self": value}).value() is not True:
            yield one["message"]
    if isinstance(value, dict):
        properties, others = here.get("properties", {}), here.get("additionalProperties", {})
        for name, inner in value.items():
            yield from _broken(inner, properties.get(name) or others or {})
    elif isinstance(value, list):
        for inner in value:
            yield from _broken(inner, here.get("items", {}))
