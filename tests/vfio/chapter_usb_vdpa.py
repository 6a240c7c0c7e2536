"""In this chapter, VMs get USB devices, and a network card by vDPA. They share VMs, because each boot takes long
here."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import outer
from chapter_passthrough import of_qemu
from cluster import WAIT_LIMIT, Sandbox
from podclient import wait_until
from telling import Stage
from usb import UsbDevice
from vduse import NetworkCard

STICK, HUB = "OUTER-STICK", "OUTER-HUB"
MAC = "02:00:00:c0:ff:ee"
# As KubeVirt's device plugin names it for resource example.com/stick.
VARIABLE = "USB_RESOURCE_EXAMPLE_COM_STICK"
_DISK = "/dev/sda"


def tell(stage: Stage) -> None:
    if outer.no_usb_or_vdpa():
        return
    with ExitStack() as stack:
        with stage.report.step("usb and vdpa: hardware") as facts:
            subprocess.run(["modprobe", "-a", "usb_storage", "sd_mod", "vduse", "vhost_vdpa"], check=True)
            wait_until(_stick_is_ready, WAIT_LIMIT, "the USB stick is ready")
            card = stack.enter_context(NetworkCard("card0", bytes.fromhex(MAC.replace(":", ""))))
            facts.update(_state(card))
        one = stage.cluster.sandbox("one")
        _refused(stage, one)
        _granted(stage, one, card)
        other = stage.cluster.sandbox("other")
        _claimed_twice(stage, one, other, card)
        if stage.full:
            _given_on(stage, other, card)
            _gone(stage, other, card, stack)
        other.remove()


def _refused(stage: Stage, pod: Sandbox) -> None:
    report, cluster = stage.report, stage.cluster
    with report.step("usb: forged") as facts:
        facts.update(pod.refusal(cluster.container(envs={VARIABLE: _stick().hint})))
    with report.step("usb: a hub") as facts:
        facts.update(pod.refusal(cluster.container(devices=(UsbDevice.with_serial(HUB).node,))))
    with report.step("usb: not there") as facts:
        facts.update(pod.refusal(cluster.container(devices=("/dev/bus/usb/001/127",))))
    with report.step("usb: used by the node") as facts, _swapping():
        facts.update(pod.refusal(cluster.container(devices=(_stick().node,))))


def _granted(stage: Stage, pod: Sandbox, card: NetworkCard) -> None:
    report, cluster = stage.report, stage.cluster
    resources = ("example.com/stick", ["stick-7f3a-0"]), ("example.com/card", [card.name])
    stage.books.grant("default", "one", "vm", *resources)
    with report.step("usb and vdpa: granted") as facts:
        devices = (_stick().node, card.node)
        facts["console"] = pod.run(cluster.container(devices=devices, envs={VARIABLE: _stick().hint}))
        facts["sent"] = [frame.hex() for frame in card.sent]
        facts.update(_state(card), **of_qemu(stage.node))


def _claimed_twice(stage: Stage, one: Sandbox, other: Sandbox, card: NetworkCard) -> None:
    report, cluster = stage.report, stage.cluster
    with report.step("usb: claimed twice") as facts:
        facts.update(other.refusal(cluster.container(devices=(_stick().node,))))
    with report.step("vdpa: claimed twice") as facts:
        facts.update(other.refusal(cluster.container(devices=(card.node,))))
    with report.step("usb and vdpa: removed") as facts:
        one.remove()
        facts.update(_state(card))


def _given_on(stage: Stage, other: Sandbox, card: NetworkCard) -> None:
    report, cluster = stage.report, stage.cluster
    with report.step("usb and vdpa: given again") as facts:
        facts["console"] = other.run(cluster.container(devices=(_stick().node, card.node)))
    with report.step("usb and vdpa: killed") as facts:
        stage.client.remove(other.kill(stage.node))
        facts.update(_state(card))


def _gone(stage: Stage, pod: Sandbox, card: NetworkCard, holds_card: ExitStack) -> None:
    """Both devices are unplugged between the container's creation and its start."""
    report, cluster = stage.report, stage.cluster
    with report.step("usb and vdpa: gone") as facts:
        stick = _stick()

        def unplug() -> None:
            stick.unplug()
            holds_card.close()

        config = cluster.container(devices=(stick.node, card.node))
        facts["usb"], facts["vdpa"] = stick.node, card.node
        facts.update(pod.refusal(config, meanwhile=unplug))
    with report.step("usb: back") as facts:
        stick.plug_in()
        wait_until(_stick_is_ready, WAIT_LIMIT, "the USB stick is ready")
        facts["usb"] = _stick().node


def _stick() -> UsbDevice:
    return UsbDevice.with_serial(STICK)


def _stick_is_ready() -> bool:
    try:
        return _stick().driver == "usb-storage" and os.path.exists(_DISK)
    except LookupError:
        return False


@contextmanager
def _swapping() -> Iterator[None]:
    """Whether the node has swap space on the stick."""
    subprocess.run(["mkswap", _DISK], check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["swapon", _DISK], check=True)
    yield
    subprocess.run(["swapoff", _DISK], check=True)


def _state(card: NetworkCard) -> dict[str, Any]:
    """The state of both devices on the node."""
    stick = _stick()
    return {
        "usb": stick.node, "usb_driver": stick.driver, "usb_owner": _owner(stick.node),
        "vdpa": card.node, "vdpa_owner": _owner(card.node),
    }  # fmt: skip


def _owner(node: str) -> str:
    """The owner and mode of the node."""
    found = os.stat(node)
    return f"{found.st_uid} {stat.S_IMODE(found.st_mode):o}"
