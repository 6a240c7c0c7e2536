"""`virtshim serve`."""

from __future__ import annotations

import contextlib
import os
import sys

from tapmanager.heap import share_one_heap
from virtshim.config.settings import load_settings
from virtshim.system.daemon import do_without_extras


def serve_command(file: str | None) -> None:
    share_one_heap()
    do_without_extras()
    from virtshim.app.serve import serve
    from virtshim.system.logsetup import set_up_logging

    settings = load_settings(file)
    set_up_logging(settings.log.level, settings.log.format)
    serve(settings, file)
    with contextlib.suppress(OSError):  # the reader of the log may have gone
        sys.stderr.flush()
    # A StopContainer call may still wait for its grace period on a pool thread, which the interpreter would join. The
    # journal is consistent at any point, so exiting now loses nothing.
    os._exit(0)
