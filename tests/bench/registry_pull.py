"""Measures pulls from a registry beside skopeo's copies from it: one copy that unpacks layers as a pull has to, and one
that keeps them packed.

A pull does more than either: it takes the disk out of its layer, digests it, writes it sparsely, has it checked, and
syncs it to the node's disk before it returns."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from figures import Figures, timed
from imageserver import push_container_disk, registry

_SIZE = 128 << 20
_SKOPEO = ("skopeo", "--insecure-policy", "copy", "--quiet")
_HOW = {"unpacked": ("--dest-decompress",), "packed": ()}


def registry_pull_rounds(
    directory: Path, rounds: int, figures: Figures, pull: Callable[[str], object], remove: Callable[[str], object]
) -> None:
    """`directory` holds temporary files; `pull` and `remove` take an image name."""
    with registry(directory=_made(directory / "registry")) as server:
        names = _published(directory, server.address)
        for number in range(rounds):
            for kind, name in names.items():
                took: dict[str, float] = {}
                for what in ("ours", *_HOW) if number % 2 else (*_HOW, "ours"):
                    if what == "ours":
                        took[what] = timed(lambda name=name: pull(name))
                        remove(name)
                    else:
                        took[what] = timed(lambda name=name, what=what: _copied(directory / "copy", name, *_HOW[what]))
                        shutil.rmtree(directory / "copy")
                figures.add(f"pull_{kind}_ms", took["ours"], "ms")
                figures.add(f"pull_{kind}_ratio", took["unpacked"] / took["ours"], "ratio")
                figures.add(f"pull_{kind}_packed_ratio", took["packed"] / took["ours"], "ratio")


def _published(directory: Path, address: str) -> dict[str, str]:
    """Images of one disk, half of which compresses, by how their layer is packed."""
    disk, plain = directory / "disk.img", directory / "plain"
    with disk.open("wb") as file:
        for _ in range(_SIZE >> 20):
            file.write(os.urandom(512 << 10) + os.urandom(1 << 10) * 512)
        file.seek(0)
        file.write(b"\xeb\x3c")  # not text, as which some random bytes would be detected
    push_container_disk(address, "gzip", disk)
    disk.unlink()
    _copied(plain, f"{address}/gzip:latest", "--dest-decompress")
    target = f"docker://{address}/zstd:latest"
    _run("--dest-tls-verify=false", "--dest-compress-format", "zstd", f"dir:{plain}", target)
    shutil.rmtree(plain)
    return {kind: f"{address}/{kind}:latest" for kind in ("gzip", "zstd")}


def _copied(target: Path, name: str, *how: str) -> None:
    _run("--src-tls-verify=false", *how, f"docker://{name}", f"dir:{target}")


def _run(*words: str) -> None:
    subprocess.run((*_SKOPEO, *words), check=True, stdout=subprocess.DEVNULL)


def _made(directory: Path) -> Path:
    directory.mkdir()
    return directory
