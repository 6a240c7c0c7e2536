"""Reads Virtlet's image translation files and looks up names in them. Pure, except for `read_translations`.

Each file is one YAML document: Virtlet's plain form, or its VirtletImageMapping object, whose `spec` has the same form:

    prefix: prod                    # optional: the rules apply to names below prod/, without prod/
    translations:
    - name: fedora                  # the whole name without tag and digest
      url: https://host/fedora.qcow2
    - regexp: 'centos/(\\d+)'        # RE2, found anywhere in the name; $1, ${1}, ${word} in the URL, $$ for a dollar; also: regex
      url: http://host/centos-$1.qcow2
      transport: slow               # optional: an entry of transports; "" is the default of this file
    transports:
      slow:
        timeout: 30000              # ms for the whole download; 0 or missing: no limit
        maxRedirects: 2             # default 9
        proxy: http://host:3128
        tls:
          insecure: true            # the server's certificate is not checked
          serverName: other.host    # the name its certificate must carry
          certificates:             # PEM text; a CA if it has no key, else the client certificate
          - cert: ...
            key: ...
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

import yaml

from virtshim.model.errors import InvalidRequest

DEFAULT_MAX_REDIRECTS = 9
MAX_BYTES: Final = 1 << 20
# RE2's memory limit for one compiled regex and its search cache: some ten thousand instructions.
_REGEX_BYTES: Final = 1 << 20

# Go's regexp.Expand: $name takes the longest run of letters, digits and underscores.
_REFERENCE = re.compile(r"\$(?:(\$)|(\w+)|\{(\w+)\})", re.ASCII)
# Matches an escaped character, or the beginning of a named group.
_NAMED_GROUP = re.compile(r"\\.|\(\?P?<(\w+)>", re.DOTALL)


class Match(Protocol):
    def __getitem__(self, group: int | str, /) -> str | None:
        """None if the group did not match. Raises IndexError if there is no such group."""


class Regex(Protocol):
    """An operator's compiled regular expression."""

    def search(self, text: str, /) -> Match | None:
        """Takes time linear in the text, for any regex. Does not block other threads."""


@dataclass(frozen=True, slots=True)
class TlsProfile:
    """`cas`: trusted CAs, in PEM. `beside_system`: the system's CAs are trusted too. `client`: (certificate, key), in PEM."""

    cas: tuple[str, ...] = ()
    client: tuple[str, str] | None = None
    server_name: str = ""
    insecure: bool = False
    beside_system: bool = False

    def __repr__(self) -> str:  # keeps the key out of logs
        return f"TlsProfile(server_name={self.server_name!r}, insecure={self.insecure})"


@dataclass(frozen=True, slots=True)
class Transport:
    """How to download. `timeout`: seconds for the whole download, None for no limit. `connect_timeout`: seconds, None for the
    default. `proxy`: "" for the proxy of the environment."""

    timeout: float | None = None
    max_redirects: int = DEFAULT_MAX_REDIRECTS
    proxy: str = field(default="", repr=False)
    tls: TlsProfile = TlsProfile()
    connect_timeout: float | None = None


@dataclass(frozen=True, slots=True)
class Rule:
    """Exactly one of `name` and `regex` is set."""

    url: str
    transport: str
    name: str = ""
    regex: Regex | None = None

    def expand(self, match: Match) -> str:
        """The URL with Go's $ references replaced. A reference to a missing group becomes empty."""

        def replacement(reference: re.Match[str]) -> str:
            if reference[1]:
                return "$"
            group = reference[2] or reference[3]
            try:
                return match[int(group) if group.isdigit() else group] or ""
            except (IndexError, ValueError):  # ValueError: a number of thousands of digits
                return ""

        return _REFERENCE.sub(replacement, self.url)


@dataclass(frozen=True, slots=True)
class TranslationFile:
    """The rules of one file, in their order."""

    file: str
    prefix: str
    rules: tuple[Rule, ...]
    transports: Mapping[str, Transport]

    def transport(self, rule: Rule) -> Transport:
        """The rule's transport; if it names none, the file's default, else the built-in one."""
        return self.transports.get(rule.transport, Transport())

    def local(self, name: str) -> str | None:
        """The name without this file's prefix; None if the prefix does not match."""
        if not self.prefix:
            return name
        return name.removeprefix(f"{self.prefix}/") if name.startswith(f"{self.prefix}/") else None


@dataclass(frozen=True, slots=True)
class Translated:
    """`url`: made by a rule in `file`; may lack a scheme."""

    url: str
    transport: Transport
    file: str


def read_translations(directory: str) -> list[TranslationFile]:
    """Reads all *.yaml and *.yml files, sorted by name; none if the directory is missing. Called for each pull, so that edits
    take effect at once. Raises InvalidRequest that names a bad or unreadable file, because silently ignoring a rule would pull
    from another source."""
    try:
        entries = sorted(Path(directory).iterdir())
    except FileNotFoundError:
        return []
    except OSError as exc:
        raise InvalidRequest(f"image translation directory {directory}: {exc.strerror}") from exc
    wanted = [entry for entry in entries if entry.suffix in (".yaml", ".yml") and not entry.name.startswith(".")]
    return [parse_translations(_file_text(entry), str(entry)) for entry in wanted]


def _file_text(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise InvalidRequest(f"image translation file {file}: larger than {MAX_BYTES} bytes")
        return data.decode()
    except OSError as exc:
        raise InvalidRequest(f"image translation file {file}: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise InvalidRequest(f"image translation file {file}: not UTF-8") from exc


def translate(name: str, files: Sequence[TranslationFile]) -> Translated | None:
    """Applies the first matching rule to `name` (without tag and digest). Exact names of all files come before regexes; otherwise
    the order of files and rules decides."""
    below = [(file, local) for file in files if (local := file.local(name)) is not None]
    for file, local in below:
        for rule in file.rules:
            if rule.regex is None and rule.name == local:
                return Translated(rule.url, file.transport(rule), file.file)
    for file, local in below:
        for rule in file.rules:
            if rule.regex is not None and (match := rule.regex.search(local)):
                return Translated(rule.expand(match), file.transport(rule), file.file)
    return None


def parse_translations(text: str, file: str) -> TranslationFile:
    """Raises InvalidRequest that names `file`, the place in it and the fault."""
    try:
        document = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as exc:
        mark = getattr(exc, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise InvalidRequest(f"image translation file {file}{where}: not YAML; correct or remove the file") from exc
    top = _Node(document if document is not None else {}, file, "the document")
    if top.has("spec"):
        top.only("apiVersion", "kind", "metadata", "spec")
        top = top.node("spec")
    top.only("prefix", "translations", "transports")
    transports = {name: _transport(node) for name, node in top.nodes_by_name("transports")}
    rules = tuple(_rule(node, transports) for node in top.nodes("translations"))
    return TranslationFile(file, top.text("prefix").strip("/"), rules, transports)


@dataclass(frozen=True, slots=True)
class _Node:
    """A YAML mapping with its file and place, for error texts."""

    value: Any
    file: str
    place: str

    def __post_init__(self) -> None:
        if not isinstance(self.value, dict) or not all(isinstance(key, str) for key in self.value):
            raise self.wrong("must be a mapping with strings as keys")

    def wrong(self, what: str) -> InvalidRequest:
        return InvalidRequest(f"image translation file {self.file}: {self.place} {what}; correct or remove the file")

    def has(self, key: str) -> bool:
        return key in self.value

    def only(self, *keys: str) -> None:
        if unknown := sorted(set(self.value) - set(keys)):
            raise self.wrong(f"has the unknown key {unknown[0]!r}, allowed are {', '.join(keys)}")

    def text(self, key: str) -> str:
        value = self.value.get(key)
        if value is not None and not isinstance(value, str):
            raise self.wrong(f"has a {key} that is not a string")
        return value or ""

    def number(self, key: str, default: int) -> int:
        value = self.value.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.wrong(f"has a {key} that is not a whole number of 0 or more")
        return value

    def flag(self, key: str) -> bool:
        value = self.value.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(f"has a {key} that is neither true nor false")
        return bool(value)

    def node(self, key: str) -> _Node:
        return _Node({} if self.value.get(key) is None else self.value[key], self.file, key)

    def nodes(self, key: str) -> list[_Node]:
        value = [] if self.value.get(key) is None else self.value[key]
        if not isinstance(value, list):
            raise self.wrong(f"has a {key} that is not a list")
        return [_Node(item, self.file, f"entry {number} of {key}") for number, item in enumerate(value, start=1)]

    def nodes_by_name(self, key: str) -> list[tuple[str, _Node]]:
        return [
            (name, _Node({} if item is None else item, self.file, f"{key} {name!r}"))
            for name, item in self.node(key).value.items()
        ]


def _rule(node: _Node, transports: Mapping[str, Transport]) -> Rule:
    # Virtlet's word is regexp.
    node.only("name", "regexp", "regex", "url", "transport")
    keys = ("name", "regexp", "regex", "url", "transport")
    name, regexp, regex, url, transport = (node.text(key) for key in keys)
    if sum(map(bool, (name, regexp, regex))) != 1:
        raise node.wrong("needs either a name or a regexp")
    regex = regexp or regex
    if not url:
        raise node.wrong("has no url")
    if transport and transport not in transports:
        raise node.wrong(f"names the transport {transport!r}, which the file does not have")
    if not regex:
        return Rule(url, transport, name=name)
    return Rule(url, transport, regex=_compiled(regex, node))


def _compiled(regex: str, rule: _Node) -> Regex:
    """Compiles with RE2, which has the syntax of Go's regexp, as used by Virtlet. Raises InvalidRequest."""
    import re2  # imported here: it takes more than a megabyte, and most nodes have no regexes

    named = Counter(_NAMED_GROUP.findall(regex))
    if twice := next((name for name in named if name and named[name] > 1), None):
        # Go uses the group that matched; RE2's Python bindings find only the first group of a name.
        raise rule.wrong(f"has a bad regex (two groups have the name {twice!r}; each needs its own)")
    options = re2.Options()
    options.max_mem = _REGEX_BYTES
    options.log_errors = False
    try:
        compiled: Regex = re2.compile(regex, options)
    except UnicodeEncodeError as exc:
        raise rule.wrong("has a bad regex (it contains half of a surrogate pair)") from exc
    except re2.error as exc:
        why = exc.args[0].decode("utf-8", "replace")
        raise rule.wrong(f"has a bad regex ({why}; RE2 has no lookaround and no backreferences)") from exc
    return compiled


def _transport(node: _Node) -> Transport:
    node.only("timeout", "maxRedirects", "proxy", "tls")
    milliseconds = node.number("timeout", 0)
    proxy = node.text("proxy")
    if proxy and not proxy.startswith(("http://", "https://")):
        raise node.wrong("has a proxy that is not an http:// or https:// URL; others are not supported")
    return Transport(
        timeout=milliseconds / 1000 if milliseconds else None,
        max_redirects=node.number("maxRedirects", DEFAULT_MAX_REDIRECTS),
        proxy=proxy,
        tls=_tls(node),
    )


def _tls(transport: _Node) -> TlsProfile:
    node = transport.node("tls")
    node.only("certificates", "serverName", "insecure")
    cas: list[str] = []
    clients: list[tuple[str, str]] = []
    for certificate in node.nodes("certificates"):
        certificate.only("cert", "key")
        cert, key = certificate.text("cert"), certificate.text("key")
        if not cert:
            raise certificate.wrong("has no cert")
        if key:
            clients.append((cert, key))
        else:
            cas.append(cert)
    if len(clients) > 1:
        raise node.wrong("has more than one certificate with a key; only one client certificate is supported")
    return TlsProfile(tuple(cas), clients[0] if clients else None, node.text("serverName"), node.flag("insecure"))
