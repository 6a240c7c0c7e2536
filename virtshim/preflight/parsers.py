"""Whether images are read by a child that has no rights. Pure."""

from __future__ import annotations

from virtshim.images.confinement import OWN_USER, Account
from virtshim.preflight.finding import Finding, error, ok, warning
from virtshim.preflight.virtualization import ProgramOutput

_SUBJECT = "image parsers"


def nobody_to_read(trouble: str) -> Finding:
    return error(_SUBJECT, trouble, "run systemd-sysusers, or correct images.parser_user")


def confined(who: Account, wanted: str, said: ProgramOutput) -> Finding:
    """`wanted`: the user as set, "" for the default; `said` by the child itself: see `virtshim.images.confined.program`."""
    facts = dict(line.partition(" ")[::2] for line in said.text.splitlines())
    if said.trouble or "landlock" not in facts:
        return error(
            _SUBJECT,
            f"the child that reads images keeps its rights: {said.trouble or 'it does not say which'}",
            "run virtshim as root with CAP_SETUID and CAP_SETGID, on a kernel with seccomp filters",
        )
    if facts["landlock"] == "0":
        return warning(
            _SUBJECT,
            f"this kernel has no Landlock: an image that takes its parser over reads what {who.name} may",
            "use a kernel of 5.13 or newer, with landlock among its LSMs (lsm=landlock,... on its command line)",
        )
    if not wanted and who.name != OWN_USER:
        return warning(
            _SUBJECT,
            f"images are read as {who.name}, as whom other programs may run",
            "run systemd-sysusers with virtshim's sysusers.d file, or set images.parser_user",
        )
    namespaces = facts.get("namespaces", "")
    own = f", namespaces of its own: {namespaces}" if namespaces else ""
    return ok(_SUBJECT, f"run as {who.name}, seccomp, Landlock {facts['landlock']}{own}")
