"""tapmanager and the plugins that it starts have only the capabilities that they need, as the kernel shows."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tap_node import TapNode, sandbox

from tapmanager.daemon import OWN_CAPABILITIES, PLUGIN_CAPABILITIES, capability_mask

pytestmark = pytest.mark.network

# CAP_NET_ADMIN and CAP_SYS_ADMIN of linux/capability.h.
NETWORKS = 1 << 12 | 1 << 21

PROJECT = Path(__file__).resolve().parents[3]


def sets_of(status: str) -> dict[str, int]:
    """The capability sets by the kernel's names: CapPrm, CapEff, CapBnd."""
    return {name: int(value, 16) for name, value in re.findall(r"^(Cap\w+):\s+([0-9a-f]+)$", status, re.MULTILINE)}


def test_tapmanager_and_plugins_have_only_the_capabilities_that_they_need(tap_node: TapNode) -> None:
    seen = tap_node.folder / "seen"
    tap_node.plugin("seen", f"test $CNI_COMMAND = DEL || {{ cat /proc/self/status > {seen}; echo '{{}}'; }}\n")
    tap_node.configure({"type": "seen"}, tap_node.bridge_plugin())
    which = sandbox()
    tap_node.attach(which)
    tap_node.release(which)
    assert tap_node.process is not None
    all_threads = []
    for thread in Path(f"/proc/{tap_node.process.pid}/task").iterdir():
        with contextlib.suppress(OSError):  # a connection's, which has ended
            all_threads.append(sets_of((thread / "status").read_text()))
    assert len(all_threads) > 1
    for own in all_threads:
        assert own["CapEff"] & ~capability_mask(OWN_CAPABILITIES) == 0
        assert own["CapPrm"] & ~capability_mask(PLUGIN_CAPABILITIES) == 0
        assert own["CapEff"] & NETWORKS == NETWORKS
        assert own["CapBnd"] & ~capability_mask(PLUGIN_CAPABILITIES) == 0
    plugins = sets_of(seen.read_text())
    assert plugins["CapEff"] == all_threads[0]["CapBnd"]


def test_plugins_have_their_capabilities_under_the_unit_with_no_new_privileges() -> None:
    script = (
        "import os; from tapmanager import daemon; daemon.give_up_capabilities(); "
        "os.execv('/bin/cat', ['cat', '/proc/self/status'])"
    )
    done = subprocess.run(
        ["setpriv", "--no-new-privs", sys.executable, "-c", script],
        capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": str(PROJECT)},
    )  # fmt: skip
    found = sets_of(done.stdout)
    assert found["CapEff"] == found["CapPrm"] == found["CapBnd"]


def test_the_unit_has_the_same_capabilities() -> None:
    unit = (PROJECT / "systemd" / "tapmanager.service").read_text()
    (listed,) = re.findall(r"^CapabilityBoundingSet=(.*)$", unit, re.MULTILINE)
    assert {name.removeprefix("CAP_") for name in listed.split()} == PLUGIN_CAPABILITIES
