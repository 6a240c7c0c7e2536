"""At SIGHUP tapmanager applies all new settings that can change, or none."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tapmanager import settings
from tapmanager.daemon import Reload
from tapmanager.settings import Settings


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "config.toml").write_text("[tapmanager]\ncni_timeout = 5\n")
    return tmp_path / "config.toml"


@pytest.fixture
def used() -> list[Settings]:
    return []


@pytest.fixture
def reload(file: Path, used: list[Settings]) -> Reload[Settings]:
    argv = ["--config", str(file)]
    return Reload(settings.load(argv), lambda: settings.load(argv), settings.RELOADED, used.append)


def test_a_reload_applies_what_can_change_and_names_what_cannot(
    file: Path, reload: Reload[Settings], used: list[Settings], caplog: pytest.LogCaptureFixture
) -> None:
    file.write_text('[tapmanager]\ncni_timeout = 7\nlog_level = "debug"\nsocket = "/elsewhere"\n')
    with caplog.at_level(logging.INFO):
        assert reload.again()
        assert reload.again()
    assert [(one.cni_timeout, one.log_level, one.socket) for one in used] == [(7.0, "debug", Settings().socket)] * 2
    assert "settings.reloaded changed=cni_timeout,log_level" in caplog.text
    assert "settings.reloaded changed=nothing" in caplog.text
    assert caplog.text.count("settings.need_restart settings=socket") == 2  # until somebody does it


def test_bad_settings_leave_the_old_settings_in_force(
    file: Path, reload: Reload[Settings], used: list[Settings], caplog: pytest.LogCaptureFixture
) -> None:
    file.write_text('[tapmanager]\ncni_timeout = 7\nlog_level = "loud"\ncolour = 1\n')
    assert not reload.again()
    assert (used, reload.in_force.cni_timeout) == ([], 5.0)
    for words in ("log_level: must be", "tapmanager.colour: there is no such setting", f"{file}:3", f"{file}:4"):
        assert words in caplog.text


def test_each_setting_that_tapmanager_reloads_is_documented_as_reloadable(reload: Reload[Settings]) -> None:
    from virtshim.app.reload import is_reloaded
    from virtshim.config.settings import Tapmanager

    said = {name for name in Tapmanager.model_fields if is_reloaded(Tapmanager, (name,))}
    assert said == set(reload.changeable)
