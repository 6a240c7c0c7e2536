"""Linux' capabilities, as pods name them. No I/O."""

from __future__ import annotations

from typing import Final

from virtshim.domain.errors import InvalidRequest

ALL: Final = "all"

# capabilities(7), as of Linux 6.1.
_NAMES: Final = (
    "audit_control audit_read audit_write block_suspend bpf checkpoint_restore chown dac_override dac_read_search fowner "
    "fsetid ipc_lock ipc_owner kill lease linux_immutable mac_admin mac_override mknod net_admin net_bind_service "
    "net_broadcast net_raw perfmon setfcap setgid setpcap setuid sys_admin sys_boot sys_chroot sys_module sys_nice "
    "sys_pacct sys_ptrace sys_rawio sys_resource sys_time sys_tty_config syslog wake_alarm"
)
_KNOWN: Final = frozenset(_NAMES.split())


def capability(text: str) -> str:
    """Its name as setpriv knows it; `ALL` for all of them. Raises InvalidRequest."""
    name = text.lower().removeprefix("cap_")
    if name != ALL and name not in _KNOWN:
        raise InvalidRequest(f"{text[:80]!r} is no capability; write one of capabilities(7), such as NET_ADMIN, or ALL")
    return name
