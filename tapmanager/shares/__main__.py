"""The virtshim-shares program: starts and stops the virtiofsd and the passt of each VM, which outlive this process."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tapmanager import heap, log_lines, server, thread_dump, toml_files
from tapmanager.cgroups.tree import VmCgroups, hierarchies
from tapmanager.daemon import Reload, notify_systemd, stop_event, watchdog_seconds
from tapmanager.errors import TapmanagerError
from tapmanager.shares import verbs
from tapmanager.shares.daemons import ShareDaemons
from tapmanager.toml_files import Layers

log = logging.getLogger("tapmanager.shares")

_DRAIN = 20.0
_HEALTH_INTERVAL = 5.0


@dataclass(frozen=True, slots=True)
class ShareSettings:
    """The `[shares]` table. `virtiofsd`, `passt`: "" means the distribution's path."""

    socket: str = "/run/virtshim/shares.sock"
    virtiofsd: str = ""
    passt: str = ""


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0 after SIGTERM or SIGINT, 1 for a fault that the operator must correct."""
    heap.share_one_heap()
    parser = argparse.ArgumentParser(
        "virtshim-shares",
        description="Serves pods' volumes, and the network of pods with containers, to their virtual machines.",
    )
    parser.add_argument("--config", metavar="FILE", help="TOML file with a [shares] table")
    try:
        config = parser.parse_args(argv).config
        chosen = load(config)
        log_lines.set_up("info")
        if os.geteuid() != 0:
            raise TapmanagerError("permission", "virtshim-shares must run as root")  # noqa: TRY301  reported like all other errors
        os.umask(0o022)
        return _run(chosen, partial(load, config))
    except TapmanagerError as exc:
        print(f"virtshim-shares: {exc}", file=sys.stderr)  # noqa: T201  for the person who started it
    except OSError as exc:
        print(f"virtshim-shares: cannot start: {exc}", file=sys.stderr)  # noqa: T201
    return 1


def load(config: str | None) -> ShareSettings:
    """Reads the file and its drop-ins. Raises TapmanagerError with all problems at once."""
    layers = toml_files.read(config, must_be_there=config != toml_files.DEFAULT_FILE) if config else Layers()
    values, problems = toml_files.table_of(layers, "shares", [one.name for one in dataclasses.fields(ShareSettings)])
    for name, value in values.items():
        if not isinstance(value, str) or (name == "socket" and not value.startswith("/")):
            problems.append(
                f"{layers.place(('shares', name))}: shares.{name}: must be an absolute path; it is {value!r}"
            )
    if problems:
        raise toml_files.bad_configuration(problems)
    return ShareSettings(**{name: str(value) for name, value in values.items()})


def _run(chosen: ShareSettings, again: Callable[[], ShareSettings]) -> int:
    stop = stop_event()
    os.makedirs(os.path.dirname(chosen.socket), mode=0o755, exist_ok=True)
    lock = server.lock_file(f"{chosen.socket}.lock")
    thread_dump.write_when_asked(chosen.socket)
    try:
        daemons = ShareDaemons(VmCgroups(hierarchies()), chosen.virtiofsd, passt=chosen.passt)
        listener = server.listen(chosen.socket, 0)
        serving = server.Server(listener, partial(verbs.perform, daemons), None)
        serving.start()
        heap.return_freed_memory()
        Reload(
            chosen, again, ("virtiofsd", "passt"), lambda new: daemons.use_programs(new.virtiofsd, new.passt)
        ).start()
        log.info("shares.ready socket=%s", chosen.socket)
        notify_systemd("READY=1")
        every = watchdog_seconds()
        while not stop.wait(every or _HEALTH_INTERVAL):
            if not serving.is_alive():
                return 1
            notify_systemd("WATCHDOG=1")
        notify_systemd("STOPPING=1")
        serving.stop(_DRAIN)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(chosen.socket)
        return 0
    finally:
        os.close(lock)


if __name__ == "__main__":
    sys.exit(main())
