"""Controls a running VM: serial ports, unplugging, reset, definitions, and news of guest agents. Implements
`virtshim.vm.ports.VmPlugging`, `virtshim.vm.ports.VmUnplugging` and `virtshim.vm.ports.VmControl`.

To unplug a device, libvirt asks QEMU and QEMU asks the guest, whose driver releases it when it is done, or never. An
event only says that something has changed; what a VM still has is read from its live definition.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final

import libvirt
import structlog

from virtshim.model.errors import DeadlineExceeded, NotFound, WrongState
from virtshim.model.ids import ContainerId
from virtshim.model.vm import Power
from virtshim.system.threads import Workers
from virtshim.vm.bounded import BoundedCalls
from virtshim.vm.connection import Connection
from virtshim.vm.domain_xml import SECRETS, NodeProfile
from virtshim.vm.elements.hostdev import ON_PCI
from virtshim.vm.elements.small_devices import AGENT_ALIAS, exec_port_element
from virtshim.vm.errors import message_of
from virtshim.vm.own_domains import OwnDomains
from virtshim.vm.power import power_of
from virtshim.vm.xml_text import parsed, text_of

# Reset, definitions and news of guest agents.

log = structlog.get_logger(__name__)

# Seconds for a QEMU whose monitor works.
_LIMIT: Final = 10.0


class LibvirtControl(OwnDomains):
    def __init__(self, connection: Connection, profile: NodeProfile) -> None:
        super().__init__(connection, profile)
        self._resetting = BoundedCalls("reset")
        self._callbacks: tuple[Callable[[uuid.UUID], None], ...] = ()
        self._worker = Workers(1, "agent-news")

    def close(self) -> None:
        """Stops the thread for news. A second call does nothing."""
        self._worker.shutdown(cancel_futures=True)

    def reset(self, domain: uuid.UUID) -> None:
        def press() -> None:
            with self._using(domain, "reset") as found:
                if not found.isActive():
                    raise WrongState(f"VM {domain} is off")
                found.reset()

        self._resetting.call(domain, press, _LIMIT)

    def definition(self, domain: uuid.UUID) -> str:
        with self._using(domain, "read the definition of") as found:
            return without_secrets(found.XMLDesc())

    def on_agent(self, callback: Callable[[uuid.UUID], None]) -> None:
        self._callbacks = (*self._callbacks, callback)

    def look_for_agent(self, domain: uuid.UUID) -> None:
        """libvirt's own event for agents only covers ports with the name that the guest sees, which virtshim's ports do not
        have in the definition (elements/small_devices.py)."""
        with self._using(domain, "look for the guest agent of") as found:
            definition = found.XMLDesc()
        if agent_port_state(definition) == "connected":
            self.agent_answers(domain)

    def agent_answers(self, domain: uuid.UUID) -> None:
        """Hands over."""
        with contextlib.suppress(RuntimeError):  # closed
            self._worker.submit(self._tell, domain)

    def _tell(self, domain: uuid.UUID) -> None:
        for callback in self._callbacks:
            try:
                callback(domain)
            except Exception:  # any error: the thread must continue
                log.exception("vm.agent_event.crashed", domain=str(domain))


def without_secrets(xml: str) -> str:
    """The definition without the values that open the pod's network. Pure."""
    definition = parsed(xml)
    for variable in definition.iterfind("{*}commandline/{*}env"):
        if variable.get("name") in SECRETS:
            variable.set("value", "REMOVED")
    return text_of(definition) + "\n"


class LibvirtPorts(OwnDomains):
    """Thread-safe."""

    def plug_in(self, domain: uuid.UUID, container: ContainerId, number: int, socket: str) -> None:
        """Does not change the stored definition: a restarted VM has the ports that it was made with."""
        device = text_of(exec_port_element(number, socket))
        with self._using(domain, "plug a serial port into", container) as found:
            found.attachDeviceFlags(device, libvirt.VIR_DOMAIN_AFFECT_LIVE)

    def agent_listens(self, domain: uuid.UUID, container: ContainerId) -> bool:
        with self._using(domain, "read the agent's port of", container) as found:
            definition = found.XMLDesc()
        return agent_port_state(definition) != "disconnected"


def agent_port_state(definition: str) -> str:
    """`connected` if a program in the guest has the agent's port open, otherwise `disconnected`; "" if libvirt does not say,
    as of a VM that is off. libvirt tracks the state of every port, whether or not it takes it for an agent's. Pure."""
    ports = parsed(definition).iterfind("devices/channel")
    agent = next((one for one in ports if one.find(f"alias[@name='{AGENT_ALIAS}']") is not None), None)
    target = None if agent is None else agent.find("target")
    return "" if target is None else target.get("state", "")


@dataclass(frozen=True, slots=True)
class _Plugged:
    """Aliases of a VM's host devices. `answers`: whether its guest runs."""

    aliases: tuple[str, ...] = ()
    answers: bool = False


class LibvirtUnplugging(OwnDomains):
    """`watching`: the hypervisor's, which also receives device events. Thread-safe."""

    def __init__(
        self,
        connection: Connection,
        profile: NodeProfile,
        watching: Callable[[uuid.UUID], AbstractContextManager[threading.Event]],
    ) -> None:
        super().__init__(connection, profile)
        self._asking = BoundedCalls("unplug devices from")
        self._watching = watching

    def unplug(self, domain: uuid.UUID, container: ContainerId, timeout: float) -> Sequence[str]:
        until = time.monotonic() + timeout
        with self._watching(domain) as changed:
            there = self._plugged(domain, container)
            if not there.aliases or not there.answers:
                return there.aliases
            try:
                self._asking.call(domain, lambda: self._ask(domain, container, there.aliases), timeout)
            except DeadlineExceeded:  # QEMU hangs, and its devices become free with it
                return there.aliases
            while True:
                changed.clear()  # before the read, so that no later change is missed
                there, left = self._plugged(domain, container), until - time.monotonic()
                if not there.aliases or not there.answers or left <= 0:
                    return there.aliases
                changed.wait(left)

    def _ask(self, domain: uuid.UUID, container: ContainerId, aliases: Sequence[str]) -> None:
        """Asks for all devices before it waits for any, because each guest driver takes its own time."""
        with self._using(domain, "unplug devices from", container) as found:
            for alias in aliases:
                try:
                    found.detachDeviceAlias(alias, libvirt.VIR_DOMAIN_AFFECT_LIVE)
                except libvirt.libvirtError as exc:
                    # The device was asked for already, or is gone. One that fails must not keep the others.
                    log.info("vm.unplug.refused", domain=str(domain), device=alias, error=message_of(exc))

    def _plugged(self, domain: uuid.UUID, container: ContainerId) -> _Plugged:
        """No aliases for a VM that is off or gone."""
        with contextlib.suppress(NotFound), self._using(domain, "read the devices of", container) as found:
            power = power_of(found)
            if power.is_on:
                names = [alias.get("name", "") for alias in parsed(found.XMLDesc()).iterfind("devices/*/alias")]
                aliases = tuple(name for name in names if name.startswith(ON_PCI))
                return _Plugged(aliases, power.power is Power.RUNNING)
        return _Plugged()
