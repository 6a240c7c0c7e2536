"""One table gives tapmanager's settings for file and flags, reports all faults at once, and agrees with virtshim's own
table."""

from __future__ import annotations

import dataclasses
import grp
import json
from pathlib import Path

import pytest

from tapmanager import settings, toml_files
from tapmanager.errors import TapmanagerError
from tapmanager.settings import Settings
from tapmanager.shares import __main__ as shares
from virtshim.config import settings as config


def test_virtshims_config_has_each_setting() -> None:
    assert [one.name for one in dataclasses.fields(Settings)] == list(config.Tapmanager.model_fields)
    assert config.Tapmanager().model_dump() == dataclasses.asdict(Settings())


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("socket", "here"), ("cni_bin_dir", ["bin"]), ("cni_timeout", 0), ("undo_timeout", 3601), ("filter", "ip"),
        ("filter_by_pod", "often"), ("log_level", "loud"), ("qemu_user", ["root"]),
    ],
)  # fmt: skip
def test_tapmanager_and_virtshims_config_refuse_the_same(tmp_path: Path, name: str, bad: object) -> None:
    file = tmp_path / "config.toml"
    file.write_text(f"[tapmanager]\n{name} = {json.dumps(bad)}\n")
    with pytest.raises(TapmanagerError, match=rf"tapmanager\.{name}"):
        settings.load(["--config", str(file)])
    with pytest.raises(config.BadConfiguration, match=rf"tapmanager\.{name}"):
        config.load_settings(str(file))


@pytest.mark.parametrize("name", ["filter", "log_level"])
def test_virtshims_config_has_the_same_choices(name: str) -> None:
    (one,) = (one for one in dataclasses.fields(Settings) if one.name == name)
    assert config.Tapmanager.model_json_schema()["properties"][name]["enum"] == list(one.metadata["choices"])


def test_the_help_of_a_flag_says_what_the_page_of_all_settings_says(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")  # without hyphens at the ends of lines
    with pytest.raises(SystemExit):
        settings.load(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    for name, one in config.Tapmanager.model_fields.items():
        assert f"--{name.replace('_', '-')} VALUE {one.description}" in said
    assert "(default: 90.0 s)" in said


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
