"""The program that `host_facts.ask_libvirt` runs. It asks libvirt one question and prints the answer as JSON.

    python -m virtshim.preflight.libvirt_child version|owner|labels|emulator URI VMWRAPPER QEMU_USER QEMU_GROUP

It is a separate process for two reasons: a call that hangs in libvirt can only be ended with its process, and the embedded
driver cannot be unloaded. The program never opens a root that another process may have open: it tries the embedded driver
below a temporary directory.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile

import libvirt

from virtshim.model.errors import ShimError
from virtshim.system.logsetup import set_up_logging
from virtshim.vm import cpu_query, embed
from virtshim.vm.elements.text import security_models_in

_BASELABEL = "host/secmodel[model='dac']/baselabel"


def main() -> None:
    question, uri, *rest = sys.argv[1:]
    set_up_logging("warning", "text")  # goes to standard error, because standard output carries the answer
    # The exceptions contain the messages; libvirt would print them a second time on standard error.
    libvirt.registerErrorHandler(lambda _context, _error: None, None)
    root = tempfile.mkdtemp(prefix="vs-check-") if embed.is_embedded(uri) else ""
    reached = False
    try:
        if root:
            libvirt.virEventRegisterDefaultImpl()
            uri = embed.prepare(root, embed.qemu_user(rest[1], rest[2]))
        conn = libvirt.open(uri)
        reached = True
        answer = {"text": _asked(conn, question, rest[0])}
        conn.close()
    except libvirt.libvirtError as exc:
        answer = {"trouble": exc.get_error_message() or str(exc)}
    except ShimError as exc:
        answer = {"trouble": str(exc)}
    finally:
        if root:
            shutil.rmtree(root, ignore_errors=True)
    print(json.dumps({**answer, "reached": reached}))  # noqa: T201  this is the answer


def _asked(conn: libvirt.virConnect, question: str, vmwrapper: str) -> str:
    if question == "emulator":
        conn.getDomainCapabilities(vmwrapper, "x86_64", "q35", "qemu")
        return cpu_query.refusal(conn, vmwrapper, "qemu")
    if question == "owner":
        return _owner(conn.getCapabilities())
    if question == "labels":
        return " ".join(security_models_in(conn.getCapabilities()))
    number = conn.getLibVersion()
    return f"{number // 1_000_000}.{number // 1000 % 1000}.{number % 1000}"


def _owner(capabilities: str) -> str:
    from virtshim.vm.xml_text import parsed

    for label in parsed(capabilities).iterfind(_BASELABEL):
        return label.text or ""
    return ""


if __name__ == "__main__":
    main()
