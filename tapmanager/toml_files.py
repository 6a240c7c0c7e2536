"""Reads a TOML file with its drop-ins, and finds the line of each setting.

Reads `FILE`, then `FILE.d/*.toml` by name. Later files win; tables are merged, lists are replaced. The standard library's parser
reports no positions, so it gets the document statement by statement. A setting's line is the one where its statement begins.
"""

from __future__ import annotations

import glob
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tapmanager.errors import TapmanagerError, invalid

# The default file, which the systemd units use. It may be missing.
DEFAULT_FILE = "/etc/virtshim/config.toml"

# The path to a value: names of tables and keys, and indexes of lists.
Key = tuple[str | int, ...]

_POSITION = re.compile(r" \(at (?:line (\d+), column \d+|end of document)\)$")


@dataclass(slots=True)
class Layers:
    """The merged values of all files. `places`: for each key `FILE:LINE`, or another name of its source."""

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[Key, str] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    """Faults that prevented a file from being read, each with its place."""

    def lay(self, values: Mapping[str, Any], places: Mapping[Key, str]) -> None:
        """Merges values, which take precedence over the existing ones."""
        self.values = self._merged((), self.values, values, places)

    def place(self, key: Key) -> str:
        """The place of a key, or else of the table or list around it, or else of a value in it; "" if none is set."""
        for length in range(len(key), 0, -1):
            if key[:length] in self.places:
                return self.places[key[:length]]
        return next((place for other, place in self.places.items() if other[: len(key)] == key), "")

    def _merged(
        self, at: Key, low: Mapping[str, Any], high: Mapping[str, Any], places: Mapping[Key, str]
    ) -> dict[str, Any]:
        out = dict(low)
        for name, value in high.items():
            key, below = (*at, name), out.get(name)
            if isinstance(below, Mapping) and isinstance(value, Mapping):
                out[name] = self._merged(key, below, value, places)
            else:
                for old in [one for one in self.places if one[: len(key)] == key]:
                    del self.places[old]
                self.places |= {one: place for one, place in places.items() if one[: len(key)] == key}
                out[name] = value
            if key in places:
                self.places[key] = places[key]
        return out


def read(file: str, *, must_be_there: bool = True) -> Layers:
    """Reads all files. What cannot be read is reported in `faults`. If there are drop-ins, the main file may be missing."""
    layers = Layers()
    drop_ins = sorted(glob.glob(f"{glob.escape(file)}.d/*.toml"))
    is_there = os.path.lexists(file) or (must_be_there and not drop_ins)
    for path in [*([file] if is_there else []), *drop_ins]:
        text = ""
        try:
            with open(path, encoding="utf-8") as opened:
                text = opened.read()
            values = tomllib.loads(text)
        except OSError as exc:
            layers.faults.append(f"{path}: cannot be read: {exc.strerror}")
        except UnicodeDecodeError:
            layers.faults.append(f"{path}: is not TOML: it is not UTF-8")
        except tomllib.TOMLDecodeError as exc:
            found = _POSITION.search(str(exc))
            line = (found and found[1]) or text.count("\n") + 1
            layers.faults.append(f"{path}:{line}: is not TOML: {_POSITION.sub('', str(exc))}")
        else:
            layers.files.append(path)
            layers.lay(values, {key: f"{path}:{line}" for key, line in lines_of(text)})
    return layers


def table_of(layers: Layers, table: str, known: Sequence[str]) -> tuple[dict[str, object], list[str]]:
    """(values of the known keys of the table, faults of the files and of the table)"""
    values, problems = layers.values.get(table, {}), list(layers.faults)
    if not isinstance(values, Mapping):
        return {}, [*problems, f"{layers.place((table,))}: {table}: must be a table, [{table}]"]
    for key in values:
        if key not in known:
            near = nearest(key, known)
            meant = f"did you mean {table}.{near}?" if near else f"[{table}] has {', '.join(known)}"
            problems.append(f"{layers.place((table, key))}: {table}.{key}: there is no such setting; {meant}")
    return {key: value for key, value in values.items() if key in known}, problems


def bad_configuration(problems: Sequence[str]) -> TapmanagerError:
    noun = "fault" if len(problems) == 1 else "faults"
    return invalid(
        f"configuration: {len(problems)} {noun} to correct" + "".join(f"\n  {problem}" for problem in problems)
    )


def lines_of(text: str) -> Iterator[tuple[Key, int]]:
    """Each key of a valid document, with the line of the statement that sets it."""
    table: Key = ()
    in_lists: dict[Key, int] = {}
    statement, begins = "", 1
    for number, line in enumerate(text.split("\n"), start=1):
        statement += f"{line}\n"
        try:
            parsed = tomllib.loads(statement)
        except tomllib.TOMLDecodeError:
            continue  # a list or a string continues on the next line
        if parsed and statement.lstrip().startswith("["):
            table = _opened(parsed, in_lists)
            yield table, begins
        else:
            for key in _keys(table, parsed):
                yield key, begins
        statement, begins = "", number + 1


def _opened(header: Any, in_lists: dict[Key, int]) -> Key:
    """The table that `[a.b]` or `[[a.b]]` opens; within lists of tables, the last one opened."""
    key: Key = ()
    while header:
        if isinstance(header, list):  # the last part of [[a.b]]
            in_lists[key] = in_lists.get(key, -1) + 1
            return (*key, in_lists[key])
        if key in in_lists:
            key = (*key, in_lists[key])
        ((name, header),) = header.items()
        key = (*key, name)
    return key


def _keys(at: Key, value: Any) -> Iterator[Key]:
    inner: Iterable[tuple[str | int, Any]]
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, one in inner:
        yield (*at, name)
        yield from _keys((*at, name), one)


def nearest(word: str, known: Iterable[str]) -> str:
    """The known word that was probably meant; "" if none is similar."""
    import difflib  # loaded late, because only faults need it

    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=0.65)), "")
