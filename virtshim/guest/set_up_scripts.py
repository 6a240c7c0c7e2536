"""Scripts that set sysctls and policy routes in the guest. Pure.

Policy routes are rules that choose routing tables other than main (source-based routing: CNI's sbr). DHCP cannot
transmit them, and most renderers of cloud-init drop the rules and put such routes into the main table. The guest agent
therefore sets them with the `ip` of the image, once the guest has its addresses. This may be repeated at any time:
existing routes and rules stay.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from virtshim.model.network import Interface, PolicyRule, TableRoute

# A pod's sysctls: their names, and the script that sets them in the guest.
#
# A guest has its own kernel, so no sysctl reaches the node, whatever its name is. cloud-init, where the guest has it,
# runs the script at each boot, and the guest agent runs it before anything else of the container. Once all are set, the
# script leaves them alone until the next boot, because the guest may have changed them.

# The script's exit code if the guest refuses a sysctl; standard error says which and why.
SYSCTLS_NOT_SET: Final = 82

_MOST_NAME: Final = 253
_MOST_VALUE: Final = 4000  # the kernel reads a page
# A file below /proc/sys; a name of an interface may have dots.
_PART: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@-]*")

# Arguments: name, file below /proc/sys, and value of each.
SET_SYSCTLS: Final = rf"""
read -r boot </proc/sys/kernel/random/boot_id
state=/run/virtshim-sysctls.$boot
[ ! -e "$state" ] || exit 0
code=0
while [ $# -ge 3 ]; do
  if [ ! -e "/proc/sys/$2" ]; then
    echo "$1: the guest's kernel does not have it, or not yet" >&2
    code={SYSCTLS_NOT_SET}
  elif ! (printf '%s\n' "$3" >"/proc/sys/$2") 2>/dev/null; then
    echo "$1: the guest's kernel does not take $3" >&2
    code={SYSCTLS_NOT_SET}
  fi
  shift 3
done
[ $code -ne 0 ] || (: >"$state") 2>/dev/null
exit $code
"""


def sysctl_problem(name: str, value: str) -> str:
    """The fault of that sysctl with its remedy, "" if there is none."""
    if len(name) > _MOST_NAME or not _file(name):
        return "is not a sysctl name; write it as sysctl(8) does: net.core.somaxconn"
    if len(value) > _MOST_VALUE or not value.replace("\t", " ").isprintable():
        return "has a value that no sysctl can have (a control character, or too long); correct it"
    return ""


def sysctls_command(sysctls: Mapping[str, str]) -> tuple[str, ...]:
    words = [word for name, value in sysctls.items() for word in (name, _file(name), value)]
    return ("/bin/sh", "-c", SET_SYSCTLS, "virtshim-sysctls", *words)


def _file(name: str) -> str:
    """The path below /proc/sys, "" if it is not a name. As in sysctl(8), the first dot or slash in the name is the
    separator, and the other character stands for a dot (net.ipv4.conf.eth0/100.forwarding)."""
    dotted = name.find("/") == -1 or -1 < name.find(".") < name.find("/")
    parts = [part.replace("/", ".") for part in name.split(".")] if dotted else name.split("/")
    return "/".join(parts) if len(parts) > 1 and all(_PART.fullmatch(part) for part in parts) else ""


# The exit code of both scripts below if the image has no command `ip`.
NO_IP_COMMAND: Final = 85

# `device_of MAC` sets `device` to the interface with that MAC, or to "" and fails.
_WITH_IP: Final = rf"""
export LC_ALL=C PATH="$PATH:/usr/local/sbin:/usr/sbin:/sbin"
command -v ip >/dev/null 2>&1 || {{ echo "the image has no command ip" >&2; exit {NO_IP_COMMAND}; }}
is_on_another() {{ [ -e "$1" ]; }}
device_of() {{
  device=
  for found in /sys/class/net/*; do
    # A VLAN, a bond, a bridge may have the MAC of the NIC that it is on.
    ! is_on_another "$found"/lower_* && {{ read -r mac <"$found/address"; }} 2>/dev/null || continue
    [ "$mac" != "$1" ] || device=${{found##*/}}
  done
  [ -n "$device" ]
}}
"""

# The script's exit codes; standard error says which and why. NOT_YET: the guest's network is not ready.
POLICY_ROUTES_NOT_YET: Final = 86
POLICY_ROUTES_NOT_SET: Final = 87

# unspecified, default, main, local: the guest's own tables.
_RESERVED: Final = frozenset({0, 253, 254, 255})

# Arguments, in pairs: `nic` and a MAC, whose interface the next ones are about; `has` and an address that it must have
# first; `route` and its words, the family's option first; finally `rule` and its words. systemd-networkd removes
# foreign routes and rules unless their protocol is the kernel's. busybox has no option for the protocol of rules.
SET_POLICY_ROUTES: Final = rf"""{_WITH_IP}code=0 device=
not_yet() {{ echo "$1" >&2; code={POLICY_ROUTES_NOT_YET} device=; }}
try() {{
  why=$(ip "$@" 2>&1 </dev/null) && return
  case $why in *"File exists"*) return 0 ;; esac
  return 1
}}
route() {{
  family=$1
  shift
  try "$family" route replace "$@" dev "$device" proto kernel && return
  said=$why
  try "$family" route replace "$@" dev "$device" proto kernel onlink && return
  not_yet "route $*: $said"
}}
rule() {{
  family=$1
  shift
  try "$family" rule add "$@" protocol kernel || try "$family" rule add "$@" && return
  echo "rule $*: $why" >&2
  exit {POLICY_ROUTES_NOT_SET}
}}
while [ $# -ge 2 ]; do
  case $1 in
    nic) device_of "$2" || not_yet "no interface has the MAC $2" ;;
    has)
      case "$device:$(ip -o address show dev "$device" 2>/dev/null) " in
        :*) ;;
        *" $2/"* | *" $2 "*) ;;
        *) not_yet "$device does not have the address $2" ;;
      esac
      ;;
    route) [ -z "$device" ] || route $2 ;;
    rule) [ $code -ne 0 ] || rule $2 ;;
  esac
  shift 2
done
exit $code
"""


# The addresses of a guest that was restored in another pod. The guest has those of the pod in which it was saved until its DHCP
# client asks again, or for ever if they were written down in it.

ADDRESSES_NOT_SET: Final = 89

# Arguments are pairs: `nic` and a MAC, then the pairs for the interface with this MAC: `keep` and all its new addresses,
# separated by spaces; `address` and one of these addresses; `route` and the words of a route, the family's option first. The
# script removes the interface's other addresses, and with them the routes of their subnets.
SET_ADDRESSES: Final = rf"""{_WITH_IP}not_set() {{ echo "$1" >&2; exit {ADDRESSES_NOT_SET}; }}
device=
while [ $# -ge 2 ]; do
  case $1 in
    nic) device_of "$2" || not_set "no interface has the MAC $2" ;;
    keep)
      ip -o address show dev "$device" | while read -r _ _ family one rest; do
        case "$family:$rest" in inet6:*"scope link"* | [!i]*) continue ;; esac
        case " $2 " in *" $one "*) ;; *) ip address del "$one" dev "$device" ;; esac
      done
      ;;
    address)
      case " $(ip -o address show dev "$device") " in
        *" $2 "*) ;;
        *) ip address add "$2" dev "$device" || not_set "$device: the address $2 cannot be set" ;;
      esac
      ;;
    route)
      ip ${{2%% *}} route replace ${{2#* }} dev "$device" || ip ${{2%% *}} route replace ${{2#* }} dev "$device" onlink ||
        not_set "$device: the route $2 cannot be set"
      ;;
  esac
  shift 2
done
"""


def addresses_command(nics: Sequence[Interface]) -> tuple[str, ...]:
    """For a guest with these NICs; nothing if it has none."""
    words: list[str] = []
    for nic in nics:
        own = [str(ipaddress.ip_interface(text)) for text in nic.addresses]
        words += ["nic", nic.mac.lower(), "keep", " ".join(own)]
        words += [word for one in own for word in ("address", one)]
        for route in nic.routes:
            to = ipaddress.ip_network(route.destination)
            via = f" via {ipaddress.ip_address(route.gateway)}" if route.gateway else ""
            words += ["route", f"-{to.version} {to}{via}"]
    return ("/bin/sh", "-c", SET_ADDRESSES, "virtshim-addresses", *words) if words else ()


def policy_routes_command(nics: Sequence[Interface]) -> tuple[str, ...]:
    """For a guest with these NICs; nothing if there are no rules."""
    rules = sorted(
        {rule for nic in nics for rule in nic.rules}, key=lambda rule: (rule.family, rule.priority, rule.table)
    )
    if not rules:
        return ()
    words = [word for nic in nics if nic.table_routes for word in _of_nic(nic)]
    words += [word for rule in rules for word in ("rule", _rule(rule))]
    return ("/bin/sh", "-c", SET_POLICY_ROUTES, "virtshim-policy-routes", *words)


def _of_nic(nic: Interface) -> Iterator[str]:
    yield from ("nic", nic.mac.lower())
    for family in sorted({_family(route.destination) for route in nic.table_routes}):
        own = [ipaddress.ip_interface(text) for text in nic.addresses]
        if first := next((one for one in own if one.version == family), None):
            yield from ("has", str(first.ip))
    for route in sorted(nic.table_routes, key=_order):
        yield from ("route", _route(route))


def _order(route: TableRoute) -> tuple[int, bool, int]:
    """A sort key. On-link routes come first, because gateways are reached through them."""
    return route.table, bool(route.gateway), -ipaddress.ip_network(route.destination).prefixlen


def _route(route: TableRoute) -> str:
    """The route as words for `ip`. Formats each value as an address or a number, because the script splits the text at
    spaces, and the record may hold anything."""
    words = [f"-{_family(route.destination)}", str(ipaddress.ip_network(route.destination))]
    words += ["via", str(ipaddress.ip_address(route.gateway))] if route.gateway else []
    words += ["src", str(ipaddress.ip_address(route.source))] if route.source else []
    words += ["metric", f"{route.metric:d}"] if route.metric else []
    words += ["mtu", f"{route.mtu:d}"] if route.mtu else []
    return " ".join((*words, "table", _table(route.table)))


def _rule(rule: PolicyRule) -> str:
    words = [f"-{rule.family:d}", "from", str(ipaddress.ip_network(rule.source)) if rule.source else "all"]
    words += ["to", str(ipaddress.ip_network(rule.target))] if rule.target else []
    return " ".join((*words, "priority", f"{rule.priority:d}", "table", _table(rule.table)))


def _table(number: int) -> str:
    if number in _RESERVED:
        raise ValueError(f"table {number} is the guest's own")
    return f"{number:d}"


def _family(network: str) -> int:
    return ipaddress.ip_network(network).version
