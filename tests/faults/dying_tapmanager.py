"""`tapmanager`, which dies on order (VIRTSHIM_TEST_ORDER)."""

from __future__ import annotations

import os
import sys
from typing import Any

from dying import Stepping, Steps

from tapmanager import __main__ as program
from tapmanager import attachments, tap_handover


def main() -> int:
    steps = Steps(os.environ["VIRTSHIM_TEST_ORDER"])
    module: Any = attachments
    module.netns = Stepping("netns", attachments.netns, steps, ("path_of", "exists"))
    module.pod_links = Stepping("pod_links", attachments.pod_links, steps, ("random_mac",))
    handover: Any = tap_handover
    handover.netns, handover.tap = module.netns, Stepping("tap", tap_handover.tap, steps, ("Wanted",))
    made = attachments.Attachments

    def dressed(ledger: Any, cni: Any, dhcp: Any, *rest: Any) -> Any:
        return made(
            Stepping("ledger", ledger, steps, ("sandboxes", "read")),  # type: ignore[arg-type]
            Stepping("cni", cni, steps, ("load", "trouble", "require_plugins")),  # type: ignore[arg-type]
            Stepping("dhcp", dhcp, steps, ("owners",)),  # type: ignore[arg-type]
            *rest,
        )

    entry: Any = program
    entry.Attachments = dressed
    return program.main(["--config", sys.argv[2]])


if __name__ == "__main__":
    sys.exit(main())
