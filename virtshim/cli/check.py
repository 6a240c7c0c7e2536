"""`virtshim check`: can this machine run VMs? One line a finding, its remedy below it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator
from typing import Final

from rich.console import Console
from rich.text import Text

from virtshim import config as settings_table
from virtshim.domain.errors import ShimError
from virtshim.preflight.checks import ALL
from virtshim.preflight.finding import Finding, Level, error
from virtshim.preflight.runner import findings

_STYLES: Final = {Level.OK: "green", Level.WARNING: "yellow", Level.ERROR: "bold red"}


def check(config: str | None, *, as_json: bool = False) -> int:
    """Prints the findings; 1 if a VM could not start. Never raises for what is wrong with the machine or the file."""
    found = _print_json(_findings(config)) if as_json else print_lines(_findings(config))
    return int(any(finding.level is Level.ERROR for finding in found))


def _findings(config: str | None) -> Iterator[Finding]:
    try:
        settings = settings_table.load(config)
    except ShimError as exc:
        yield error("configuration", str(exc), "correct it; all other checks need it")
        return
    yield from findings(ALL, settings)


def print_lines(found: Iterable[Finding]) -> list[Finding]:
    """Each as soon as it is known."""
    console = Console(highlight=False, soft_wrap=True)
    printed: list[Finding] = []
    for finding in found:
        printed.append(finding)
        level = Text(f"{finding.level.value:<8}", style=_STYLES[finding.level])
        console.print(Text.assemble(level, f"{finding.subject:<16} {finding.text}"))
        if finding.remedy:
            console.print(Text(f"{'':<8}{'':<16} -> {finding.remedy}"))
    return printed


def _print_json(found: Iterable[Finding]) -> list[Finding]:
    printed = list(found)
    print(json.dumps([{**dataclasses.asdict(finding), "level": finding.level.value} for finding in printed], indent=2))
    return printed
