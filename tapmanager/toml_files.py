"""A TOML file with drop-ins, and where in them each setting stands.

`FILE`, then `FILE.d/*.toml` by name; later ones win, tables are merged, lists are replaced. The standard library's parser tells
no positions, so a document is given to it statement by statement, and what each of them sets is at the line where it begins.
"""

from __future__ import annotations

import difflib
import glob
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

# The node's own, which the units name: it need not be there.
DEFAULT_FILE = "/etc/virtshim/config.toml"

# The way to a value: names of tables and keys, and numbers in lists.
Key = tuple[str | int, ...]

_POSITION = re.compile(r" \(at (?:line (\d+), column \d+|end of document)\)$")


@dataclass(slots=True)
class Layers:
    """What the files say together. `places`: `FILE:LINE` for each key, or another name of where it was set."""

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[Key, str] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    """What keeps a file from being read, each with its place."""

    def lay(self, values: Mapping[str, Any], places: Mapping[Key, str]) -> None:
        """These win over what is there."""
        self.values = self._merged((), self.values, values, places)

    def place(self, key: Key) -> str:
        """Of a key, else of the table or list that it would be in, else of what is in it; "" for one that nobody set."""
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
    """All that can be read is; what cannot is in `faults`. Where there are drop-ins, the file need not be there."""
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
            layers.faults.append(f"{path}: is not TOML: it is not in UTF-8")
        except tomllib.TOMLDecodeError as exc:
            found = _POSITION.search(str(exc))
            line = (found and found[1]) or text.count("\n") + 1
            layers.faults.append(f"{path}:{line}: is not TOML: {_POSITION.sub('', str(exc))}")
        else:
            layers.files.append(path)
            layers.lay(values, {key: f"{path}:{line}" for key, line in lines_of(text)})
    return layers


def lines_of(text: str) -> Iterator[tuple[Key, int]]:
    """Each key of a document that the parser takes, and the line of the statement that sets it."""
    table: Key = ()
    in_lists: dict[Key, int] = {}
    statement, begins = "", 1
    for number, line in enumerate(text.split("\n"), start=1):
        statement += f"{line}\n"
        try:
            parsed = tomllib.loads(statement)
        except tomllib.TOMLDecodeError:
            continue  # a list or a text that goes on in the next line
        if parsed and statement.lstrip().startswith("["):
            table = _opened(parsed, in_lists)
            yield table, begins
        else:
            for key in _keys(table, parsed):
                yield key, begins
        statement, begins = "", number + 1


def _opened(header: Any, in_lists: dict[Key, int]) -> Key:
    """The table that `[a.b]` or `[[a.b]]` opens; of lists of tables the last one that was opened."""
    key: Key = ()
    while header:
        if isinstance(header, list):  # the end of [[a.b]]
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
    """The one that was meant, maybe; else ""."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=0.65)), "")
