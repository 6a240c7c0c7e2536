"""The policy tests check these files, and run tools on them."""

import ast
import functools
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

PROGRAMS = ("criproto", "virtshim", "vmwrapper", "tapmanager")
GENERATED = ("_pb2.py", "_pb2_grpc.py", "_pb2.pyi", "_pb2_grpc.pyi")
NOT_OURS = ("build", "dist", "__pycache__")


@dataclass(frozen=True, slots=True)
class Project:
    """The checkout under test."""

    root: Path

    def name(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def files(self, *tops: str) -> Iterator[Path]:
        """Every file below the named top directories or the root, except caches, builds and hidden directories."""
        for top in tops or (".",):
            for directory, subdirectories, names in os.walk(self.root / top):
                subdirectories[:] = sorted(
                    name
                    for name in subdirectories
                    if name not in NOT_OURS and not name.startswith(".") and not name.endswith(".egg-info")
                )
                # A checkout beside the repository has a file .git, which names a directory of this machine.
                yield from (Path(directory, name) for name in sorted(names) if name != ".git")

    def modules(self, *tops: str) -> Iterator[Path]:
        """The hand-written Python files below the named top directories; by default, below those that are installed."""
        for path in self.files(*(tops or PROGRAMS)):
            if path.suffix == ".py" and not path.name.endswith(GENERATED):
                yield path

    def tree(self, path: Path) -> ast.Module:
        """The syntax tree of a Python file, which nobody changes. Each file is parsed once."""
        return _parsed(path)

    def check(self, tool: Sequence[str]) -> None:
        """Runs a tool of this environment in the root; a failure shows its output."""
        command = [sys.executable, "-m", *tool[1:]] if tool[0] == "-m" else [_script(tool[0]), *tool[1:]]
        done = subprocess.run(command, cwd=self.root, capture_output=True, text=True, check=False, timeout=280)
        if done.returncode != 0:
            pytest.fail(f"{' '.join(tool)}\n{done.stdout}{done.stderr}", pytrace=False)


@functools.cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def _script(name: str) -> str:
    return str(Path(sysconfig.get_path("scripts"), name))


@pytest.fixture(scope="session")
def project(pytestconfig: pytest.Config) -> Project:
    return Project(pytestconfig.rootpath)
