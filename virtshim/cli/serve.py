"""`virtshim serve`."""

from __future__ import annotations

import os
import sys

from virtshim import config
from virtshim.observe.logsetup import set_up_logging
from virtshim.serve import serve


def serve_command(file: str | None) -> None:
    settings = config.load(file)
    set_up_logging(settings.log.level, settings.log.format)
    serve(settings)
    sys.stderr.flush()
    # A StopContainer may still wait out its grace period on a pool thread, which the interpreter would join. The journal
    # is right at any point, so nothing is lost by leaving now.
    os._exit(0)
