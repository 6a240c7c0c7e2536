"""`virtshim check --devices`: which PCI devices of this node a VM could have, and what stands in the way of the others."""

from __future__ import annotations

import dataclasses
import json

from virtshim import config as settings_table
from virtshim.cli.check import print_lines
from virtshim.cli.ps import columns
from virtshim.devices.host_files import HostFiles
from virtshim.domain.devices.condition import DeviceCondition
from virtshim.domain.errors import ShimError
from virtshim.ports.devices import DeviceDrivers
from virtshim.preflight import device_facts, devices
from virtshim.preflight.finding import Finding, Level, warning
from virtshim.store.read_only import read_claims, read_conditions
from virtshim.tapclient.drivers import DeviceDriverClient
from virtshim.tapclient.networks import PodNetworkClient


def check_devices(
    config: str | None, *, as_json: bool = False, files: HostFiles | None = None, drivers: DeviceDrivers | None = None
) -> int:
    """Prints table and findings; 1 if no VM could have any device. Raises InvalidRequest for settings that cannot be read."""
    settings = settings_table.load(config)
    files = files or HostFiles()
    claims, conditions, trouble = _state(settings.layout().database)
    drivers = drivers or DeviceDriverClient(PodNetworkClient(settings.tapmanager.socket))
    candidates = device_facts.candidates(settings, files, claims, conditions, drivers)
    found = devices.findings(candidates, device_facts.surroundings(settings, files, claims)) + trouble
    rows = devices.rows(candidates)
    if as_json:
        table = [dict(zip(devices.HEAD, row, strict=True)) for row in rows]
        told = [{**dataclasses.asdict(finding), "level": finding.level.value} for finding in found]
        print(json.dumps({"devices": table, "findings": told}, indent=2))
    else:
        print("\n".join(columns([devices.HEAD, *rows])), end="\n\n")
        print_lines(found)
    return int(any(finding.level is Level.ERROR for finding in found))


def _state(database: str) -> tuple[dict[str, str], dict[str, DeviceCondition], list[Finding]]:
    """By claim: the id of the container that holds it; what resets have shown. The table is right without, too."""
    try:
        return read_claims(database), read_conditions(database), []
    except ShimError as exc:
        text, _, remedy = str(exc).partition("; ")
        return {}, {}, [warning("claims", text, remedy)]
