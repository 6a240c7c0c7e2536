"""A pod's sysctls: their names, and the script that sets them in the guest. Pure.

A guest has a kernel of its own, so none of them reaches the node, whatever it is called. The script is run by cloud-init at each
boot of a guest that has it, and by way of the guest agent before anything is run for the container; once all are set, it
leaves them alone until the next boot, for the guest may have set them otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

# What the script ends with if the guest does not take one; which, and why, is told on standard error.
NOT_SET: Final = 82

_MOST_NAME: Final = 253
_MOST_VALUE: Final = 4000  # the kernel reads a page
# A file below /proc/sys; a name of an interface may have dots.
_PART: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@-]*")

# Arguments: name, file below /proc/sys, value; of each.
SET: Final = rf"""
read -r boot </proc/sys/kernel/random/boot_id
state=/run/virtshim-sysctls.$boot
[ ! -e "$state" ] || exit 0
code=0
while [ $# -ge 3 ]; do
  if [ ! -e "/proc/sys/$2" ]; then
    echo "$1: the guest's kernel does not have it, or not yet" >&2
    code={NOT_SET}
  elif ! (printf '%s\n' "$3" >"/proc/sys/$2") 2>/dev/null; then
    echo "$1: the guest's kernel does not take $3" >&2
    code={NOT_SET}
  fi
  shift 3
done
[ $code -ne 0 ] || (: >"$state") 2>/dev/null
exit $code
"""


def wrong_with(name: str, value: str) -> str:
    """What is wrong with that sysctl, and the remedy; "" if nothing is."""
    if len(name) > _MOST_NAME or not _file(name):
        return "is no name of a sysctl; write it as sysctl(8) does: net.core.somaxconn"
    if len(value) > _MOST_VALUE or not value.replace("\t", " ").isprintable():
        return "has a value that no sysctl can have (a control character, or too long); correct it"
    return ""


def command(sysctls: Mapping[str, str]) -> tuple[str, ...]:
    words = [word for name, value in sysctls.items() for word in (name, _file(name), value)]
    return ("/bin/sh", "-c", SET, "virtshim-sysctls", *words)


def _file(name: str) -> str:
    """Below /proc/sys; "" for what is no name. As sysctl(8): of dot and slash the first one that is there parts, and the other
    stands for a dot (net.ipv4.conf.eth0/100.forwarding)."""
    dotted = name.find("/") == -1 or -1 < name.find(".") < name.find("/")
    parts = [part.replace("/", ".") for part in name.split(".")] if dotted else name.split("/")
    return "/".join(parts) if len(parts) > 1 and all(_PART.fullmatch(part) for part in parts) else ""
