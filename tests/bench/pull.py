"""Measures a pull beside curl and sha256sum over the same server."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from figures import Figures, timed
from podclient import PodClient

_SIZE = 256 << 20


def pull_rounds(cri: PodClient, directory: Path, served: str, rounds: int, figures: Figures) -> None:
    """`directory` is served under the URL `http://served`."""
    image, copy = directory / "pull.img", directory / "copy"
    with image.open("wb") as file:
        for _ in range(_SIZE >> 20):
            file.write(os.urandom(1 << 20))
        file.seek(0)
        file.write(b"\xeb\x3c")  # not text, as which some random bytes would be detected
    try:
        for number in range(rounds):
            plain = ours = 0.0
            for which in ("plain", "ours") if number % 2 else ("ours", "plain"):
                if which == "plain":
                    command = f"curl -sf -o {copy} http://{served}/{image.name} && sha256sum {copy}"
                    plain = timed(lambda command=command: subprocess.run(command, shell=True, check=True, stdout=-3))
                    copy.unlink()
                else:
                    ours = timed(lambda: cri.pull(f"{served}/{image.name}"))
                    cri.remove_image(f"{served}/{image.name}")
            figures.add("pull_ms", ours, "ms")
            figures.add("pull_ratio", plain / ours, "ratio")
    finally:
        image.unlink()
