"""The base of adapters that use single domains of this node."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator

import libvirt

from virtshim.model.ids import ContainerId
from virtshim.vm import ownership
from virtshim.vm.connection import Connection
from virtshim.vm.domain_xml import NodeProfile


class OwnDomains:
    def __init__(self, connection: Connection, profile: NodeProfile) -> None:
        self._connection = connection
        self._profile = profile

    @contextlib.contextmanager
    def _using(
        self, domain: uuid.UUID, doing: str, container: ContainerId | None = None
    ) -> Iterator[libvirt.virDomain]:
        """Yields the domain for a few calls. Errors: those of `Connection.using` and `ownership.find`."""
        with self._connection.using(f"{doing} VM {domain}") as conn:
            yield ownership.find(conn, domain, self._profile.node, container)
