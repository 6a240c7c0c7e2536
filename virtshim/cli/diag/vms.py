"""Collects libvirt's data of the VMs. It comes from libvirt's files, which exist even when no daemon answers."""

from __future__ import annotations

import contextlib
import glob
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

from virtshim.cli.diag.gather import File, Node
from virtshim.cli.diag.programs import file_text, said
from virtshim.vm.xml_text import parsed

# Marks a domain of virtshim's (see `virtshim.vm.ownership`). Domains of others are private.
_MARK: Final = b"https://virtshim.io/domain/1"
_EMBEDDED: Final = "qemu:///embed?root="
_UUID: Final = re.compile(rb"<uuid>([0-9a-f-]{36})</uuid>")
_LOG_BYTES: Final = 64 << 10
_MOST_ASKED_FOR: Final = 200
_NUMBERS: Final = ("--state", "--vcpu", "--balloon", "--block")


@dataclass(frozen=True, slots=True)
class LibvirtFiles:
    definitions: str
    status: str
    logs: str


def libvirt_files(node: Node) -> LibvirtFiles:
    uri = node.settings.libvirt.uri
    if uri.startswith(_EMBEDDED):
        root = uri.removeprefix(_EMBEDDED)
        return LibvirtFiles(f"{root}/etc/qemu", f"{root}/run/qemu", f"{root}/log/qemu")
    return LibvirtFiles("/etc/libvirt/qemu", "/run/libvirt/qemu", "/var/log/libvirt/qemu")


@dataclass(frozen=True, slots=True)
class OurDomain:
    """`uuid` is "" if the file was cut off."""

    name: str
    uuid: str


def our_domains(node: Node) -> list[OurDomain]:
    return domains_in(libvirt_files(node))


def domains_in(where: LibvirtFiles) -> list[OurDomain]:
    found: dict[str, str] = {}
    for _kind, path, xml in _definitions(where):
        if _MARK in xml:
            uuid = _UUID.search(xml)
            found[_name(path)] = uuid[1].decode() if uuid else found.get(_name(path), "")
    return [OurDomain(name, uuid) for name, uuid in sorted(found.items())]


def _definitions(where: LibvirtFiles) -> Iterator[tuple[str, str, bytes]]:
    """Kind, path and content of libvirt's files, including those of other people's domains."""
    for kind, directory in (("definition", where.definitions), ("status", where.status)):
        for path in sorted(glob.glob(f"{glob.escape(directory)}/*.xml")):
            with contextlib.suppress(FileNotFoundError):  # libvirt has just removed it
                with open(path, "rb") as file:
                    xml = file.read()
                yield kind, path, xml


def _name(path: str) -> str:
    return os.path.basename(path).removesuffix(".xml")


def domains(node: Node) -> Iterator[File]:
    """States, definitions, live configurations, and QEMU's logs."""
    where = libvirt_files(node)
    states: dict[str, str] = {}
    defined: set[str] = set()
    others = 0
    for kind, path, xml in _definitions(where):
        if _MARK not in xml:
            others += 1
            continue
        name = _name(path)
        defined.add(name)
        try:
            with node.secrets.one_record():
                definition = node.secrets.definition(xml)
        except ValueError as exc:
            yield f"{name}/{kind}.txt", f"{path}: {exc}\n"
            continue
        yield f"{name}/{kind}.xml", definition
        if kind == "status":
            states[name] = _state(xml)
    lines = [f"{name:<40} {states.get(name, 'shut off')}" for name in sorted(defined)]
    yield "states.txt", "\n".join([*lines, f"{others} files of domains that are not virtshim's"]) + "\n"
    for name in sorted(defined):
        with contextlib.suppress(FileNotFoundError):
            yield f"{name}/qemu.log", file_text(f"{where.logs}/{name}.log", _LOG_BYTES)


def _state(xml: bytes) -> str:
    root = parsed(xml.decode())
    return f"{root.get('state')} ({root.get('reason')}), process {root.get('pid')}"


def libvirt(
    node: Node, where: LibvirtFiles | None = None, ask: Callable[..., str] = partial(said, "virsh")
) -> Iterator[File]:
    """Answers of the libvirt daemon about the node and virtshim's domains. The embedded driver is part of virtshim and cannot
    be asked. `where`: libvirt's files, if not those of the settings."""
    uri = node.settings.libvirt.uri
    if uri.startswith(_EMBEDDED):
        yield (
            "embedded.txt",
            f"{uri}: libvirt runs inside virtshim and answers no other process; its files are under domains/\n",
        )
        return
    yield "answers.txt", "\n".join(ask("-c", uri, question) for question in ("version", "nodeinfo"))
    yield "capabilities.xml", ask("-c", uri, "capabilities")
    for one in domains_in(where or libvirt_files(node))[:_MOST_ASKED_FOR]:
        if one.uuid:
            yield f"domstats/{one.name}.txt", ask("-c", uri, "domstats", *_NUMBERS, one.uuid)
