"""docs/annotations.md agrees with the code about each hardware annotation. GOLDEN_UPDATE=1 writes it."""

import os
import re
from typing import Any

import pytest

from virtshim.annotations.hardware import ANNOTATIONS, Annotation, table
from virtshim.annotations.parse import parse_vm_options
from virtshim.model.hardware import HardwareOptions

_TABLE = re.compile(r"(?<=<!-- annotations -->\n\n).*?(?=\n\n<!-- end -->)", re.DOTALL)


def test_the_table_matches_the_code(project: Any) -> None:
    page = project.root / "docs/annotations.md"
    written = page.read_text()
    if os.environ.get("GOLDEN_UPDATE") == "1":
        page.write_text(_TABLE.sub(lambda _: table(), written))
    elif _TABLE.findall(written) != [table()]:
        pytest.fail("docs/annotations.md is old: run this test with GOLDEN_UPDATE=1", pytrace=False)


@pytest.mark.parametrize("one", ANNOTATIONS, ids=lambda one: one.name)
def test_each_example_is_accepted_and_has_an_effect(one: Annotation) -> None:
    assert parse_vm_options({one.name: one.example}).hardware != HardwareOptions()
    assert parse_vm_options({one.name: ""}).hardware == HardwareOptions()
