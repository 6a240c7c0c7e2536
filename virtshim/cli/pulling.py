"""`virtshim images`, `rmi` and `image prune`: the node's images. `virtshim pull` and `load` bring one and show the progress."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import BinaryIO, Final

from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from virtshim.cli.tables import print_json, print_table, size_text
from virtshim.cri.client import Pull, connected
from virtshim.cri.operator_client import OperatorClient, Pulling, operating, operating_beside
from virtshim.model.errors import InvalidRequest, NotFound, ShimError, WrongState
from virtshim.model.image_name import FILE_SCHEME, ImageName

HEAD: Final = ("IMAGE", "ID", "SIZE")
_SHORT: Final = 19  # "sha256:" and twelve digits
# Seconds between two progress queries.
_LOOK: Final = 0.5
# Per cent of the download between two lines, where there is no terminal.
_PART: Final = 10
_CHUNK: Final = 1 << 18


def images(socket: str, wanted: str = "", template: str = "", *, as_json: bool = False, quiet: bool = False) -> None:
    """`wanted`: a part of the name, digest or id; "" for all. `template`: see `row_format`. `quiet`: ids only."""
    with connected(socket) as node:
        found = [one for one in node.images() if any(wanted in text for text in (one.id, *one.names, *one.digests))]
    if quiet and not as_json:
        print("\n".join(one.id for one in found))
        return
    if as_json:
        print_json(
            [
                {"id": i.id, "names": list(i.names), "digests": list(i.digests), "size": i.size, "pinned": i.pinned}
                for i in found
            ]
        )
        return
    rows = [(name, i.id[:_SHORT], size_text(i.size)) for i in found for name in (i.names or i.digests[:1] or ("-",))]
    print_table(HEAD, sorted(rows), template)


def image_name(word: str) -> str:
    """The image's name: a path of this machine (`./disk.qcow2`) stands for the file's URL, all else for itself."""
    return f"{FILE_SCHEME}{os.path.abspath(word)}" if word.startswith(("/", "./", "../")) else word


def remove_images(socket: str, wanted: Sequence[str]) -> None:
    """Removes images by name or id. Raises ShimError; images before the one that it names are removed."""
    with connected(socket) as node:
        for image in wanted:
            found = node.image_id(image)
            if not found:
                raise NotFound(f"image {image[:200]} is not on this node; `virtshim images` lists those that are")
            if pods := node.users_of_images().get(found):
                raise WrongState(
                    f"image {image[:200]} is in use by pod {', '.join(sorted(set(pods)))}; remove the pod first"
                )
            node.remove_image(found)
            print(f"removed {image}")


def prune(socket: str, *, dry_run: bool = False) -> None:
    """Removes the images that no container uses and that are not pinned, and prints what that frees."""
    with connected(socket) as node:
        users, before = node.users_of_images(), node.image_bytes()
        unused = [one for one in node.images() if not one.pinned and one.id not in users]
        for one in unused:
            if not dry_run:
                node.remove_image(one.id)
            name = next(iter(one.names or one.digests), one.id)
            print(f"{'would remove' if dry_run else 'removed'} {name} ({size_text(one.size)})")
        if dry_run:
            print(f"{len(unused)} images, up to {size_text(sum(one.size for one in unused))}")
        else:
            print(f"freed {size_text(max(0, before - node.image_bytes()))}")


def pull(socket: str, admin: str, image: str, *, login: str = "", quiet: bool = False) -> str:
    """Returns the image's id. `login`: USER:PASSWORD. Raises ShimError."""
    user, colon, password = login.partition(":")
    if login and not colon:
        raise InvalidRequest("--creds must be USER:PASSWORD; the variable VIRTSHIM_CREDS hides it from other users")
    with connected(socket) as node:
        going = node.pull(image, (user, password) if login else None)
        try:
            _await(going, admin, image, quiet=quiet)
            return going.image_id()
        finally:
            going.cancel()


def load(socket: str, admin: str, file: str, name: str, *, quiet: bool = False) -> str:
    """Stores a disk file as image `name`. `file`: a path, or - for standard input. Returns the image's id. Raises ShimError."""
    ImageName.parse(name)
    with operating_beside(socket, admin) as node, _disk_file(file) as disk, _teller(name, quiet=quiet) as tell:
        total = os.fstat(disk.fileno()).st_size

        def chunks() -> Iterator[bytes]:
            sent = 0
            while chunk := disk.read(_CHUNK):
                yield chunk
                sent += len(chunk)
                tell(Pulling(name, sent, total))

        return node.load(name, total, chunks())


@contextlib.contextmanager
def _disk_file(file: str) -> Iterator[BinaryIO]:
    if file == "-":
        if sys.stdin.isatty():
            raise InvalidRequest("standard input is a terminal; name a file, or pipe the disk into the command")
        yield sys.stdin.buffer
        return
    try:
        disk = open(file, "rb")  # noqa: SIM115  closed below
    except FileNotFoundError as exc:
        raise NotFound(f"{file} does not exist") from exc
    except OSError as exc:
        raise InvalidRequest(f"{file} cannot be read: {exc.strerror}") from exc
    with disk:
        yield disk


def _await(going: Pull, admin: str, image: str, *, quiet: bool) -> None:
    with contextlib.ExitStack() as stack:
        operator = None
        with contextlib.suppress(ShimError):  # another runtime or an older virtshim pulls it, without progress
            operator = stack.enter_context(operating(admin))
        tell = stack.enter_context(_teller(image, quiet=quiet))
        while not going.is_over(_LOOK):
            tell(_of(operator, image))


def _of(operator: OperatorClient | None, image: str) -> Pulling | None:
    if operator is None:
        return None
    with contextlib.suppress(ShimError):
        return next((one for one in operator.pulls() if _is_of(one.image, image)), None)
    return None


def _is_of(name: str, image: str) -> bool:
    """Whether both name the same image. The node's name has a tag and no scheme."""
    return name == image or name.startswith(f"{image}:") or image.endswith(name.removesuffix(":latest"))


class _Bar:
    """A progress bar on a terminal."""

    def __init__(self, progress: Progress, image: str) -> None:
        self._progress = progress
        self._task: TaskID = progress.add_task(image, total=None)

    def __call__(self, found: Pulling | None) -> None:
        if found is not None:
            self._progress.update(self._task, completed=found.received, total=found.total or None)


class _Lines:
    """Lines at certain percentages, where there is no terminal."""

    def __init__(self, image: str) -> None:
        self._image = image
        self._told = 0

    def __call__(self, found: Pulling | None) -> None:
        if found is None or not found.total:
            return
        part = 100 * found.received // found.total // _PART * _PART
        if part > self._told:
            self._told = part
            print(f"{self._image}: {part} % of {size_text(found.total)}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _teller(image: str, *, quiet: bool) -> Iterator[Callable[[Pulling | None], object]]:
    if quiet or not sys.stderr.isatty():
        yield (lambda _found: None) if quiet else _Lines(image)
        return
    from rich.console import Console

    shown = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*shown, console=Console(stderr=True), transient=True) as progress:
        yield _Bar(progress, os.path.basename(image))
