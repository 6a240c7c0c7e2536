"""Commands run as another user with the tools that images have, from all of them to busybox alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from virtshim.guest.exec_scripts import AS_USER, limits
from virtshim.model.container import RunAs

PASSWD = "root:x:0:0:root:/root:/bin/sh\napp:x:1500:1600::/srv/app:/bin/false\nplain:x:1501:1601::/:/bin/false\n"
GROUP = "root:x:0:\napp:x:1600:\nplain:x:1601:\nvideo:x:44:app\nkvm:x:45:root,app\n"
WRONG = "fail tool setpriv"

# The images' tools besides busybox' cat and grep.
UTIL_LINUX = "setpriv"
COREUTILS = "chroot"
PYTHON = "python3"
BUSYBOX = "busybox start-stop-daemon"
SU = "busybox su"
DAEMONTOOLS = "setuidgid"

SETUIDGID = """#!/bin/busybox sh
# Like setuidgid of daemontools and busybox: sets user and group of /etc/passwd, and no other groups.
name=$1
shift
exec /usr/bin/setpriv --reuid="$name" --regid="$(/bin/busybox id -g "$name")" --clear-groups "$@"
"""


@pytest.fixture
def image() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="image-") as name:  # pytest's own are root's alone
        directory = Path(name)
        directory.chmod(0o755)
        (directory / "passwd").write_text(PASSWD)
        (directory / "group").write_text(GROUP)
        tools = directory / "bin"
        tools.mkdir()
        for applet in ("cat", "grep", "id", "sh", "chroot", "setpriv"):
            (tools / applet).symlink_to("/bin/busybox")
        yield directory


def run(image: Path, tools: str, user: RunAs, *command: str) -> str:
    """Runs the command; returns its output, or the script's error."""
    name = tools.rpartition(" ")[2]
    place = image / "bin" / name
    place.unlink(missing_ok=True)
    if tools == DAEMONTOOLS:
        place.write_text(SETUIDGID)
        place.chmod(0o755)
    else:
        program = os.path.realpath(sys.executable) if tools == PYTHON else shutil.which(name)
        place.symlink_to("/bin/busybox" if tools.startswith("busybox ") else program or "missing")
    words = {
        "user": user.user,
        "group": "" if user.group is None else str(user.group),
        "groups": ",".join(map(str, user.supplementary)),
        "own": "1" if user.own_groups else "",
        "limits": limits(user),
    }
    settings = " ".join(f"{name}='{word}'" for name, word in words.items())
    script = (
        f"mount --bind {image}/passwd /etc/passwd && mount --bind {image}/group /etc/group || exit 99\n"
        f"unset HOME; fail() {{ echo \"fail $1\"; exit 1; }}; PATH={image}/bin; {settings}\n{AS_USER}\nexec \"$@\"\n"
    )  # fmt: skip
    done = subprocess.run(
        ["unshare", "--mount", "/bin/sh", "-c", script, "sh", *(command or ("sh", "-c", WHO))],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode != 99, done.stderr
    return done.stdout.strip() or f"{done.returncode}: {done.stderr}".strip()


WHO = 'echo "$(id -u):$(id -g) $(grep ^Groups /proc/self/status | cat) $HOME"'
EVERY = (UTIL_LINUX, COREUTILS, PYTHON)


def who(image: Path, tools: str, user: RunAs) -> tuple[str, set[int], str]:
    """User and group, supplementary groups, home directory."""
    said = run(image, tools, user)
    assert "Groups:" in said, said
    ids, _, rest = said.partition(" Groups:")
    *groups, home = rest.split()
    return ids, {int(group) for group in groups} - {int(ids.partition(":")[2])}, home


@pytest.mark.parametrize("tools", EVERY)
def test_one_capable_tool_is_enough(image: Path, tools: str) -> None:
    assert who(image, tools, RunAs("app")) == ("1500:1600", {44, 45}, "/srv/app")
    assert who(image, tools, RunAs("1500", 7, (8, 9))) == ("1500:7", {8, 9, 44, 45}, "/srv/app")
    assert who(image, tools, RunAs("app", own_groups=False)) == ("1500:1600", set(), "/srv/app")
    assert who(image, tools, RunAs("4242", None, (8,))) == ("4242:0", {8}, "/")
    assert run(image, tools, RunAs("app"), "sh", "-c", "exit 3") == "3:"
    assert run(image, tools, RunAs("nobody-knows")) == "fail user nobody-knows"


@pytest.mark.parametrize("tools", [BUSYBOX, SU])
def test_busybox_gives_known_users_their_groups(image: Path, tools: str) -> None:
    assert who(image, tools, RunAs("app")) == ("1500:1600", {44, 45}, "/srv/app")
    assert who(image, tools, RunAs("1501")) == ("1501:1601", set(), "/")
    assert run(image, tools, RunAs("app"), "sh", "-c", 'echo "$1"', "x", "two  words; $HOME'") == "two  words; $HOME'"
    assert run(image, tools, RunAs("app"), "sh", "-c", "exit 3") == "3:"
    for more in (RunAs("app", None, (8,)), RunAs("4242"), RunAs("app", own_groups=False)):
        assert run(image, tools, more) == WRONG


def test_an_explicit_group_needs_more_than_su(image: Path) -> None:
    assert run(image, SU, RunAs("app", 7)) == WRONG
    assert who(image, BUSYBOX, RunAs("plain", 7)) == ("1501:7", set(), "/")


def test_setuidgid_gives_no_supplementary_groups(image: Path) -> None:
    assert who(image, DAEMONTOOLS, RunAs("app", own_groups=False)) == ("1500:1600", set(), "/srv/app")
    assert run(image, DAEMONTOOLS, RunAs("app", 7, own_groups=False)) == WRONG


LIMITS = 'echo "$(grep -E "^(CapBnd|NoNewPrivs)" /proc/self/status | cat)"'


def privileges(image: Path, tools: str, user: RunAs) -> tuple[int, bool]:
    """The capabilities that the command could gain, and whether it can gain any."""
    found = dict(line.split(":\t") for line in run(image, tools, user, "sh", "-c", LIMITS).splitlines())
    return int(found["CapBnd"], 16), found["NoNewPrivs"] == "1"


CHOWN, NET_ADMIN = 1 << 0, 1 << 12


@pytest.mark.parametrize("user", ["", "app"])
def test_capabilities_are_restricted_if_setpriv_exists(image: Path, user: str) -> None:
    every, _ = privileges(image, UTIL_LINUX, RunAs(user))
    assert privileges(image, UTIL_LINUX, RunAs(user, dropped=("all",), no_new_privs=True)) == (0, True)
    some = RunAs(user, dropped=("all",), added=("chown", "net_admin"))
    assert privileges(image, UTIL_LINUX, some) == (CHOWN | NET_ADMIN, False)
    assert privileges(image, UTIL_LINUX, RunAs(user, dropped=("chown",))) == (every & ~CHOWN, False)
    assert privileges(image, UTIL_LINUX, RunAs(user, added=("chown",))) == (every, False)
    both = RunAs(user, dropped=("all", "chown"), added=("chown", "net_admin"))
    assert privileges(image, UTIL_LINUX, both) == (NET_ADMIN, False)


@pytest.mark.parametrize("tools", [COREUTILS, PYTHON, BUSYBOX])
def test_commands_run_with_all_capabilities_if_setpriv_is_missing(image: Path, tools: str) -> None:
    every, _ = privileges(image, tools, RunAs())
    for user in ("", "app"):
        assert privileges(image, tools, RunAs(user, dropped=("all",), no_new_privs=True)) == (every, False)
