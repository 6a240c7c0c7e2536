"""Runs with one version of cloud-init on its path, reads each seed as the guest's data source does, and carries it out.

seeds.py SEEDS OUT     SEEDS/<name>/ has a seed's files; OUT/<name>/ is the guest's root directory for write_files; told as JSON
"""

from __future__ import annotations

import inspect
import json
import logging
import sys
import types
from pathlib import Path
from typing import Any

# cloud-init imports it for a kind of user-data that no seed here has.
sys.modules.setdefault("jsonpatch", types.ModuleType("jsonpatch"))

from cloudinit import cloud, distros, helpers, user_data, util  # noqa: E402
from cloudinit.config import cc_set_hostname, cc_write_files  # noqa: E402
from cloudinit.sources import DataSourceConfigDrive, DataSourceNoCloud  # noqa: E402


def main(seeds: Path, out: Path) -> None:
    util.chownbyname = lambda *_: None
    json.dump({seed.name: _read(seed, out / seed.name) for seed in sorted(seeds.iterdir())}, sys.stdout)


def _read(seed: Path, root: Path) -> dict[str, Any]:
    root.mkdir()
    paths = helpers.Paths({"cloud_dir": str(root / "cloud"), "run_dir": str(root / "run")})
    config: dict[str, Any] = {"datasource": {"NoCloud": {"fs_label": None}}}
    if (seed / "openstack").is_dir():
        source = DataSourceConfigDrive.DataSourceConfigDrive(config, None, paths)
        source.seed_dir = str(seed)
    else:
        source = DataSourceNoCloud.DataSourceNoCloud(config, None, paths)
        source.seed_dirs = [str(seed)]
    found = source._get_data()
    raw = source.get_userdata_raw()
    parts = [part.get_content_type() for part in user_data.UserDataProcessor(paths).process(raw).walk()]
    told = {
        "found": found,
        "id": source.get_instance_id(),
        "hostname": str(getattr(source.get_hostname(), "hostname", source.get_hostname())),
        "keys": source.get_public_ssh_keys(),
        "type": parts[-1],
        "has_network": bool(source.network_config),
        "called": _called(source, paths),
    }
    if parts[-1] == "text/cloud-config":
        document = util.load_yaml(raw)
        files = [{**file, "path": f"{root}{file['path']}"} for file in document.get("write_files", ())]
        wanted = inspect.signature(cc_write_files.write_files).parameters
        cc_write_files.write_files("seed", files, *(["root:root"] if "owner" in wanted else []))
        told["boot"] = util.shellify(document["bootcmd"]) if "bootcmd" in document else ""
        told["mounts"] = document.get("mounts", [])
    return told


def _called(source: Any, paths: helpers.Paths) -> str:
    """The guest's name after its first boot: it is set before user-data is read, and again after."""
    names: list[str] = []
    distro = distros.fetch("debian")("debian", {}, paths)
    distro._write_hostname = lambda name, _path: names.append(name)
    distro._apply_hostname = lambda _name: None
    guest = cloud.Cloud(source, paths, {}, distro, None)
    Path(paths.get_cpath("data")).mkdir(parents=True)
    log = [logging.getLogger()] if "log" in inspect.signature(cc_set_hostname.handle).parameters else []
    told = {**_configuration(source.get_vendordata_raw()), **_configuration(source.get_userdata_raw())}
    for config in ({}, told):
        cc_set_hostname.handle("set_hostname", config, guest, *log, [])
    return names[-1]


def _configuration(raw: Any) -> dict[str, Any]:
    text = raw.decode() if isinstance(raw, bytes) else raw or ""
    found: dict[str, Any] = util.load_yaml(text) if text.startswith("#cloud-config") else {}
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
