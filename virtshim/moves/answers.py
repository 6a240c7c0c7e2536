"""Checks what another node says about a VM that is to come from it. An attacker may control the other node. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from virtshim.model.errors import InvalidRequest, WrongState
from virtshim.model.network import taps_of
from virtshim.model.sandbox import Sandbox
from virtshim.moves.values import VmRecord

# NICs of one VM.
_MOST_NICS: Final = 64
# Of one NIC, and not of a group.
_MAC: Final = re.compile("[0-9a-f][02468ace](:[0-9a-f]{2}){5}")


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
