"""Plans the entry in containerd's configuration for pods with containers beside their VM: a copy of its default OCI runtime under
the name of the RuntimeClass handler. CRI-O gets none, because it cannot make such pods. Pure."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from virtshim.config.toml_text import toml_key, toml_value
from virtshim.neighbours.runtimes import CONTAINERD_FILE, RuntimeSetup
from virtshim.setup.changes import FilePlan, PlannedFile
from virtshim.setup.facts import AS_BYTES
from virtshim.setup.texts import MARK

_WHY: Final = "pods with containers beside their VM"
# containerd's default, which its file need not have. A file with tables of runtimes replaces it.
_RUNC: Final = {"runtime_type": "io.containerd.runc.v2"}


def plan(runtime: RuntimeSetup | None, handlers: Sequence[str], texts: Mapping[str, str]) -> FilePlan:
    """`handlers`: the RuntimeClass handlers that the runtime must have. `texts`: texts of existing files by path."""
    missing = [one for one in handlers if runtime and one not in runtime.handlers]
    if runtime is None or not runtime.handlers_table or runtime.trouble or not missing:
        return FilePlan()
    tables = _tables(runtime, missing)
    text = texts.get(CONTAINERD_FILE, "")
    if why := _why_not(runtime, tables, text):
        named = ", ".join(missing)
        problem = (
            f"{runtime.name} has no OCI runtime {named}, which {_WHY} need, and setup cannot add it: {why}; copy the table of "
            f"its default runtime to [{runtime.handlers_table}.{missing[0]}] by hand, and restart {runtime.name}"
        )
        return FilePlan(problems=(problem,))
    content = "\n".join([text or "version = 2", "", MARK.rstrip(), *tables, ""])
    return FilePlan((PlannedFile(CONTAINERD_FILE, content.encode(errors=AS_BYTES), _WHY),))


def _why_not(runtime: RuntimeSetup, tables: Sequence[str], text: str) -> str:
    """Why the file cannot be extended; "" if it can."""
    if not tables:
        return f"{runtime.file} does not set its default runtime {runtime.default_runtime}".rstrip()
    if runtime.elsewhere:
        return f"the settings of CRI are in {runtime.elsewhere}"
    try:
        version = tomllib.loads(text).get("version") if text else 2
        tomllib.loads("\n".join([text, *tables]))
    except tomllib.TOMLDecodeError:
        return f"{runtime.file} has its tables in a form that cannot be extended"
    if version not in (2, 3):
        return f"{runtime.file} does not say version = 2 or 3"
    return ""


def _tables(runtime: RuntimeSetup, missing: Sequence[str]) -> list[str]:
    """The lines to add; [] if the default runtime is not known."""
    default = runtime.handlers.get(runtime.default_runtime)
    if runtime.default_runtime == "runc":
        default = {**_RUNC, **(default or {})}
    if default is None:
        return []
    names = [*([runtime.default_runtime] if runtime.default_runtime not in runtime.handlers else []), *missing]
    return [line for name in names for line in _lines(f"{runtime.handlers_table}.{toml_key(name)}", default)]


def _lines(name: str, table: Mapping[str, Any]) -> Iterator[str]:
    yield f"[{name}]"
    yield from (f"{toml_key(key)} = {toml_value(value)}" for key, value in table.items() if not isinstance(value, dict))
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _lines(f"{name}.{toml_key(key)}", value)
