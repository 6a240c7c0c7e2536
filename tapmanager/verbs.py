"""What tapmanager can be asked: a closed table of verbs, who may use each, and their typed arguments.

attach   {"sandbox", "pod": {"namespace", "name", "uid"}, "dns": {...}, "port_mappings": [...]}  -> the network   root
release  {"sandbox"}         -> {}                                                                             root
fetch    {"sandbox", "key"}  -> {"interfaces": [{"mac", "mtu"}]} + one tap descriptor each                     root, QEMU
list     {}                  -> {"sandboxes": [...]}    half-made and unreadable ones included                 root
status   {}                  -> {"ready", "reason"}     whether a pod could be attached now                    root
counters {"after"}           -> {"sandboxes": {id: {interface: [8 numbers]}}, "last"}   see `counters.Counters`   root
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tapmanager.attachments import Attachments
from tapmanager.errors import NetError, invalid
from tapmanager.fields import BadField, Json, as_object, known, text
from tapmanager.ledger import Entry
from tapmanager.pod import Pod, sandbox_id

# The longest a caller may ask us to work on one request, in seconds.
_LONGEST = 3600.0


@dataclass(frozen=True, slots=True)
class Answer:
    """`fds` are the server's to close after sending."""

    ok: Json
    fds: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Verb:
    run: Callable[[Attachments, Json, float], Answer]
    open_to_qemu: bool = False


def seconds_of(request: Json) -> float:
    """How long the caller waits. Raises NetError (invalid)."""
    value = request.get("timeout")
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value <= 0:
        raise invalid("timeout: a positive number of seconds is wanted")
    return min(float(value), _LONGEST)


def perform(attachments: Attachments, request: Json, is_root: bool, until: float) -> Answer:
    """Runs one request; `until` is a point in time of time.monotonic(). Raises NetError; OSError from the kernel."""
    name = request.get("verb")
    verb = _TABLE.get(name) if isinstance(name, str) else None
    if verb is None:
        raise invalid(f"verb: {str(name)[:40]!r} is not one of {', '.join(_TABLE)}")
    if not (is_root or verb.open_to_qemu):
        raise NetError("permission", f"{name} is for root only")
    try:
        return verb.run(attachments, as_object(request.get("args"), "args"), until)
    except BadField as exc:
        raise invalid(str(exc)) from exc


def _attach(attachments: Attachments, args: Json, until: float) -> Answer:
    pod = Pod.from_json(args, "args")
    return Answer(_network(attachments.attach(pod, until)))


def _network(entry: Entry) -> Json:
    return {
        "netns": entry.netns,
        "interfaces": [
            {
                "name": nic.link,
                "mac": nic.mac,
                "mtu": nic.mtu,
                "addresses": list(nic.addresses),
                "routes": [dataclasses.asdict(route) for route in nic.routes],
            }
            for nic in entry.nics
        ],
        "ips": list(entry.ips),
        "dns": dataclasses.asdict(entry.dns),
        "fetch_key": entry.fetch_key,
    }


def _release(attachments: Attachments, args: Json, until: float) -> Answer:
    known(args, ("sandbox",), "args")
    sandbox = _sandbox(args)
    attachments.release(sandbox, until)
    return Answer({})


def _fetch(attachments: Attachments, args: Json, until: float) -> Answer:
    known(args, ("sandbox", "key"), "args")
    sandbox, key = _sandbox(args), text(args, "key", "args")
    nics, fds = attachments.fetch(sandbox, key, until)
    return Answer({"interfaces": [{"mac": nic.mac, "mtu": nic.mtu} for nic in nics]}, fds)


def _list(attachments: Attachments, args: Json, until: float) -> Answer:  # noqa: ARG001  the table's signature
    known(args, (), "args")
    return Answer({"sandboxes": list(attachments.sandboxes())})


def _counters(attachments: Attachments, args: Json, until: float) -> Answer:  # noqa: ARG001  the table's signature
    """`after` "" begins; a `last` that is not "" is the next call's `after`."""
    known(args, ("after",), "args")
    after = text(args, "after", "args", "")
    found, last = attachments.counters(after)
    return Answer({"sandboxes": found, "last": last})


def _status(attachments: Attachments, args: Json, until: float) -> Answer:  # noqa: ARG001  the table's signature
    known(args, (), "args")
    reason = attachments.trouble()
    return Answer({"ready": not reason, "reason": reason})


def _sandbox(args: Json) -> str:
    return sandbox_id(text(args, "sandbox", "args"), "args.sandbox")


_TABLE: Mapping[str, _Verb] = {
    "attach": _Verb(_attach),
    "release": _Verb(_release),
    "fetch": _Verb(_fetch, open_to_qemu=True),
    "list": _Verb(_list),
    "status": _Verb(_status),
    "counters": _Verb(_counters),
}
