"""Collects the daemons' files: settings, the state database, copies of records, tapmanager's ledger, CNI's files."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterator
from typing import Any

from virtshim.cli.diag.gather import File, Node
from virtshim.cli.diag.programs import file_text, listing
from virtshim.model.errors import InvalidRequest
from virtshim.store.damage import check
from virtshim.store.read_only import read_tables


def settings(node: Node) -> Iterator[File]:
    """The settings in force, and the files that they may come from."""
    values = json.loads(node.settings.model_dump_json())
    yield "in-force.json", _text(node.secrets.configuration(values))
    files = [node.config_file, *sorted(glob.glob(f"{glob.escape(node.config_file)}.d/*"))]
    yield "files.txt", "".join(f"{path} {_mode(path)}\n" for path in files)
    directory = node.settings.images.translations_dir
    yield "images.txt", listing(directory) + listing(node.settings.images.registry_hosts_dir)
    if node.trouble:
        raise InvalidRequest(f"{node.trouble}\nThe archive was made with the default settings.")


def store(node: Node) -> Iterator[File]:
    """The tables of the state database as JSON lines."""
    layout = node.settings.layout()
    files = sorted(glob.glob(f"{glob.escape(layout.database)}*"))
    trouble = check(layout.database)
    yield "database.txt", "".join(f"{path} {_mode(path)}\n" for path in files) + (trouble or "no damage") + "\n"
    for copy in sorted(glob.glob(f"{glob.escape(layout.containers)}/*/record.json")):
        yield f"copies/{os.path.basename(os.path.dirname(copy))}.json", _record_file(node, copy)
    for table, rows in read_tables(layout.database):
        yield f"{table}.jsonl", "".join(f"{json.dumps(_row(node, row))}\n" for row in rows)


def _row(node: Node, row: dict[str, Any]) -> object:
    text = row.pop("document", None)
    try:
        document = json.loads(text) if text is not None else None
    except ValueError:
        document = f"unreadable, {len(str(text))} characters"
    with node.secrets.one_record([row, document]):
        kept = node.secrets.record(row)
        if text is None or not isinstance(kept, dict):
            return kept
        return {**kept, "document": node.secrets.record(document)}


def _record_file(node: Node, path: str) -> str:
    try:
        document = json.loads(file_text(path))
        with node.secrets.one_record(document):
            return _text(node.secrets.record(document))
    except (OSError, ValueError) as exc:
        return f"{path}: {exc}\n"


def cni(node: Node) -> Iterator[File]:
    """CNI configurations, plugins, leases, and the networks of each sandbox."""
    mine = node.settings.tapmanager
    yield from _json_files(node, mine.cni_conf_dir, "configuration")
    yield from _json_files(node, mine.state_dir, "ledger")
    yield from _json_files(node, os.path.join(os.path.dirname(mine.socket), "placements"), "placements")
    yield "plugins.txt", "".join(listing(directory) for directory in mine.cni_bin_dir)
    yield "leases.txt", "".join(listing(directory) for directory in _lease_directories(node))
    yield "delegates.txt", listing("/var/lib/cni/multus")


def _lease_directories(node: Node) -> list[str]:
    return (
        [f"{node.directory}/cni"]
        if node.directory
        else ["/var/lib/cni/networks", "/var/lib/virtshim/networks", "/run/cni"]
    )


def _json_files(node: Node, directory: str, name: str) -> Iterator[File]:
    """Contents of JSON files. Of other files only the names are shown, because plugins keep kubeconfigs among them."""
    yield f"{name}.txt", listing(directory)
    for path in sorted(glob.glob(f"{glob.escape(directory)}/*")):
        if path.endswith((".conf", ".conflist", ".json")) and os.path.isfile(path):
            try:
                with node.secrets.one_record():
                    text = _text(node.secrets.configuration(json.loads(file_text(path))))
            except (OSError, ValueError) as exc:
                text = f"{path}: {exc}\n"
            yield f"{name}/{os.path.basename(path)}", text


def ledger_namespaces(node: Node) -> list[str]:
    """Paths of the namespaces of attached pods whose records can be read."""
    found = []
    for path in sorted(glob.glob(f"{glob.escape(node.settings.tapmanager.state_dir)}/*.json")):
        try:
            found.append(str(json.loads(file_text(path))["netns"]))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return found


def _text(value: object) -> str:
    return json.dumps(value, indent=2) + "\n"


def _mode(path: str) -> str:
    try:
        found = os.stat(path)
    except OSError as exc:
        return str(exc.strerror)
    return f"{found.st_mode:06o} {found.st_uid}:{found.st_gid} {found.st_size} bytes"
