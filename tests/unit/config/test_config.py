"""Settings come from file, drop-ins and environment, and all faults are reported at once."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from virtshim.cli.node_dir import to_toml
from virtshim.config import settings as config
from virtshim.config.agent import agent_settings
from virtshim.model.errors import InvalidRequest

pytestmark = pytest.mark.usefixtures("clean_environment")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "config.toml"


def test_the_defaults_apply_without_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(config, "DEFAULT_FILE", str(tmp_path / "absent.toml"))
    settings = config.load_settings()
    assert settings.paths.state_dir == "/var/lib/virtshim"
    assert settings.cri_socket == "/run/virtshim/virtshim.sock"
    assert settings.vm.default_memory == 1 << 30


def test_the_default_file_is_read_if_it_is_there(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    file.write_text("[vm]\nmax_vcpus = 3\n")
    monkeypatch.setattr(config, "DEFAULT_FILE", str(file))
    assert config.load_settings().vm.max_vcpus == 3


def test_an_explicitly_named_file_must_exist(file: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"config\.toml: cannot be read: No such file"):
        config.load_settings(str(file))


def test_drop_ins_are_read_without_the_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drop_in = Path(f"{file}.d/10.toml")
    drop_in.parent.mkdir()
    drop_in.write_text("[vm]\nmax_vcpus = 3\n")
    assert config.load_settings(str(file)).vm.max_vcpus == 3
    monkeypatch.setattr(config, "DEFAULT_FILE", str(file))
    loaded = config.read_settings()
    assert (loaded.settings.vm.max_vcpus, loaded.place(("vm", "max_vcpus"))) == (3, f"{drop_in}:2")
    drop_in.write_text("[vm]\nmax_vcpu = 3\n")
    with pytest.raises(InvalidRequest, match=r"10\.toml:2: vm\.max_vcpu"):
        config.load_settings()


def test_drop_ins_win_over_the_file_in_the_order_of_their_names(file: Path) -> None:
    file.write_text('[vm]\nmax_vcpus = 1\ndefault_memory = "2GiB"\n[log]\nlevel = "debug"\n')
    drop_ins = Path(f"{file}.d")
    drop_ins.mkdir()
    (drop_ins / "20-later.toml").write_text("[vm]\nmax_vcpus = 20\n")
    (drop_ins / "10-first.toml").write_text('[vm]\nmax_vcpus = 10\nmin_memory = "64MiB"\n')
    (drop_ins / "30-ignored.conf").write_text("not toml at all")
    settings = config.load_settings(str(file))
    assert (settings.vm.max_vcpus, settings.vm.default_memory, settings.vm.min_memory) == (20, 2 << 30, 64 << 20)
    assert settings.log.level == "debug"


def test_the_environment_wins_over_the_file_setting_by_setting(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text('[vm]\nmax_vcpus = 1\ndefault_memory = "2GiB"\n')
    monkeypatch.setenv("VIRTSHIM_VM__MAX_VCPUS", "7")
    monkeypatch.setenv("VIRTSHIM_LIBVIRT__URI", "test:///default")
    settings = config.load_settings(str(file))
    assert (settings.vm.max_vcpus, settings.vm.default_memory) == (7, 2 << 30)
    assert settings.libvirt.uri == "test:///default"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("[vmm]\nx = 1\n", ["vmm"]),
        ("[vm]\nmax_vcpu = 1\n", ["vm.max_vcpu"]),
        ('[vm]\nmax_vcpus = "many"\n', ["vm.max_vcpus"]),
        ("[vm]\nmax_vcpus = 0\n", ["vm.max_vcpus"]),
        (
            '[vm]\ndefault_memory = "2 gigs"\n',
            ["vm.default_memory: must be a size, such as 4GiB, 512MiB or a number of bytes; it is '2 gigs'"],
        ),
        ('[paths]\nstate_dir = "relative"\n', ["paths.state_dir"]),
        ('[libvirt]\ndomain_type = "xen"\n', ["libvirt.domain_type"]),
        ('[paths]\nrun_dir = "/' + "r" * 60 + '"\n', ["run_dir is 61 bytes long"]),
        ("vm = 3\n", ["vm"]),
        (
            '[vm]\nmax_vcpus = 0\n[log]\nlevel = "loud"\n[cri]\nstop_timeout = -1\nsokcet = "/x"\n',
            ["vm.max_vcpus", "log.level", "cri.stop_timeout", "cri.sokcet"],
        ),
    ],
)
def test_all_bad_keys_are_reported_at_once_with_the_file(file: Path, text: str, names: list[str]) -> None:
    file.write_text(text)
    with pytest.raises(InvalidRequest) as faults:
        config.load_settings(str(file))
    for name in (*names, str(file), "virtshim config schema"):
        assert name in str(faults.value)


def test_a_bad_value_of_the_environment_is_an_error(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("")
    monkeypatch.setenv("VIRTSHIM_VM__MAX_VCPUS", "many")
    with pytest.raises(InvalidRequest, match=r"vm\.max_vcpus"):
        config.load_settings(str(file))


def test_faults_name_the_line_of_the_file_or_the_variable(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("# ours\n[vm]\nmax_vcpus = 0\n\n[libvirt]\nconfine = [\n  'landlock',\n  'magic',\n]\n")
    drop_in = Path(f"{file}.d/10-more.toml")
    drop_in.parent.mkdir()
    drop_in.write_text(
        '[[device_plugin.resources]]\nvendor = "8086"\nname = "a.b/c"\n[[device_plugin.resources]]\nname = "x"\n'
    )
    monkeypatch.setenv("VIRTSHIM_CRI__MAX_CALLS", "3")
    monkeypatch.setenv("VIRTSHIM_LIBVIRT__PARTS", "[/opt")
    with pytest.raises(config.BadConfiguration) as refused:
        config.load_settings(str(file))
    assert [fault.split(": ")[0:2] for fault in refused.value.faults] == [
        ["VIRTSHIM_LIBVIRT__PARTS", "is not JSON"],
        ["VIRTSHIM_CRI__MAX_CALLS", "cri.max_calls"],
        [f"{file}:6", "libvirt.confine[1]"],
        [f"{file}:3", "vm.max_vcpus"],
        [f"{drop_in}:5", "device_plugin.resources[1].name"],
    ]


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("[vm]\nmax_vcpu = 1", "did you mean vm.max_vcpus?"),
        ("[vms]\nmax_vcpus = 1", "did you mean vm?"),
        ("[vm]\npull_timeout = 1", "did you mean images.pull_timeout?"),
        ("[proxy.primary]\nsoket = '/x'", "did you mean proxy.primary.socket?"),
        ("[log]\ncolour = 1", "[log] has level, format"),
        ("[frobnicate]", "there are the tables paths, cri"),
    ],
)
def test_an_unknown_setting_suggests_the_name_that_was_meant(file: Path, text: str, meant: str) -> None:
    file.write_text(text)
    with pytest.raises(config.BadConfiguration) as refused:
        config.load_settings(str(file))
    (fault,) = refused.value.faults
    assert meant in fault


@pytest.mark.parametrize(
    ("variable", "fault"),
    [
        ("VIRTSHIM_LOG_LEVEL", "VIRTSHIM_LOG_LEVEL: no setting has this variable; did you mean VIRTSHIM_LOG__LEVEL?"),
        ("VIRTSHIM_LOG__LEVL", "VIRTSHIM_LOG__LEVL: log.levl: there is no such setting; did you mean log.level?"),
        ("VIRTSHIM_LGO__LEVEL", "VIRTSHIM_LGO__LEVEL: lgo: there is no such setting; did you mean log?"),
    ],
)
def test_a_misspelt_variable_is_a_fault(file: Path, variable: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("")
    monkeypatch.setenv(variable, "info")
    with pytest.raises(config.BadConfiguration) as refused:
        config.load_settings(str(file))
    assert refused.value.faults == (fault,)


def test_variables_that_kubernetes_sets_for_services_are_ignored(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("")
    monkeypatch.setenv("VIRTSHIM_SERVICE_HOST", "10.0.0.1")  # Kubernetes, for a Service of that name
    monkeypatch.setenv("VIRTSHIM_PORT_443_TCP", "tcp://10.0.0.1:443")
    assert config.load_settings(str(file)) == config.Settings()


def test_lists_and_whole_tables_are_json_in_the_environment(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text('[vm]\nmax_vcpus = 3\n[images]\ninsecure_registries = ["a"]\n')
    monkeypatch.setenv("VIRTSHIM_IMAGES__INSECURE_REGISTRIES", '["b", "c:5000"]')
    monkeypatch.setenv("VIRTSHIM_VM", '{"room_vcpus": 2}')
    monkeypatch.setenv("VIRTSHIM_VM__ROOM_VCPUS", "4")
    settings = config.load_settings(str(file))
    assert settings.images.insecure_registries == ("b", "c:5000")
    assert (settings.vm.max_vcpus, settings.vm.room_vcpus) == (3, 4)


def test_the_place_of_a_setting_is_where_it_was_set_last(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text('[vm]\nmax_vcpus = 1\nmin_memory = "64MiB"\n[proxy]\nothers = [{name = "a"}]\n')
    drop_in = Path(f"{file}.d/10.toml")
    drop_in.parent.mkdir()
    drop_in.write_text('vm.max_vcpus = 2\n[[proxy.others]]\nname = "b"\n')
    monkeypatch.setenv("VIRTSHIM_LOG__LEVEL", "debug")
    loaded = config.read_settings(str(file))
    assert loaded.place(("vm", "max_vcpus")) == f"{drop_in}:1"
    assert loaded.place(("vm", "min_memory")) == f"{file}:3"
    assert loaded.place(("proxy", "others")) == f"{drop_in}:2"
    assert loaded.place(("log", "level")) == "VIRTSHIM_LOG__LEVEL"
    assert loaded.place(("log", "format")) == ""


@pytest.mark.parametrize("content", [b"[vm\n", b"\xff\xfe", b"[vm]\nmax_vcpus = 1\n[vm]\n"])
def test_a_file_that_is_not_toml_is_named(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    with pytest.raises(InvalidRequest, match=r"config\.toml:?\d*: is not TOML"):
        config.load_settings(str(file))


def test_settings_are_frozen() -> None:
    settings = config.Settings()
    with pytest.raises(ValidationError):
        settings.vm = config.Vm()
    with pytest.raises(ValidationError):
        settings.vm.max_vcpus = 3


def test_the_longest_allowed_run_dir_has_room_for_every_socket() -> None:
    settings = config.Settings(paths=config.Paths(run_dir="/" + "r" * 59))
    assert len(settings.cri_socket) <= 107


def test_shown_settings_are_a_file_that_loads_to_the_same_settings(file: Path) -> None:
    shown = json.loads(config.Settings().model_dump_json())
    file.write_text(to_toml(shown))
    assert config.load_settings(str(file)) == config.Settings()


def test_merging_two_tables_keeps_both() -> None:
    low: dict[str, Any] = {"a": {"x": 1, "y": 2}, "b": [1]}
    high: dict[str, Any] = {"a": {"y": 3}, "b": [2], "c": 4}
    assert config.merged_settings(low, high) == {"a": {"x": 1, "y": 3}, "b": [2], "c": 4}
    assert low == {"a": {"x": 1, "y": 2}, "b": [1]}


def test_the_layout_follows_the_paths() -> None:
    layout = config.Settings(paths=config.Paths(state_dir="/s", run_dir="/r")).layout()
    assert (layout.database, layout.sockets) == ("/s/state.db", "/r/vm")


@pytest.mark.parametrize(
    ("text", "environ"),
    [
        ("", {}),
        ('[paths]\nrun_dir = "/run/a"\n[images]\ntranslations_dir = "/b"\ndownload_protocol = "http"\n', {}),
        ('[paths]\nrun_dir = "/run/a"\n', {"VIRTSHIM_PATHS__RUN_DIR": "/run/c", "VIRTSHIM_IMAGES__TRANSLATIONS_DIR": "/d"}),
        ("", {"VIRTSHIM_IMAGES": '{"translations_dir": "/e"}'}),
    ],
)  # fmt: skip
def test_an_agent_reads_the_same_settings_as_virtshim(
    file: Path, monkeypatch: pytest.MonkeyPatch, text: str, environ: dict[str, str]
) -> None:
    file.write_text(text)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    whole, found = config.read_settings(str(file)).settings, agent_settings(str(file))
    assert (found.run_dir, found.translations_dir) == (whole.paths.run_dir, whole.images.translations_dir)


@pytest.mark.parametrize(
    ("text", "environ", "fault"),
    [
        ('[paths]\nrun_dir = "relative"\n', {}, r":2: paths\.run_dir: must be an absolute path"),
        ("[images]\ntranslations_dir = 3\n", {}, r":2: images\.translations_dir: must be an absolute path"),
        ("paths = 3\n", {}, r":1: paths: must be a table"),
        ("[paths\n", {}, "is not TOML"),
        ("", {"VIRTSHIM_PATHS_RUN_DIR": "/run/a"}, "did you mean VIRTSHIM_PATHS__RUN_DIR"),
    ],
)
def test_an_agent_names_the_fault_of_a_setting_that_it_reads(
    file: Path, text: str, environ: dict[str, str], fault: str
) -> None:
    file.write_text(text)
    with pytest.raises(InvalidRequest, match=fault):
        agent_settings(str(file), environ)
