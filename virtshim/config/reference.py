"""Generates the reference page of all settings, `docs/configuration.md`, from their declarations."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from pydantic import BaseModel, ByteSize
from pydantic.fields import FieldInfo

from tapmanager.toml_files import Key
from virtshim.config.faults import dotted, table_in

_HEAD: Final = """\
# Configuration

This page lists every setting. `virtshim config reference` generates it from the code. [operate.md](operate.md#settings)
explains files, drop-ins, environment variables, `virtshim config show` and `check`, and reloads.

*Reload: yes* means that `systemctl reload` (SIGHUP) changes the setting in the running daemon. All other settings need a
restart, which ends no VM. Sizes may be written as text: `"512MiB"`, `"40GiB"`.
"""

_UNITS: Final = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"))


def page(root: type[BaseModel]) -> str:
    return _HEAD + "".join(_tables(root, ()))


def _tables(model: type[BaseModel], at: Key, *, listed: bool = False) -> Iterator[str]:
    if at:
        name, _, about = (model.__doc__ or "").partition(":")
        title = f"[[{dotted(at)}]]" if listed else f"[{dotted(at)}]"
        if name != title:
            raise ValueError(f"{model.__name__}: the docstring must begin with {title}: and say what the table is for")
        said = " ".join(about.split())
        yield f"\n## {title}\n\n{said[:1].upper()}{said[1:]}\n\n"
        yield "| setting | default | allowed | reload | meaning | reason |\n|---|---|---|---|---|---|\n"
        schema = model.model_json_schema()["properties"]
        for field, info in model.model_fields.items():
            if table_in(model, field) is None or info.annotation is not table_in(model, field):
                yield _row(dotted((*at, field)), info, schema[field])
    for field, info in model.model_fields.items():
        inner = table_in(model, field)
        if inner is not None:
            yield from _tables(inner, (*at, field), listed=info.annotation is not inner)


def _row(name: str, info: FieldInfo, schema: dict[str, Any]) -> str:
    extra = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
    cells = (
        f"`{name}`",
        _default(info),
        _allowed(extra, schema, info.metadata),
        "yes" if extra.get("reload") else "",
        schema.get("description", ""),
        str(extra.get("why", "")),
    )
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "none: must be set"
    value = info.default
    if isinstance(value, ByteSize) and value:
        size, unit = next((size, unit) for size, unit in (*_UNITS, (1, "B")) if value % size == 0)
        return f'`"{value // size}{unit}"`'
    plain = (
        [one.model_dump(mode="json") if isinstance(one, BaseModel) else one for one in value]
        if isinstance(value, tuple)
        else value
    )
    return f"`{json.dumps(plain)}`"


def _allowed(extra: Any, schema: dict[str, Any], limits: list[Any]) -> str:
    """The allowed values: the declared words, or else a text made from the type and its limits."""
    if extra.get("allowed"):
        return str(extra["allowed"])
    if "enum" in schema:
        return ", ".join(f"`{one}`" for one in schema["enum"])
    if schema.get("type") == "boolean":
        return "`true`, `false`"
    if schema.get("pattern") == "^/":
        return "absolute path"
    if not any(one.get("type") in ("integer", "number") for one in schema.get("anyOf", [schema])):
        return "text"
    return f"{_range(limits)} {extra.get('unit') or ''}".rstrip()


def _range(limits: list[Any]) -> str:
    found = {name: getattr(one, name) for one in limits for name in ("ge", "gt", "le") if hasattr(one, name)}
    most = found.get("le")
    if "gt" in found:
        return f"more than {_plain(found['gt'])}" + (f", at most {_plain(most)}" if most is not None else "")
    least = found.get("ge", 0)
    return f"{_plain(least)} or more" if most is None else f"{_plain(least)} to {_plain(most)}"


def _plain(number: float) -> str:
    return str(int(number)) if number == int(number) else str(number)
