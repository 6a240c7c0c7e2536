"""The reference page agrees with the code about each setting, and each setting has a reason."""

from typing import Any

import pytest
from pydantic import BaseModel

from virtshim.config.faults import dotted, table_in
from virtshim.config.reference import page
from virtshim.config.settings import Settings


def fields(model: type[BaseModel], at: tuple[str, ...] = ()) -> Any:
    for name, info in model.model_fields.items():
        if at:
            yield dotted((*at, name)), info
        if inner := table_in(model, name):
            yield from fields(inner, (*at, name))


def test_the_page_is_what_the_command_prints(project: Any) -> None:
    written = (project.root / "docs/configuration.md").read_text()
    if written != page(Settings):
        pytest.fail("docs/configuration.md is old: `virtshim config reference > docs/configuration.md`", pytrace=False)


@pytest.mark.parametrize("what", ["meaning", "reason"])
def test_every_setting_has_a_meaning_and_a_reason(what: str) -> None:
    """`virtshim.config.texts.setting(default, meaning, why=...)`; a setting without a default needs no reason for it."""
    silent = [
        name
        for name, info in fields(Settings)
        if not info.is_required() and table_in(Settings, name) is None
        if not (info.description if what == "meaning" else (info.json_schema_extra or {}).get("why"))
    ]
    assert silent == []


def test_every_number_that_is_not_a_count_has_a_unit() -> None:
    unitless = [
        name
        for name, info in fields(Settings)
        if isinstance(info.default, float) and not (info.json_schema_extra or {}).get("unit")
        if not any(getattr(limit, "le", None) == 1 for limit in info.metadata)
    ]
    assert unitless == []
