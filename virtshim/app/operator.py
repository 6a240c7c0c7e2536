"""Composition of what operators look at and do by hand: the admin socket, and what pods' starts are told by."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from virtshim.app.adapters import Adapters
from virtshim.config import Settings
from virtshim.cri.operator.server import OperatorServer
from virtshim.cri.operator.servicer import OperatorServicer, OperatorServices
from virtshim.domain.annotations.parse import VNC_ANNOTATION
from virtshim.domain.container import Container
from virtshim.domain.layout import admin_directory, admin_socket
from virtshim.lifecycle.guest.boot_phases import BootPhases
from virtshim.lifecycle.guest_freeze import GuestFreezer
from virtshim.lifecycle.operator.action_log import ActionLog
from virtshim.lifecycle.operator.vm_actions import VmActions
from virtshim.lifecycle.record_exit import ExitRecorder
from virtshim.ports.records import Records
from virtshim.primitives.start_ups import StartUps
from virtshim.queries.inspection import Inspection
from virtshim.queries.node_status import NodeStatus


@dataclass(frozen=True, slots=True)
class Starts:
    """How pods come up, told by those who start them and by their guests."""

    ups: StartUps
    boots: BootPhases


def starts(a: Adapters) -> Starts:
    ups = StartUps(a.clock)
    boots = BootPhases(a.records, a.boot_output, ups)
    a.consoles.on_news(boots.console_changed)
    a.control.on_agent(boots.agent_answers)
    a.records.containers.on_change(boots.record_changed)
    return Starts(ups, boots)


def operator_servicer(
    a: Adapters, node: NodeStatus, freezer: GuestFreezer, exits: ExitRecorder, start_ups: StartUps
) -> OperatorServicer:
    action_log = ActionLog(a.records, a.clock)
    return OperatorServicer(
        OperatorServices(
            records=a.records,
            clock=a.clock,
            actions=VmActions(
                a.records,
                a.hypervisor,
                a.pausing,
                a.control,
                a.guest_operations,
                freezer,
                exits.locks,
                action_log,
                exits,
            ),
            action_log=action_log,
            control=a.control,
            screenshots=a.screenshots,
            has_screen=partial(_has_screen, a.records),
            streaming=a.streaming,
            files=a.files,
            inspection=Inspection(a.records, a.hypervisor, node, start_ups),
            start_ups=start_ups,
        )
    )


def operator_server(settings: Settings, servicer: OperatorServicer) -> OperatorServer:
    layout = settings.layout()
    return OperatorServer(admin_socket(layout), admin_directory(layout), servicer)


def _has_screen(records: Records, container: Container) -> bool:
    """A VM has a video card if its pod asked for one when it was made."""
    sandbox = records.sandboxes.get(container.sandbox_id)
    return sandbox is not None and sandbox.config.annotations.get(VNC_ANNOTATION) == "true"
