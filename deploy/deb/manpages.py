"""Manual pages from the command line's own help: one for `virtshim`, and one for each of its commands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import typer
from typer.main import get_command


def pages(app: typer.Typer, name: str, version: str, changed: int) -> Iterator[tuple[str, str]]:
    """(file name, roff) of each command. `changed`: the time of the sources' last change, in seconds since 1970."""
    command = get_command(app)
    footer = f'"{datetime.fromtimestamp(changed, UTC):%Y-%m-%d}" "{name} {version}"'
    yield from _of(command, typer.Context(command, info_name=name), footer)


# Commands have a class inside Typer. This only uses what Typer's own help uses.
def _of(command: Any, ctx: Any, footer: str) -> Iterator[tuple[str, str]]:
    name = ctx.command_path.replace(" ", "-")
    names = command.list_commands(ctx) if hasattr(command, "list_commands") else []
    inner = [(one, command.get_command(ctx, one)) for one in names]
    inner = [(one, each) for one, each in inner if not each.hidden]
    lines = [f'.TH "{name.upper()}" "8" {footer}', ".SH NAME", f"{_text(name)} \\- {_text(_summary(command))}"]
    lines += [".SH SYNOPSIS", f".B {_text(ctx.command_path)}", _text(" ".join(command.collect_usage_pieces(ctx)))]
    lines += [".SH DESCRIPTION", *_paragraphs(command.help or "")]
    for title, kind in (("ARGUMENTS", "argument"), ("OPTIONS", "option")):
        params = [one for one in command.params if one.param_type_name == kind]
        records = [record for one in params if (record := one.get_help_record(ctx))]
        lines += _list(title, records)
    lines += _list("COMMANDS", [(f"{name}-{one}(8)", _summary(each)) for one, each in inner])
    above = [f"{ctx.parent.command_path.replace(' ', '-')}(8)"] if ctx.parent else []
    lines += [".SH SEE ALSO", _text(", ".join([*above, "/usr/share/doc/virtshim/commands.md"]))]
    yield f"{name}.8", "\n".join(lines) + "\n"
    for one, each in inner:
        yield from _of(each, typer.Context(each, info_name=one, parent=ctx), footer)


def _summary(command: Any) -> str:
    """The beginning of the command's help, up to the end of a sentence or clause."""
    return re.split(r"\s\(|[.;:](?:\s|$)", " ".join((command.help or "").split()))[0]


def _list(title: str, records: list[tuple[str, str]]) -> list[str]:
    lines = [f".SH {title}"] if records else []
    for term, meaning in records:
        lines += [".TP", f".B {_text(term)}", _text(meaning)]
    return lines


def _paragraphs(text: str) -> list[str]:
    out: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        out += [".PP", _text(" ".join(paragraph.split()))]
    return out[1:]


def _text(text: str) -> str:
    """Escapes text for roff: no control character at a line's beginning, and hyphens that can be copied."""
    escaped = (
        " ".join(text.split()).replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq").replace("`", "\\(ga")
    )
    return f"\\&{escaped}" if escaped.startswith((".", "\\(aq")) else escaped
