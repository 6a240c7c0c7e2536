"""Mirrors Virtlet's VirtletImageMapping objects into the directory of image translation files, which virtshim reads at each pull.

The first line of a mirrored file names its object. A file without that line is somebody else's. Files appear and change by a
rename. A killed agent leaves at most one hidden file, which virtshim does not read and the next look removes.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import structlog
import yaml

from virtshim.images.translations import MAX_BYTES, parse_translations
from virtshim.model.errors import InvalidRequest, Unavailable
from virtshim.model.text import is_object_name
from virtshim.system.files import open_regular, replace_bytes, sync

log = structlog.get_logger(__name__)

Document = Mapping[str, Any]

API_VERSION: Final = "virtlet.k8s/v1"
KIND: Final = "VirtletImageMapping"
MAPPINGS: Final = f"/apis/{API_VERSION}/virtletimagemappings"
# Virtlet's, and the only one: whoever writes mappings decides what the names of other people's images mean.
NAMESPACE: Final = "kube-system"

_SUFFIX: Final = ".yaml"
_NEW: Final = ".virtshim-agent.new"
_MODE: Final = 0o600
# The API server allows three characters more.
_LONGEST: Final = 255 - len(_SUFFIX)


@dataclass(frozen=True, slots=True)
class _Rendered:
    """What a version of a mapping makes: the file's content, or the fault that keeps it from making one."""

    version: str
    content: bytes = b""
    fault: str = ""


@dataclass(slots=True)
class ImageMappings:
    """`tell`: makes an event of a mapping, with reason and message."""

    directory: str
    tell: Callable[[Document, str, str], None]
    _rendered: dict[str, _Rendered] = field(default_factory=dict)
    # The last report about each mapping, so that each version is reported once.
    _told: dict[str, tuple[str, str]] = field(default_factory=dict)

    def settle(self, documents: Sequence[Document]) -> None:
        """Makes the files as these mappings say, which must be all mappings. A bad mapping does not delay the others.
        Raises Unavailable."""
        names = {str(one["metadata"]["name"]) for one in documents}
        try:
            if documents:
                os.makedirs(self.directory, 0o755, exist_ok=True)
            self._remove_others(names)
        except OSError as exc:
            raise Unavailable(f"{self.directory}: {exc.strerror}") from exc
        for document in documents:
            self._settle(document)
        for gone in self._rendered.keys() - names:
            del self._rendered[gone]
            self._told.pop(gone, None)

    def _settle(self, document: Document) -> None:
        name, version = (str(document["metadata"].get(key, "")) for key in ("name", "resourceVersion"))
        if name not in self._rendered or self._rendered[name].version != version:
            self._rendered[name] = _render(name, version, document.get("spec"))
        made = self._rendered[name]
        if made.fault:
            self._complain(
                document, made, "MappingRefused", f"{made.fault}; what was mirrored of it before still holds"
            )
            return
        path = os.path.join(self.directory, f"{name}{_SUFFIX}")
        try:
            if _is_written(path, made.content, _mark(name)):
                self._told.pop(name, None)
                return
            replace_bytes(path, made.content, _MODE, os.path.join(self.directory, _NEW))
        except FileExistsError:
            remedy = "rename or remove the file, or rename the mapping"
            why = f"{path} is not the agent's, so it stays and the mapping does not hold here; {remedy}"
            self._complain(document, made, "FileInTheWay", why)
        except OSError as exc:
            self._complain(document, made, "FileNotWritten", f"{path}: {exc.strerror}")
        else:
            self._told.pop(name, None)
            log.info("mapping.mirrored", mapping=name, file=path)

    def _complain(self, document: Document, made: _Rendered, reason: str, message: str) -> None:
        name, told = str(document["metadata"]["name"]), (made.version, message)
        if self._told.get(name) != told:
            self._told[name] = told
            log.warning("mapping.not_mirrored", mapping=name, error=message)
            self.tell(document, reason, message)

    def _remove_others(self, names: set[str]) -> None:
        """Removes mirrored files whose mapping is gone, and what a killed agent has left. Raises OSError."""
        try:
            entries = os.listdir(self.directory)
        except FileNotFoundError:
            return
        for entry in entries:
            path, name = os.path.join(self.directory, entry), entry.removesuffix(_SUFFIX)
            is_gone = entry == f"{name}{_SUFFIX}" and name not in names and _is_ours(path, _mark(name))
            if is_gone or entry == _NEW:
                os.unlink(path)
                sync(self.directory)
            if is_gone:
                log.info("mapping.removed", mapping=name, file=path)


def _render(name: str, version: str, spec: object) -> _Rendered:
    if not is_object_name(name) or len(name) > _LONGEST:
        allowed = f"at most {_LONGEST} of a-z, 0-9, - and ., beginning and ending with a letter or digit"
        return _Rendered(version, fault=f"its name makes no file name: {allowed}")
    try:
        return _Rendered(version, _content(name, spec))
    except (InvalidRequest, yaml.YAMLError, ValueError, RecursionError) as exc:
        return _Rendered(version, fault=" ".join(str(exc).split())[:700] or type(exc).__name__)


def _content(name: str, spec: object) -> bytes:
    """The whole object, as virtshim's parser takes it. Raises InvalidRequest, YAMLError, ValueError, RecursionError."""
    metadata = {"name": name, "namespace": NAMESPACE}
    document = {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": spec}
    text = _mark(name).decode() + yaml.safe_dump(document, sort_keys=False, allow_unicode=True)
    content = text.encode()
    if len(content) > MAX_BYTES:
        raise InvalidRequest(f"it is larger than {MAX_BYTES} bytes; divide it")
    parse_translations(text, f"of {KIND} {name}")
    return content


def _mark(name: str) -> bytes:
    return f"# Written by virtshim agent from {KIND} {NAMESPACE}/{name}: change that object, not this file.\n".encode()


def _is_written(path: str, content: bytes, mark: bytes) -> bool:
    """Raises FileExistsError if the file is somebody else's."""
    try:
        with open_regular(path) as file:
            found, mode = file.read(MAX_BYTES + 1), stat.S_IMODE(os.fstat(file.fileno()).st_mode)
    except FileNotFoundError:
        return False
    except OSError as exc:  # a link, a directory, no right to read it
        raise FileExistsError from exc
    if not found.startswith(mark):
        raise FileExistsError
    return found == content and mode == _MODE


def _is_ours(path: str, mark: bytes) -> bool:
    try:
        with open_regular(path) as file:
            return file.read(len(mark)) == mark
    except OSError:
        return False
