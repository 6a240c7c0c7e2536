"""The tutorial and the beginning of README work: the test types every command into a shell, and compares the output
with the page."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.operator, pytest.mark.guest]

ROOT = Path(__file__).resolve().parents[3]
DIRECTORY = Path("/var/tmp/virtshim-tutorial")
# The steps that `make test` has done before.
DONE = "make guest\n"
DEBIAN = "cloud.debian.org/images/cloud/"


def blocks() -> list[tuple[str, str]]:
    """(sh or text, content), in the page's order."""
    text = (ROOT / "docs/tutorial.md").read_text()
    return re.findall(r"^```(sh|text)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.mark.full
def test_the_tutorial_does_what_it_says(tmp_path: Path) -> None:
    found = blocks()
    assert found[0] == ("sh", DONE)
    assert not DIRECTORY.exists(), "somebody is at it, or was stopped in the middle: `virtshim down --dir ... --all`"
    script, expected, part = "set -eum -o pipefail\n", {}, 0
    for kind, content in found[1:]:
        if kind == "sh":
            part += 1
            script += f"echo '=== {part}'\n{content}"
        else:
            expected[part] = content
    said = dict(re.findall(r"^=== (\d+)\n(.*?)(?=^=== |\Z)", typed(script, tmp_path), re.MULTILINE | re.DOTALL))
    for number, lines in expected.items():
        for line in lines.splitlines():
            pattern = ".*".join(map(re.escape, line.split(" ... ")))
            assert re.search(f"^{pattern}", said[str(number)], re.MULTILINE), (
                f"{line!r} is not in {said[str(number)]!r}"
            )


@pytest.mark.full
def test_the_first_commands_of_the_readme_do_what_they_say(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text().split("\n| part of a pod |")[0]
    commands = [line.split("   #")[0].strip() for line in re.findall(r"^    (.*)$", text, re.MULTILINE)]
    assert commands[:3] == ["apt-get update && apt-get install -y make", "make guest", "make up"]
    console = "virtshim run --memory 256Mi small"
    there, elsewhere = [line for line in commands if line.startswith("virtshim run --memory")]
    assert there == console
    assert elsewhere.startswith(f"virtshim run --memory 1Gi {DEBIAN}")
    node = DIRECTORY / "node"
    # Nobody types at the console, so the guest's own words end the wait for it.
    watched = f"""{console} < /dev/null > {tmp_path}/console &
until grep -q 'virtshim-guest: ready' {tmp_path}/console; do kill -0 $!; sleep 0.5; done
kill -INT $!; wait $! || true"""
    lines = [watched if line == console else line for line in commands[3:] if line != elsewhere]
    script = f"""set -eum -o pipefail
virtshim up --dir {node} > {DIRECTORY}/node.log 2>&1 &
until grep -q 'up: ready' {DIRECTORY}/node.log; do sleep 0.5; done
{chr(10).join(lines).replace("/var/lib/virtshim-up", str(node)).replace("kill %1", "kill %+")}
echo "=== after"; virtshim ps -q; virtshim vms --format "{{vm}}"
virtshim down --dir {node} --all
rm -r {DIRECTORY}
"""
    DIRECTORY.mkdir(0o711)
    said = typed(script, tmp_path)
    assert (ROOT / "README.md").read_text() in said
    assert re.search(r"^Linux \S+ \S+ .* x86_64", said, re.MULTILINE)
    assert re.search(r"^default/web .* running ", said, re.MULTILINE)
    assert said.rpartition("=== after\n")[2].startswith("down: "), said[-2000:]


def typed(script: str, tmp_path: Path) -> str:
    """The output of the script, which ends with exit code 0. Removes what it leaves if it does not."""
    (tmp_path / "typed.sh").write_text(script)
    python = os.path.dirname(sys.executable)
    environment = {**os.environ, "PATH": f"{python}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    shell = subprocess.Popen(
        ["bash", str(tmp_path / "typed.sh")], cwd=ROOT, env=environment, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = shell.communicate(timeout=240)
        assert shell.returncode == 0, output + node_log()
        return output
    finally:
        if DIRECTORY.exists():  # it was stopped in the middle
            subprocess.run(
                [sys.executable, "-m", "virtshim", "down", "--dir", str(DIRECTORY / "node"), "--all"], check=False
            )
            for pid in of_session(shell.pid):
                os.kill(pid, signal.SIGKILL)
            shutil.rmtree(DIRECTORY, ignore_errors=True)
        shell.wait()


def of_session(leader: int) -> list[int]:
    """The processes of the shell and its jobs."""
    found = []
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError):  # no process, or none any more
            if int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[3]) == leader:
                found.append(int(name))
    return found


def node_log() -> str:
    log = DIRECTORY / "node.log"
    return log.read_text()[-3000:] if log.exists() else ""
