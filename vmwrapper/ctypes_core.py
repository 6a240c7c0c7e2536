"""`ctypes` in the written vmwrapper: only the standard library's C module, because the rest takes 4 ms to load. It has what
`vmwrapper.confine.kernel` uses."""

from __future__ import annotations

from _ctypes import FUNCFLAG_CDECL, FUNCFLAG_USE_ERRNO, CFuncPtr, dlopen, dlsym, get_errno
from _ctypes import _SimpleCData as _Data

__all__ = ["CDLL", "c_char_p", "c_long", "c_ulong", "get_errno"]


class c_long(_Data):  # type: ignore[type-arg]  # noqa: N801
    _type_ = "l"


class c_ulong(_Data):  # type: ignore[type-arg]  # noqa: N801
    _type_ = "L"


class c_char_p(_Data):  # type: ignore[type-arg]  # noqa: N801
    _type_ = "z"


class _Function(CFuncPtr):
    _flags_ = FUNCFLAG_CDECL | FUNCFLAG_USE_ERRNO
    _restype_ = c_long


class CDLL:
    """The program's own libraries; functions keep errno for `get_errno`."""

    def __init__(self, _name: None, *, use_errno: bool) -> None:
        assert use_errno
        self.syscall = _Function(dlsym(dlopen(None, 0), "syscall"))  # type: ignore[arg-type]
