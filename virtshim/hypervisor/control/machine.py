"""The reset button, definitions to look at, and news of guests' agents: implements `virtshim.ports.control.VmControl`."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator
from typing import Final

import libvirt
import structlog
from lxml import etree

from virtshim.domain.errors import WrongState
from virtshim.hypervisor import ownership
from virtshim.hypervisor.bounded import BoundedCalls
from virtshim.hypervisor.connection import Connection
from virtshim.hypervisor.domain_xml import SECRETS, NodeProfile
from virtshim.primitives.threads import Workers

log = structlog.get_logger(__name__)

# Seconds for a QEMU that answers its monitor at all.
_LIMIT: Final = 10.0


class LibvirtControl:
    def __init__(self, connection: Connection, profile: NodeProfile) -> None:
        self._connection = connection
        self._profile = profile
        self._resetting = BoundedCalls("reset")
        self._callbacks: tuple[Callable[[uuid.UUID], None], ...] = ()
        self._worker = Workers(1, "agent-news")

    def close(self) -> None:
        """A second call does nothing."""
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

    @contextlib.contextmanager
    def _using(self, domain: uuid.UUID, doing: str) -> Iterator[libvirt.virDomain]:
        with self._connection.using(f"{doing} VM {domain}") as conn:
            yield ownership.find(conn, domain, self._profile.node)

    def agent_answers(self, domain: uuid.UUID) -> None:
        """Hands over. libvirt has an event for that, but hears of ports alone that are named to it as the guest sees them, and
        ours are not (devices/serial.py)."""
        with contextlib.suppress(RuntimeError):  # closed
            self._worker.submit(self._tell, domain)

    def _tell(self, domain: uuid.UUID) -> None:
        for callback in self._callbacks:
            try:
                callback(domain)
            except Exception:  # the edge of a thread
                log.exception("vm.agent_event.crashed", domain=str(domain))


def without_secrets(xml: str) -> str:
    """Without the values of what opens the pod's network. Pure."""
    definition = etree.fromstring(xml.encode(), etree.XMLParser(resolve_entities=False, no_network=True))
    for variable in definition.iterfind("{*}commandline/{*}env"):
        if variable.get("name") in SECRETS:
            variable.set("value", "REMOVED")
    return etree.tostring(definition, encoding="unicode") + "\n"
