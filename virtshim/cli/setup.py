"""`virtshim setup` turns this machine into a node; `--undo` reverts that. The work itself is in `virtshim.setup`."""

from __future__ import annotations

import difflib
import json
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Console
from rich.text import Text

from virtshim.model.errors import InvalidRequest
from virtshim.setup.changes import Action, Change
from virtshim.setup.node_setup import NodeSetup, Outcome
from virtshim.setup.tree import NodeTree
from virtshim.setup.units import Systemctl
from virtshim.system.logsetup import set_up_logging

_STYLES: Final = {"kept": "yellow", "problem": "bold red", "failed": "bold red"}
_DONE: Final = {
    Action.CREATE: "created", Action.REPLACE: "replaced", Action.UPDATE: "updated", Action.KEEP: "kept",
    Action.RESTORE: "restored", Action.REMOVE: "removed",
}  # fmt: skip
# The words that a dry run prints instead.
_TO_DO: Final = {
    **{done: action.value for action, done in _DONE.items()},
    "enabled": "enable", "started": "start", "disabled": "disable", "stopped": "stop", "masked": "mask",
    "unmasked": "unmask", "caught up": "catch up",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class SetupOptions:
    root: str = "/"
    dry_run: bool = False
    undo: bool = False
    as_json: bool = False
    vms_only: bool | None = None
    """None: as in the previous setup."""


def setup_command(options: SetupOptions) -> int:
    """Returns 0 if the operator need not do anything, 1 if a file was kept or a problem was found. Raises ShimError."""
    set_up_logging("warning", "text")  # goes to standard error
    if not os.path.isdir(options.root):
        raise InvalidRequest(f"--root: {options.root} is not a directory")
    setup = NodeSetup(NodeTree(options.root), Systemctl(options.root))
    name = socket.gethostname().lower()  # kubelet's name for the node
    if options.undo:
        found = setup.undo_planned(name=name) if options.dry_run else setup.undo(name=name)
    elif options.dry_run:
        found = setup.planned(vms_only=options.vms_only, name=name)
    else:
        found = setup.set_up(vms_only=options.vms_only, name=name)
    if options.as_json:
        print(json.dumps(_as_json(found, options), indent=2))
    else:
        _print(found, dry_run=options.dry_run)
    return int(_wants_hands(found))


def _wants_hands(found: Outcome) -> bool:
    problems = found.plan.problems if found.plan else ()
    return bool(found.failed or problems) or any(one.action is Action.KEEP for one in found.changes)


def _print(found: Outcome, *, dry_run: bool) -> None:
    console = Console(highlight=False, soft_wrap=True)
    for done, text in _lines(found):
        word = _TO_DO.get(done, done) if dry_run else done
        if word == "diff":
            if dry_run:
                console.print(Text(text), end="")
        else:
            console.print(Text.assemble(Text(f"{word:<10}", style=_STYLES.get(word, "")), text))
    if found.plan and found.plan.refusal:
        console.print("nothing was changed; setup changes nothing until the first problem is solved")
    elif found.changes_nothing:
        console.print("nothing to change")
    if dry_run:
        console.print("nothing was changed, because of --dry-run")


def _lines(found: Outcome) -> Iterator[tuple[str, str]]:
    """Pairs of a word and the text that it introduces."""
    if found.plan:
        yield from (("seen", f"{subject}: {text}") for subject, text in found.plan.seen.items())
    for change in found.changes:
        if change.action is not Action.SAME:
            yield _DONE[change.action], f"{change.path}   {change.note or change.why}".rstrip()
            yield "diff", "".join(_diff(change))
    yield from ((word, unit) for word, units in found.units.items() for unit in units)
    yield from (("caught up", f"systemctl {words}, left over from an earlier run") for words in found.pending)
    yield from (("problem", text) for text in (found.plan.problems if found.plan else ()))
    yield from (("failed", text) for text in found.failed)
    for number, step in enumerate(found.steps, 1):
        yield "next" if number == 1 else "", f"{number}. {step}"


def _diff(change: Change) -> Iterator[str]:
    if change.action in (Action.SAME, Action.KEEP):
        return
    old, new = ((text or b"").decode(errors="replace").splitlines(keepends=True) for text in (change.old, change.new))
    names = ("/dev/null" if change.old is None else change.path, "/dev/null" if change.new is None else change.path)
    for text in difflib.unified_diff(old, new, *names):
        yield text if text.endswith("\n") else f"{text}\n"


def _as_json(found: Outcome, options: SetupOptions) -> dict[str, Any]:
    plan = found.plan
    return {
        "version": 1,
        "dry_run": options.dry_run,
        "undo": options.undo,
        "seen": dict(plan.seen) if plan else {},
        "settings": {one.key: {"value": one.value, "why": one.why} for one in plan.choices} if plan else {},
        "files": [
            {"path": one.path, "action": one.action.value, "why": one.why, "note": one.note} for one in found.changes
        ],
        "units": {word: list(units) for word, units in found.units.items()},
        "pending": list(found.pending),
        "problems": list(plan.problems) if plan else [],
        "failed": list(found.failed),
        "next": list(found.steps),
    }
