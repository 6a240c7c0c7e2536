"""Writes the package's files that are made from the program itself: manual pages, shell completions, AppArmor's rules.

`python -m deb.derived ROOT VERSION`, for ./build.sh.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from deb.manpages import pages
from typer._completion_shared import get_completion_script

from virtshim.cli.main import app
from virtshim.config.settings import Settings
from virtshim.preflight.virtualization import rules_of_daemon, rules_of_guests

NAME = "virtshim"
# Where each shell looks for packages' completions.
_COMPLETIONS = {
    "bash": f"usr/share/bash-completion/completions/{NAME}",
    "zsh": f"usr/share/zsh/vendor-completions/_{NAME}",
    "fish": f"usr/share/fish/vendor_completions.d/{NAME}.fish",
}


def files(version: str, changed: int) -> Iterator[tuple[str, str]]:
    """(path below the root, text)."""
    for name, page in pages(app, NAME, version, changed):
        yield f"usr/share/man/man8/{name}", page
    for shell, path in _COMPLETIONS.items():
        yield path, get_completion_script(prog_name=NAME, complete_var="_VIRTSHIM_COMPLETE", shell=shell) + "\n"
    settings = Settings()
    rules = {
        "usr.sbin.libvirtd": rules_of_daemon(settings.libvirt.vmwrapper),
        "abstractions/libvirt-qemu": rules_of_guests(
            settings.libvirt.vmwrapper, settings.tapmanager.socket, f"{settings.paths.run_dir}/shares/*/fs.sock"
        ),
    }
    for name, lines in rules.items():
        yield f"usr/share/virtshim/apparmor/{name}", "".join(f"{line}\n" for line in lines)


def main(root: str, version: str) -> None:
    for path, text in files(version, int(os.environ["SOURCE_DATE_EPOCH"])):
        target = Path(root, path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
