"""libvirt and firmware place host devices as virtshim predicts. The machine has no such devices, so behaviour that
needs real ones is not tested here."""

from __future__ import annotations

_GRANTED = """
import json as _json, libvirt, libvirt_qemu
from lxml import etree
from virtshim.devices import guest_view
from virtshim.devices.values import *
from virtshim.vm import domain_xml
GRANTED = GrantedDevices(
    passthrough=tuple(PciFunction(PciAddress(0, 0x3b, 0, n)) for n in range(8)) + (
        UsbDevice(1, 2), MediatedDevice("6b3c3c0e-5e8a-4a52-8a5f-1c6f1b0d0f11"), VdpaDevice("/dev/vhost-vdpa-0")),
    blocks=(BlockDevice(str(PLACE / "vm/base.raw"), "/dev/xvda", readonly=True),),
)
(PLACE / "s/vnc").mkdir(exist_ok=True)
SCREEN = str(PLACE / "s/vnc/vnc.sock")
XML = domain_xml.build(dataclasses.replace(SPEC, granted=GRANTED, vnc_socket=SCREEN), profile)
def with_libvirt(do):
    with connection.using("look") as conn:
        return do(conn)
"""


def test_libvirt_accepts_the_definition_and_keeps_every_address(place):
    said = place.run(
        _GRANTED + "def look(conn):\n"
        "    domain = conn.defineXMLFlags(XML, libvirt.VIR_DOMAIN_DEFINE_VALIDATE)\n"
        "    devices = etree.fromstring(domain.XMLDesc()).find('devices')\n"
        "    found = {}\n"
        "    for element in (*devices.findall('hostdev'), *devices.findall('interface')):\n"
        "        found[element.find('alias').get('name')] = dict(element.findall('address')[-1].attrib)\n"
        "    say(found)\n"
        "    say([c.find('address').attrib['slot'] for c in devices.findall('controller')\n"
        "         if c.get('model') == 'pcie-root-port'])\n"
        "with_libvirt(look)"
    )
    found, slots = said
    on_pci = {name: address for name, address in found.items() if name.startswith("ua-host-pci")}
    assert {name: int(address["bus"], 16) for name, address in on_pci.items()} == {
        f"ua-host-pci{bus}": bus for bus in range(1, 11)
    }
    assert all(int(address["slot"], 16) == 0 for address in on_pci.values())
    assert found["ua-host-usb1"] == {"type": "usb", "bus": "0", "port": "1"}
    assert all(int(slot, 16) < 0x10 for slot in slots), "the slots of the NICs"


def test_libvirt_gives_qemu_the_functions_by_vfio(place):
    said = place.run(_GRANTED + "say(with_libvirt(lambda conn: conn.domainXMLToNative('qemu-argv', XML)))")
    words = said[0]
    for function in range(8):
        assert f'"host":"0000:3b:00.{function}","id":"ua-host-pci{function + 1}"' in words
    assert '"sysfsdev":"/sys/bus/mdev/devices/6b3c3c0e-5e8a-4a52-8a5f-1c6f1b0d0f11"' in words
    assert '"driver":"usb-host","hostdevice":"/dev/bus/usb/001/002","id":"ua-host-usb1"' in words
    assert '"serial":"dev-xvda"' in words
    assert '"free-page-reporting":true' not in words


def test_firmware_numbers_the_buses_as_virtshim_predicts(place):
    """Other devices replace the host's; a screen and a block device are there too."""
    said = place.run(
        _GRANTED + "tree = etree.fromstring(XML)\n"
        "for gone in tree.xpath('devices/graphics'):\n"
        "    gone.getparent().remove(gone)\n"
        "for at, gone in enumerate(tree.xpath('devices/hostdev | devices/interface')):\n"
        "    place, parent = gone.findall('address')[-1], gone.getparent()\n"
        "    parent.remove(gone)\n"
        "    if place.get('type') == 'pci':\n"
        "        stand_in = etree.SubElement(parent, 'controller', type='scsi', index=str(10 + at), model='virtio-scsi')\n"
        "        stand_in.append(place)\n"
        "for disk in tree.xpath(\"devices/disk[@type='block']\"):\n"
        "    disk.set('type', 'file')\n"
        "    source = disk.find('source'); source.set('file', source.attrib.pop('dev'))\n"
        "def look(conn):\n"
        "    domain = conn.defineXML(etree.tostring(tree, encoding='unicode')); domain.create()\n"
        "    wait_for_log(b'guest is up', 1)\n"
        '    answer = _json.loads(libvirt_qemu.qemuMonitorCommand(domain, \'{"execute": "query-pci"}\', 0))\n'
        "    say([[d['slot'], d['function'], d['pci_bridge']['bus']['secondary']]\n"
        "         for d in answer['return'][0]['devices'] if 'pci_bridge' in d])\n"
        "hypervisor.define(SPEC); with_libvirt(look)\n"
        "say({str(h): str(g) for h, g in guest_view.guest_addresses(GRANTED.passthrough).items()})"
    )
    bridges, told = said
    by_place = {(slot, function): bus for slot, function, bus in bridges}
    assert [by_place[1 + n // 8, n % 8] for n in range(10)] == list(range(1, 11))
    assert told == {f"0000:3b:00.{n}": f"0000:{n + 1:02x}:00.0" for n in range(8)}
