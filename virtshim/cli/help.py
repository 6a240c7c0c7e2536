"""How the commands show their help: in groups, arguments in capitals, flags without a type, paragraphs filled."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from typer.core import TyperGroup

GROUPS: Final[Mapping[str, Sequence[str]]] = {
    "Virtual machines": ("run", "start", "stop", "restart", "rm", "ps", "top", "logs", "events", "inspect"),
    "Into a guest": ("exec", "console", "ssh", "cp", "port-forward", "vnc", "screenshot"),
    "Acting on a VM": ("pause", "resume", "reboot", "reset", "freeze", "thaw", "save", "renew", "vms", "dumpxml"),
    "Images": ("images", "pull", "load", "rmi", "image"),
    "This node": ("setup", "check", "config", "diag", "dashboard", "version", "up", "down"),
    "Services": ("serve", "proxy", "device-plugin", "controller", "agent"),
}


class Group(TyperGroup):
    """A command with commands of its own."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _plain(super().get_params(ctx))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            _plain(command.get_params(ctx))
            # Typer would keep the line breaks of all paragraphs but the first.
            command.help = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.cleandoc(command.help or ""))
        return command


class Program(Group):
    """All commands, in GROUPS."""

    def list_commands(self, ctx: Any) -> list[str]:
        grouped = [name for names in GROUPS.values() for name in names]
        return sorted(
            super().list_commands(ctx), key=lambda name: grouped.index(name) if name in grouped else len(grouped)
        )

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            command.rich_help_panel = next((title for title, names in GROUPS.items() if cmd_name in names), None)
        return command


def _plain(params: list[Any]) -> list[Any]:
    for param in params:
        if param.param_type_name == "argument":
            param.metavar = param.metavar or param.name.upper()
        elif param.is_flag:
            param.metavar = ""
    return params
