"""`virtshim check` says whether this machine can run VMs: one line per finding, with its remedy below.

`virtshim check --devices` says which PCI devices of this node a VM can use, and why it cannot use the others.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator
from typing import Final

from rich.console import Console
from rich.text import Text

from virtshim.cli.tables import columns
from virtshim.config.faults import BadConfiguration
from virtshim.config.settings import load_settings
from virtshim.devices.driver_client import DeviceDriverClient
from virtshim.devices.host_files import HostFiles
from virtshim.devices.ports import DeviceDrivers
from virtshim.devices.values import DeviceCondition
from virtshim.model.errors import ShimError
from virtshim.pods.tapmanager_connection import TapmanagerConnection
from virtshim.preflight import device_facts, devices
from virtshim.preflight.checks import ALL, findings
from virtshim.preflight.finding import Finding, Level, error, warning
from virtshim.preflight.node_checks import of_cluster
from virtshim.store.read_only import read_claims, read_conditions
from virtshim.system.logsetup import set_up_logging

_STYLES: Final = {Level.OK: "green", Level.WARNING: "yellow", Level.ERROR: "bold red"}


def check(config: str | None, *, as_json: bool = False, kubeconfig: str = "") -> int:
    """Prints the findings. Returns 1 if a VM could not start, else 0. Faults of the machine or of the settings file become
    findings, not errors. `kubeconfig`: credentials for the cluster; "" leaves the cluster out."""
    set_up_logging("warning", "text")  # goes to standard error, because standard output carries the findings
    found = (_print_json if as_json else _print_lines)(_findings(config, kubeconfig))
    return int(any(finding.level is Level.ERROR for finding in found))


def _findings(config: str | None, kubeconfig: str) -> Iterator[Finding]:
    try:
        settings = load_settings(config)
    except BadConfiguration as exc:
        for fault in exc.faults:
            yield _of_configuration(fault)
        return
    except ShimError as exc:
        yield _of_configuration(str(exc))
        return
    yield from findings((*ALL, of_cluster(kubeconfig)) if kubeconfig else ALL, settings)


def _of_configuration(fault: str) -> Finding:
    return dataclasses.replace(
        error("configuration", fault, "correct the configuration; all other checks depend on it"), check="configuration"
    )


def _print_lines(found: Iterable[Finding]) -> list[Finding]:
    """Prints each finding as soon as it is known."""
    console = Console(highlight=False, soft_wrap=True)
    printed: list[Finding] = []
    for finding in found:
        printed.append(finding)
        level = Text(f"{finding.level.value:<8}", style=_STYLES[finding.level])
        console.print(Text.assemble(level, f"{finding.subject:<16} {finding.text}"))
        if finding.remedy:
            console.print(Text(f"{'':<8}{'':<16} -> {finding.remedy}"))
    return printed


def _print_json(found: Iterable[Finding]) -> list[Finding]:
    printed = list(found)
    print(json.dumps([_as_json(finding) for finding in printed], indent=2))
    return printed


def _as_json(finding: Finding) -> dict[str, str]:
    return {**dataclasses.asdict(finding), "level": finding.level.value}


def check_devices(
    config: str | None, *, as_json: bool = False, files: HostFiles | None = None, drivers: DeviceDrivers | None = None
) -> int:
    """Prints the table and the findings. Returns 1 if VMs cannot use any device. Raises InvalidRequest for settings that
    cannot be read."""
    settings = load_settings(config)
    files = files or HostFiles()
    claims, conditions, trouble = _state(settings.layout().database)
    drivers = drivers or DeviceDriverClient(TapmanagerConnection(settings.tapmanager.socket))
    candidates = device_facts.candidates(settings, files, claims, conditions, drivers)
    found = devices.findings(candidates, device_facts.surroundings(settings, files, claims)) + trouble
    found = [dataclasses.replace(one, check="devices") for one in found]
    rows = devices.rows(candidates)
    if as_json:
        table = [dict(zip(devices.HEAD, row, strict=True)) for row in rows]
        print(json.dumps({"devices": table, "findings": [_as_json(finding) for finding in found]}, indent=2))
    else:
        print("\n".join(columns([devices.HEAD, *rows])), end="\n\n")
        _print_lines(found)
    return int(any(finding.level is Level.ERROR for finding in found))


def _state(database: str) -> tuple[dict[str, str], dict[str, DeviceCondition], list[Finding]]:
    """Returns, by claim, the id of the container that holds it and what resets have shown, and findings for what could not
    be read. The table is correct without this data too."""
    try:
        return read_claims(database), read_conditions(database), []
    except ShimError as exc:
        text, _, remedy = str(exc).partition("; ")
        return {}, {}, [warning("claims", text, remedy)]
