"""Checks whether a VM of another node can continue here, before anything is started for it. Pure.

QEMU itself would refuse most of what does not fit, but without a remedy, and only after the disk and the memory were copied. An
attacker may control the other node, so its answers are checked, too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from virtshim.model.errors import InvalidRequest, WrongState
from virtshim.model.network import taps_of
from virtshim.model.sandbox import Sandbox
from virtshim.model.text import escaped
from virtshim.moves.values import VmRecord
from virtshim.vm.guest_needs import GuestNeeds, QemuHere

# Bytes that stay free on the file system, beside the disk.
_MARGIN: Final = 64 << 20
# Of an offer as text. A guest's CPU has some hundred features.
_LONGEST: Final = 64 << 10
# NICs of one VM.
_MOST_NICS: Final = 64
# Of one NIC, and not of a group.
_MAC: Final = re.compile("[0-9a-f][02468ace](:[0-9a-f]{2}){5}")


@dataclass(frozen=True, slots=True)
class Nic:
    mtu: int
    queues: int


@dataclass(frozen=True, slots=True)
class Offer:
    """What a VM needs. `image`: the digest of the image below its root disk. `disk_bytes`: what its root disk takes; 0 if that is
    on a volume. `memory_bytes`: of the node's ordinary memory. `nics`: by the interface in the pod; None for a saved VM, of
    which only QEMU knows them."""

    image: str
    needs: GuestNeeds
    disk_bytes: int
    memory_bytes: int
    nics: Mapping[str, Nic] | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """What the VM's next pod and this node have. Fields with the same name as in `Offer` mean the same. `free_disk`,
    `free_memory`: bytes."""

    image: str
    qemu: QemuHere
    free_disk: int
    free_memory: int
    nics: Mapping[str, Nic] = field(default_factory=dict)


# A tuple, as `virtshim.moves.files` has it.
_OFFER: Final[TypeAdapter[tuple[Offer]]] = TypeAdapter(tuple[Offer])


def text_of_offer(offer: Offer) -> str:
    return _OFFER.dump_json((offer,)).decode()


def offer_in(text: object) -> Offer:
    """Raises InvalidRequest for what is no offer."""
    try:
        return _OFFER.validate_json(text if isinstance(text, str) and len(text) <= _LONGEST else "", strict=False)[0]
    except (ValidationError, ValueError) as exc:
        raise InvalidRequest("the other node did not say properly what its virtual machine needs") from exc


def other_image(node: str, theirs: str, ours: str) -> str:
    """Why the root disk does not fit the pod; "" if it does."""
    if theirs == ours:
        return ""
    return (
        f"image: the root disk on node {node} is based on {escaped(theirs, 100)}, and this pod has {ours}; name the image by its "
        "digest"
    )


def refusals(node: str, offer: Offer, place: Place) -> list[str]:
    """Why the VM of `node` cannot continue here: each with the field and the remedy. Empty if it can."""
    found = [other_image(node, offer.image, place.image), *_qemu(node, offer.needs, place.qemu)]
    if offer.disk_bytes and offer.disk_bytes + _MARGIN > place.free_disk:
        found.append(
            f"disk: the root disk takes {_mib(offer.disk_bytes)}, and {_mib(place.free_disk)} are free below paths.state_dir; "
            "make room on this node"
        )
    if offer.memory_bytes > place.free_memory:
        found.append(
            f"memory: the guest has {_mib(offer.memory_bytes)}, and {_mib(place.free_memory)} are available on this node; choose "
            "another node, or end other pods here"
        )
    theirs = place.nics if offer.nics is None else offer.nics
    for name in sorted(theirs.keys() | place.nics.keys()):
        found += _nic(node, name, theirs.get(name), place.nics.get(name))
    return [one for one in found if one]


def _qemu(node: str, needs: GuestNeeds, here: QemuHere) -> list[str]:
    found = []
    if not here.has_machine:
        found.append(
            f"machine type: this node's QEMU does not have the guest's {escaped(needs.machine, 60)}; install the QEMU of node "
            f"{node} here"
        )
    if needs.qemu > here.qemu:
        found.append(
            f"QEMU: the guest runs in version {_version(needs.qemu)}, and this node has the older {_version(here.qemu)}; "
            "upgrade QEMU here"
        )
    if here.lacks_cpu:
        found.append(
            f"CPU: {escaped(here.lacks_cpu, 300)}; choose a node with the same features, or start the VM anew with a CPU model "
            "that both nodes have (VirtletLibvirtCPUSetting)"
        )
    return found


def _nic(node: str, name: str, theirs: Nic | None, ours: Nic | None) -> list[str]:
    if theirs is None or ours is None:
        where = "the guest alone" if ours is None else "this pod alone"
        remedy = "give both nodes the same CNI configuration, and both pods the same networks"
        return [f"network: {where} has the NIC {escaped(name, 40)}; {remedy}"]
    found = []
    if theirs.mtu > ours.mtu:
        found.append(
            f"MTU: the NIC {name} sends frames of {theirs.mtu} bytes, and this pod's network carries {ours.mtu}; give the "
            f"network the MTU that it has on node {node}"
        )
    if theirs.queues != ours.queues:
        found.append(
            f"queues: the NIC {name} has {theirs.queues}, and would have {ours.queues} here; give this pod the annotation "
            f'virtshim.io/nic-queues: "{theirs.queues}"'
        )
    return found


def _version(number: tuple[int, int]) -> str:
    return f"{number[0]}.{number[1]}"


def _mib(count: int) -> str:
    return f"{count >> 20} MiB"


# --- what the other node says


def macs_in(answer: Mapping[str, Any]) -> Mapping[str, str]:
    found = answer.get("macs")
    are_macs = isinstance(found, dict) and all(isinstance(one, str) and _MAC.fullmatch(one) for one in found.values())
    if not isinstance(found, dict) or not are_macs or len(found) > _MOST_NICS or any(len(name) > 15 for name in found):
        raise InvalidRequest("the other node sent no proper MACs of the virtual machine")
    return found


def refuse_other_macs(vm: VmRecord, sandbox: Sandbox, told: Mapping[str, Any]) -> None:
    """QEMU keeps the MACs of the stream, whatever they are here."""
    theirs = macs_in(told)
    for nic in taps_of(sandbox.network):
        if theirs.get(nic.name, nic.mac) != nic.mac:
            raise WrongState(
                f"the NIC {nic.name} of virtual machine {vm.readable} has the MAC {theirs[nic.name]}, and this node's network "
                f"insists on {nic.mac}; its frames would be dropped"
            )


def unfit(vm: str, node: str, found: Sequence[str]) -> WrongState:
    return WrongState(f"virtual machine {vm} cannot move here, and stays on node {node}. {'. '.join(found)}")


def paths_in(found: object) -> list[str]:
    """Empty if they are none."""
    return found if isinstance(found, list) and all(isinstance(one, str) and one for one in found) else []
