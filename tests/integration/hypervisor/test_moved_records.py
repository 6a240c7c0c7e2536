"""An upgrade removes the records that an earlier version wrote into the definitions of running VMs."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.hostile

TAKE_OUT = """
import libvirt
from virtshim.vm.inventory import LibvirtInventory
from virtshim.vm.ownership import RECORD_NAMESPACE

inventory = LibvirtInventory(connection, profile)
boot()
with connection.using("as the earlier version") as conn:
    domain = conn.lookupByUUID(SPEC.uuid.bytes)
    both = libvirt.VIR_DOMAIN_AFFECT_LIVE | libvirt.VIR_DOMAIN_AFFECT_CONFIG
    record = '<record>[{"annotations":"correct-horse"}]</record>'
    domain.setMetadata(libvirt.VIR_DOMAIN_METADATA_ELEMENT, record, "virtshim-record", RECORD_NAMESPACE, both)

def shown():
    with connection.using("look") as conn:
        domain = conn.lookupByUUID(SPEC.uuid.bytes)
        return ["correct-horse" in domain.XMLDesc(flags) for flags in (0, libvirt.VIR_DOMAIN_XML_INACTIVE)]

say(shown())
kept = []
inventory.take_records_out(lambda container, text: kept.append([container.value, text]))
say(kept)
say(shown())
say(state()[0])
say([domain.container_id.value for domain in inventory.take().owned])
hypervisor.destroy(SPEC.uuid, SPEC.container_id)
"""


def test_a_running_vms_record_leaves_its_live_and_its_saved_definition(place):
    assert place.run(TAKE_OUT) == [
        [True, True],
        [["a" * 64, '[{"annotations":"correct-horse"}]']],
        [False, False],
        "running",
        ["a" * 64],
    ]
    saved = [path.read_text() for path in place.root.rglob("virtshim-integration.xml")]
    assert saved
    assert not any("correct-horse" in text for text in saved)
