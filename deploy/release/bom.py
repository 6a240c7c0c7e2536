"""The bill of materials of a release, as CycloneDX: the Python packages that the Debian package and the image bring.

python deploy/release/bom.py VERSION LOCK > virtshim.cdx.json     (time: SOURCE_DATE_EPOCH)
"""

from __future__ import annotations

import os
import re
import sys
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

_PIN = re.compile(r"^([A-Za-z0-9._-]+)==(\S+)", re.MULTILINE)


def as_json(version: str, lock: str, epoch: int) -> str:
    """`lock`: the text of a lock that pip-compile wrote. `epoch`: seconds since 1970. The same input gives the same text."""
    own = Component(name="virtshim", version=version, type=ComponentType.APPLICATION, bom_ref="virtshim")
    packages = list(_packages(lock))
    made = Bom(components=packages, serial_number=uuid.uuid5(uuid.NAMESPACE_URL, f"{version} {epoch} {lock}"))
    made.metadata.component, made.metadata.timestamp = own, datetime.fromtimestamp(epoch, UTC)
    made.register_dependency(own, packages)
    return JsonV1Dot6(made).output_as_string(indent=2)


def _packages(lock: str) -> Iterator[Component]:
    for name, version in _PIN.findall(lock):
        url = PackageURL("pypi", name=name.lower(), version=version)
        yield Component(name=name, version=version, purl=url, bom_ref=str(url))


if __name__ == "__main__":
    text = Path(sys.argv[2]).read_text(encoding="utf-8")
    print(as_json(sys.argv[1], text, int(os.environ["SOURCE_DATE_EPOCH"])))
