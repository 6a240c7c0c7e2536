"""Reads the directory of image translation files, anew for each pull: an edit acts at once."""

from __future__ import annotations

from pathlib import Path

from virtshim.domain.errors import InvalidRequest
from virtshim.images.translations import TranslationFile, parse_translations

_MAX_BYTES = 1 << 20


def read_translations(directory: str) -> list[TranslationFile]:
    """All *.yaml and *.yml files, in order of their names; none if there is no directory. Raises InvalidRequest naming the
    file that is bad or cannot be read: a rule that is silently missing would send a name to another source."""
    try:
        entries = sorted(Path(directory).iterdir())
    except FileNotFoundError:
        return []
    except OSError as exc:
        raise InvalidRequest(f"image translation directory {directory}: {exc.strerror}") from exc
    wanted = [entry for entry in entries if entry.suffix in (".yaml", ".yml") and not entry.name.startswith(".")]
    return [parse_translations(_text(entry), str(entry)) for entry in wanted]


def _text(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            data = stream.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise InvalidRequest(f"image translation file {file}: larger than {_MAX_BYTES} bytes")
        return data.decode()
    except OSError as exc:
        raise InvalidRequest(f"image translation file {file}: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise InvalidRequest(f"image translation file {file}: not UTF-8") from exc
