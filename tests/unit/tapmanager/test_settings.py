"""Settings: one table for file and flags; all that is wrong is told at once; defaults agree with virtshim's own table."""

from __future__ import annotations

import dataclasses
import grp
from pathlib import Path

import pytest

from tapmanager import settings, toml_files
from tapmanager.errors import TapmanagerError
from tapmanager.settings import Settings
from tapmanager.shares import __main__ as shares
from virtshim.config import settings as config


def test_names_and_defaults_are_those_of_virtshims_config() -> None:
    theirs = config.Tapmanager().model_dump()
    assert {one.name: one.default for one in dataclasses.fields(Settings)} == theirs


def test_flags_win_over_drop_ins_and_drop_ins_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('[tapmanager]\nsocket = "/a"\nnetns_dir = "/b"\ncni_conf_dir = "/c"\n[other]\nx = 1\n')
    (tmp_path / "config.toml.d").mkdir()
    (tmp_path / "config.toml.d" / "10.toml").write_text('[tapmanager]\nnetns_dir = "/bb"\ncni_bin_dir = ["/x", "/y"]\n')
    found = settings.load(["--config", str(file), "--cni-conf-dir", "/ccc"])
    assert (found.socket, found.netns_dir, found.cni_conf_dir, found.cni_bin_dir) == ("/a", "/bb", "/ccc", ("/x", "/y"))


def test_the_default_file_may_be_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The unit names it."""
    file = tmp_path / "config.toml"
    monkeypatch.setattr(toml_files, "DEFAULT_FILE", str(file))
    assert settings.load(["--config", str(file)]) == Settings()
    assert shares.load(str(file)) == shares.ShareSettings()
    (tmp_path / "config.toml.d").mkdir()
    (tmp_path / "config.toml.d" / "10.toml").write_text('[tapmanager]\nsocket = "/a"\n[shares]\nsocket = "/b"\n')
    assert settings.load(["--config", str(file)]).socket == "/a"
    assert shares.load(str(file)).socket == "/b"


def test_a_flag_for_a_list_may_be_repeated() -> None:
    assert settings.load(["--cni-bin-dir", "/x", "--cni-bin-dir", "/y"]).cni_bin_dir == ("/x", "/y")


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(
        '[tapmanager]\nsocket = "rel"\ncolour = 1\ncni_timeout = -1\nlog_level = "loud"\ncni_bin_dir = []\n'
    )
    with pytest.raises(TapmanagerError) as caught:
        settings.load(["--config", str(file)])
    for words in ("socket", "tapmanager.colour", "cni_timeout", "log_level", "cni_bin_dir"):
        assert words in str(caught.value)


@pytest.mark.parametrize("text", ["tapmanager = 1", "[tapmanager", None])
def test_an_unusable_file_is_an_error(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "config.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(TapmanagerError, match=r"config\.toml"):
        settings.load(["--config", str(file)])


def test_the_qemu_user_is_a_name_or_a_uid() -> None:
    assert settings.qemu_user("root") == settings.QemuUser(0, 0)
    assert settings.qemu_user("0") == settings.QemuUser(0, 0)
    assert settings.qemu_user("4000000000").uid == 4000000000
    with pytest.raises(TapmanagerError, match=r"user .* does not exist"):
        settings.qemu_user("nobody-of-that-name")


def test_vms_may_have_another_group_than_the_qemu_users_own() -> None:
    assert settings.qemu_user("root", "tty").gid == grp.getgrnam("tty").gr_gid
    assert settings.qemu_user("root", "12345").gid == 12345
    with pytest.raises(TapmanagerError, match=r"group .* does not exist"):
        settings.qemu_user("root", "none-of-that-name")
