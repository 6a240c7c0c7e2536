"""Runs with one version of cloud-init on its path, and gives each network-config, and each config drive's network, to
each renderer of that version.

render.py DOCUMENTS OUT     OUT/<document>/<renderer>/ is a root directory then; errors are told as JSON"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cloudinit import util
from cloudinit.distros import rhel
from cloudinit.net import network_state
from cloudinit.sources.helpers import openstack

# The distribution's choice of renderer; otherwise the first two would check the machine that they run on.
_SETTINGS: dict[str, dict[str, Any]] = {
    "eni": {"netrules_path": None},
    "netplan": {"netplan_path": "etc/netplan/50-cloud-init.yaml"},
    "sysconfig": {**rhel.Distro.renderer_configs["sysconfig"], "flavor": "rhel"},
    "networkd": {"resolve_conf_fn": "/etc/systemd/resolved.conf", "network_conf_dir": "/etc/systemd/network/"},
    "network_manager": {},
}


def main(documents: Path, out: Path) -> None:
    util.chownbyname = lambda *_: None  # networkd's user may not be here
    told = {
        path.stem: {name: _render(renderer, path, out / path.stem / name) for name, renderer in _renderers()}
        for path in sorted(documents.iterdir())
    }
    json.dump(told, sys.stdout)


def _renderers() -> list[tuple[str, Callable[[], Any]]]:
    found = []
    for name, settings in _SETTINGS.items():
        try:
            module = importlib.import_module(f"cloudinit.net.{name}")
        except ModuleNotFoundError:
            continue
        found.append((name, lambda make=module.Renderer, settings=settings: make(settings)))
    return found


def _render(renderer: Callable[[], Any], document: Path, root: Path) -> str:
    root.mkdir(parents=True)
    try:
        config = json.loads(document.read_text())
        if "links" in config:
            config = openstack.convert_net_json(config, known_macs={})
        state = network_state.parse_net_config_data(config)
        renderer().render_network_state(state, target=str(root))
    except Exception as exc:  # noqa: BLE001  a test tells it
        return repr(exc)
    return ""


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
