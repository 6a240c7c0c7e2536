"""`virtshim config check`."""

from __future__ import annotations

from virtshim import config
from virtshim.cli.proxy import routes
from virtshim.settings.faults import keys_of


def check_command(file: str | None) -> None:
    """Raises BadConfiguration with all that is wrong, InvalidRequest for tables that do not fit together."""
    loaded = config.read(file)
    routes(loaded.settings)
    places = [place for key in keys_of(config.Settings) if (place := loaded.place(key))]
    files = ", ".join(loaded.layers.files) or f"no file ({loaded.file} is not there)"
    print(f"all is well: {len(places)} settings of {files}; `virtshim config show` lists them")
