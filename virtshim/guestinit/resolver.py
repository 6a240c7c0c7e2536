"""The script that writes /etc/resolv.conf where nobody else does. Pure.

cloud-init hands the name servers to what configures the NICs. netplan and networkd hand them on to systemd-resolved, ifupdown to
the package resolvconf; in a guest without those nobody writes the file. The script looks first, so it changes nothing where
somebody does: a link is somebody's, and so is a file with the pod's name server in it.
"""

from __future__ import annotations

from typing import Final

from virtshim.domain.network import Dns

# Arguments: the file, systemd-resolved's program, the file's text.
WRITE: Final = r"""
file=$1 resolved=$2 text=$3
if [ -L "$file" ]; then
  [ -e "$file" ] || [ -e "$resolved" ] && exit 0
  rm -f "$file"
fi
first=${text%%
*}
grep -qxF "$first" "$file" 2>/dev/null && exit 0
printf '%s\n' "$text" >"$file"
"""


def command(dns: Dns) -> tuple[str, ...]:
    """For a guest's root, once its network is configured."""
    words = ("/etc/resolv.conf", "/lib/systemd/systemd-resolved", _text(dns))
    return ("/bin/sh", "-c", WRITE, "virtshim-resolver", *words)


def _text(dns: Dns) -> str:
    lines = [f"nameserver {server}" for server in dns.servers]
    for name, values in (("search", dns.searches), ("options", dns.options)):
        if values:
            lines.append(" ".join((name, *values)))
    return "\n".join(lines)
