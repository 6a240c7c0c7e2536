"""A volume on disk as kubelet writes it: the files are in a directory of their own, and `..data` is swapped last."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Mapping
from pathlib import Path


class WrittenVolume:
    """`path`: below a pod's directory, as kubelet names it."""

    def __init__(self, pods: Path, pod_uid: str, kind: str, name: str) -> None:
        self.path = pods / "pods" / pod_uid / "volumes" / f"kubernetes.io~{kind}" / name
        self.path.mkdir(parents=True)
        self.path.chmod(0o1777)
        # Everybody may use the volume, but only root can reach it: kubelet creates `pods` with 0750.
        (pods / "pods").chmod(0o750)
        self._versions = itertools.count(1)

    def write(self, files: Mapping[str, bytes], mode: int = 0o644, group: int = 0) -> None:
        """Replaces the volume's contents. Names may contain directories."""
        data = self.path / f"..2026_11_22_10_00_00.{next(self._versions):09}"
        data.mkdir(mode=0o755)
        for name, content in files.items():
            file = data / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
            file.chmod(mode)
            os.chown(file, -1, group)
        before = os.path.realpath(self.path / "..data")
        os.symlink(data.name, self.path / "..data_tmp")
        os.rename(self.path / "..data_tmp", self.path / "..data")
        seen = {name.split("/", 1)[0] for name in files}
        for name in seen:
            if not os.path.lexists(self.path / name):
                os.symlink(f"..data/{name}", self.path / name)
        for entry in self.path.iterdir():
            if not entry.name.startswith("..") and entry.name not in seen:
                entry.unlink()
        if Path(before).name.startswith("..2026"):
            shutil.rmtree(before)
