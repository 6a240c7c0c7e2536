"""`virtshim config`: what is set, where, whether it is right, and what there is to set."""

from __future__ import annotations

from typing import Annotated

import typer

config_app = typer.Typer(help="Show and check the settings.", no_args_is_help=True)

_ConfigFile = Annotated[str | None, typer.Option("--config", help="TOML file; default /etc/virtshim/config.toml")]


@config_app.command()
def show(
    config: _ConfigFile = None,
    json: Annotated[bool, typer.Option("--json", help="print JSON, for programs")] = False,
    changed: Annotated[bool, typer.Option("--changed", help="only what is not the default")] = False,
) -> None:
    """The settings in force, as TOML, and where each comes from. Secrets, and what annotations of profiles say, are hidden."""
    from virtshim.cli.configuration.show import show_command

    show_command(config, as_json=json, changed=changed)


@config_app.command()
def check(config: _ConfigFile = None) -> None:
    """Whether the settings are right; all that is wrong, with file and line, and exit code 78 if something is."""
    from virtshim.cli.configuration.check import check_command

    check_command(config)


@config_app.command()
def schema() -> None:
    """All settings with their defaults and meaning, as JSON Schema."""
    import json

    from virtshim.config import Settings

    print(json.dumps(Settings.model_json_schema(), indent=2))


@config_app.command()
def reference() -> None:
    """All settings with default, limits, unit, meaning and reason, as Markdown."""
    from virtshim.config import Settings
    from virtshim.settings.reference import page

    print(page(Settings), end="")
