"""`virtshim serve`."""

from __future__ import annotations

import contextlib
import os
import sys

from virtshim.config.settings import config_load
from virtshim.system.daemon import share_one_heap


def serve_command(file: str | None) -> None:
    share_one_heap()
    # structlog takes rich, where it is installed, for tracebacks in colour, which the daemon's log never shows: 6 MiB.
    sys.modules.setdefault("rich", None)  # type: ignore[arg-type]
    from virtshim.app.serve import serve
    from virtshim.system.logsetup import set_up_logging

    settings = config_load(file)
    set_up_logging(settings.log.level, settings.log.format)
    serve(settings, file)
    with contextlib.suppress(OSError):  # who read it may be gone
        sys.stderr.flush()
    # A StopContainer may still wait out its grace period on a pool thread, which the interpreter would join. The journal
    # is right at any point, so nothing is lost by leaving now.
    os._exit(0)
