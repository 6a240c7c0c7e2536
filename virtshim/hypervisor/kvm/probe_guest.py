"""The probe guest's ROM, as bytes: what `probe_guest.S` beside it assembles to. Pure."""

from __future__ import annotations

from typing import Final

# What QEMU ends with when the guest came through.
PASSED: Final = 99

_SIZE: Final = 0x10000
_RESET_VECTOR: Final = 0xFFF0
_JUMP_TO_START: Final = bytes.fromhex("ea000000f0")
_CODE: Final = bytes.fromhex(
    "fafc31c08ed88ec08ed0bc007cbaf803b050eebf00106631c0b9000c66f3abc70600100320c70600200330c706003083"
    "0066b8001000000f22d80f20e0660d200600000f22e066b9800000c00f32660d000100000f302e660f0116c8000f20c0"
    "660d030000806683e0fb0f22c066ea75000f000800b8100000008ed88ed0bc007c0000baf8030000b04cee54f30f7e04"
    "24660fd4c031c00fa2b9002d3101ffc975fcb031e6f4f4ebfd8db400008d74000000000000000000ffff0000009aaf00"
    "ffff00000092cf001700b0000f"
)


def rom() -> bytes:
    """The 64 KiB for QEMU's `-bios`."""
    start = _CODE.ljust(_RESET_VECTOR, b"\0") + _JUMP_TO_START
    return start.ljust(_SIZE, b"\0")
