"""The inventory lists VMs of other nodes and unreadable VMs, on libvirt's test driver."""

import contextlib
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import libvirt
import pytest

from virtshim.model.errors import ResourceExhausted, Unavailable
from virtshim.model.ids import ContainerId, SandboxId
from virtshim.vm.connection import Connection
from virtshim.vm.domain_xml import NodeProfile
from virtshim.vm.elements.processors import Cgroups, DomainType
from virtshim.vm.inventory import LibvirtInventory

DOMAIN = """<domain type='test'><name>{name}</name><metadata>{metadata}</metadata>
<memory>65536</memory><os><type>hvm</type></os><devices><serial type='pty'>{log}</serial></devices></domain>"""
OWNER = "<v:owner xmlns:v='https://virtshim.io/domain/1' node='{node}' container='{c}' sandbox='{s}'/>"
C, S = "c" * 64, "5" * 64
PROFILE = NodeProfile("this", DomainType.TEST, "/q", "/q", Cgroups.OFF)


@pytest.fixture
def connection() -> Iterator[Connection]:
    connection = Connection("test:///default")
    connection.start()
    assert connection.wait_open(10)
    yield connection
    connection.close()


@pytest.fixture
def beside() -> Iterator[libvirt.virConnect]:
    conn = libvirt.open("test:///default")
    before = {domain.UUIDString() for domain in conn.listAllDomains()}
    yield conn
    for domain in conn.listAllDomains():
        if domain.UUIDString() not in before:
            domain.undefine()
    conn.close()


@pytest.fixture
def inventory(connection: Connection) -> LibvirtInventory:
    return LibvirtInventory(connection, PROFILE)


def add(beside: libvirt.virConnect, name: str, metadata: str, log: str = "") -> uuid.UUID:
    return uuid.UUID(beside.defineXML(DOMAIN.format(name=name, metadata=metadata, log=log)).UUIDString())


def test_another_nodes_vms_are_listed_with_the_objects_that_they_name(
    inventory: LibvirtInventory, beside: libvirt.virConnect
) -> None:
    add(beside, "other", OWNER.format(node="other", c=C, s=S))
    found = inventory.take()
    assert found.owned == []
    assert found.other_nodes == {ContainerId(C): "other"}
    assert found.other_sandboxes == frozenset({SandboxId(S)})


@pytest.mark.parametrize("damaged", [OWNER.format(node="this", c="short", s=S), OWNER.format(node="this", c=C, s="")])
def test_a_damaged_mark_is_reported_and_hides_no_other_vm(
    inventory: LibvirtInventory, beside: libvirt.virConnect, damaged: str
) -> None:
    add(beside, "damaged", damaged)
    ours = add(beside, "ours", OWNER.format(node="this", c=C, s=S))
    found = inventory.take()
    assert [domain.uuid for domain in found.owned] == [ours]
    assert list(found.unreadable) == ["damaged"]


def test_a_vm_with_unreadable_metadata_is_reported_and_hides_no_other_vm(
    connection: Connection, beside: libvirt.virConnect
) -> None:
    """libvirt's test driver never refuses it: of one VM this connection's answer is an error instead."""
    ours = add(beside, "ours", OWNER.format(node="this", c=C, s=S))
    bad = add(beside, "bad", OWNER.format(node="this", c="d" * 64, s=S))

    refusal = libvirt.libvirtError("XML error")
    # Its constructor takes the thread's last error, which may be another test's.
    refusal.err = (libvirt.VIR_ERR_XML_ERROR, libvirt.VIR_FROM_TEST, "XML error", 0, "", "", "", 0, 0)

    def refuse(*_: object) -> str:
        raise refusal

    class Refusing:
        def __init__(self, conn: libvirt.virConnect) -> None:
            self.isAlive = conn.isAlive
            self.found = conn.getAllDomainStats(libvirt.VIR_DOMAIN_STATS_STATE, 0)
            for domain, _stats in self.found:
                if domain.UUIDString() == str(bad):
                    domain.metadata = refuse

        def getAllDomainStats(self, *_: int) -> list[tuple[libvirt.virDomain, dict[str, int]]]:  # noqa: N802  libvirt's
            return self.found

    class Connected:
        @contextlib.contextmanager
        def using(self, what: str) -> Iterator[Refusing]:
            with connection.using(what) as conn:
                yield Refusing(conn)

    refusing: Any = Connected()
    found = LibvirtInventory(refusing, PROFILE).take()
    assert [domain.uuid for domain in found.owned] == [ours]
    assert list(found.unreadable) == ["bad"]


def test_a_vm_counts_as_having_run_if_its_console_log_exists(
    inventory: LibvirtInventory, beside: libvirt.virConnect, tmp_path: Path
) -> None:
    log = tmp_path / "console.log"
    domain = add(beside, "ours", OWNER.format(node="this", c=C, s=S), f"<log file='{log}'/>")
    assert not inventory.domain_metadata(domain).has_run
    log.touch()
    assert inventory.domain_metadata(domain).has_run


RECORD = """<r:record xmlns:r='https://virtshim.io/record/1'>[{"annotations":"password"}]</r:record>"""


@pytest.mark.hostile
def test_records_that_an_earlier_version_left_in_definitions_are_moved_out(
    inventory: LibvirtInventory, beside: libvirt.virConnect
) -> None:
    ours = add(beside, "ours", OWNER.format(node="this", c=C, s=S) + RECORD)
    add(beside, "other", OWNER.format(node="other", c="d" * 64, s=S) + RECORD)
    kept: dict[str, str] = {}
    inventory.take_records_out(lambda container, text: kept.update({container.value: text}))
    assert kept == {C: '[{"annotations":"password"}]'}
    xml = beside.lookupByUUID(ours.bytes).XMLDesc()
    assert "password" not in xml
    assert C in xml, "the mark stays"
    kept.clear()
    inventory.take_records_out(lambda container, text: kept.update({container.value: text}))
    assert kept == {}


def test_a_record_that_cannot_be_kept_stays_where_it_is_and_the_others_are_moved(
    inventory: LibvirtInventory, beside: libvirt.virConnect
) -> None:
    bad = add(beside, "bad", OWNER.format(node="this", c="d" * 64, s=S) + RECORD)
    good = add(beside, "good", OWNER.format(node="this", c=C, s=S) + RECORD)

    def keep(container: ContainerId, text: str) -> None:
        if container.value != C:
            raise ResourceExhausted("no space")

    inventory.take_records_out(keep)
    assert "password" in beside.lookupByUUID(bad.bytes).XMLDesc()
    assert "password" not in beside.lookupByUUID(good.bytes).XMLDesc()


def test_without_libvirt_there_is_no_inventory(connection: Connection, inventory: LibvirtInventory) -> None:
    connection.close()
    with pytest.raises(Unavailable):
        inventory.take()
