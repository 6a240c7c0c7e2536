"""The tutorial, typed into a shell: every block in order, and the output that the page shows."""

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
    (tmp_path / "tutorial.sh").write_text(script)
    python = os.path.dirname(sys.executable)
    environment = {**os.environ, "PATH": f"{python}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    shell = subprocess.Popen(
        ["bash", str(tmp_path / "tutorial.sh")], cwd=ROOT, env=environment, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = shell.communicate(timeout=240)
        assert shell.returncode == 0, output + node_log()
        said = dict(re.findall(r"^=== (\d+)\n(.*?)(?=^=== |\Z)", output, re.MULTILINE | re.DOTALL))
        for number, lines in expected.items():
            for line in lines.splitlines():
                pattern = ".*".join(map(re.escape, line.split(" ... ")))
                assert re.search(f"^{pattern}", said[str(number)], re.MULTILINE), (
                    f"{line!r} is not in {said[str(number)]!r}"
                )
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
