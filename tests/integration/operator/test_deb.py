"""The Debian package: what is in it, and that it can be built again."""

from __future__ import annotations

import gzip
import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from deb.manpages import pages

from virtshim.cli.main import app

pytestmark = [pytest.mark.operator, pytest.mark.timeout(300)]

UNITS = ("tapmanager", "virtshim-shares", "virtshim", "virtshim-proxy", "virtshim-device-plugin")


def built(project: Path, directory: Path) -> Path:
    if shutil.which("dpkg-deb") is None:
        pytest.skip("NOT TESTED: dpkg-deb is not installed")
    directory.mkdir(parents=True)
    # A directory for its work of its own: its name gets into what is not careful.
    environment = {**os.environ, "SOURCE_DATE_EPOCH": "1700000000", "TMPDIR": str(directory)}
    argv = ["sh", "-c", 'umask 077; exec "$@"', "sh", str(project / "deploy/deb/build.sh"), str(directory), "7.8.9"]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return directory / "virtshim_7.8.9_amd64.deb"


@pytest.fixture(scope="module")
def package(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(pytestconfig.rootpath, tmp_path_factory.mktemp("deb") / "first")


@pytest.fixture(scope="module")
def root(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unpacked, with DEBIAN beside usr."""
    directory = tmp_path_factory.mktemp("unpacked")
    subprocess.run(["dpkg-deb", "--raw-extract", str(package), str(directory)], check=True)
    return directory


def test_the_same_sources_give_the_same_bytes(
    package: Path, pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> None:
    again = built(pytestconfig.rootpath, tmp_path_factory.mktemp("another") / "place")
    digests = [hashlib.sha256(one.read_bytes()).hexdigest() for one in (package, again)]
    assert digests[0] == digests[1]


def test_no_file_tells_where_it_was_built(root: Path, package: Path, pytestconfig: pytest.Config) -> None:
    places = [str(package.parent).encode(), str(pytestconfig.rootpath).encode() + b"/"]
    found = [
        str(path.relative_to(root))
        for path in root.rglob("*")
        if path.is_file() and not path.is_symlink() and any(place in path.read_bytes() for place in places)
    ]
    assert found == []


def test_every_program_that_a_unit_starts_is_in_it_and_every_document_that_it_names(root: Path) -> None:
    for unit in UNITS:
        text = (root / f"lib/systemd/system/{unit}.service").read_text()
        (program,) = re.findall(r"^ExecStart=/(\S+)", text, re.MULTILINE)
        assert os.access(root / program, os.X_OK), program
        (document,) = re.findall(r"^Documentation=file:/(\S+)", text, re.MULTILINE)
        assert (root / document).is_file(), document
    assert (root / "usr/bin/virtshim").resolve() == root / "usr/lib/virtshim/bin/virtshim"
    assert os.access(root / "usr/libexec/virtshim/vmwrapper", os.X_OK)
    assert list((root / "usr/lib/virtshim/lib").glob("python3.*/site-packages/virtshim/dashboard/dist/index.html"))


def test_it_has_what_prometheus_and_grafana_read_and_a_driver_that_kubelet_can_run(
    root: Path, pytestconfig: pytest.Config
) -> None:
    ours = {path.name: path.read_bytes() for path in (pytestconfig.rootpath / "deploy/monitoring").iterdir()}
    assert {"alerts.yaml", "grafana-dashboard.json"} <= set(ours)
    shipped = root / "usr/share/virtshim/monitoring"
    assert {path.name: path.read_bytes() for path in shipped.iterdir()} == ours
    assert os.access(root / "usr/share/virtshim/flexvolume_driver", os.X_OK)


def test_its_program_runs_from_its_own_packages_alone(root: Path) -> None:
    site = next((root / "usr/lib/virtshim/lib").glob("python3.*/site-packages"))
    look = "import sys; sys.path[:] = [one for one in sys.path if 'site-packages' not in one] + [sys.argv.pop(1)]"
    run = f"{look}; from virtshim.cli.main import main; main()"
    done = subprocess.run(
        ["/usr/bin/python3", "-IS", "-c", run, str(site), "version"], capture_output=True, text=True, check=False
    )
    assert done.stdout == "7.8.9\n", done.stderr


def test_only_root_writes_to_it_and_everybody_reads_it(package: Path) -> None:
    listed = subprocess.run(["dpkg-deb", "-c", str(package)], capture_output=True, text=True, check=True).stdout
    kinds = {(line.split()[0], line.split()[1]) for line in listed.splitlines() if line[0] != "l"}
    assert kinds == {("drwxr-xr-x", "root/root"), ("-rw-r--r--", "root/root"), ("-rwxr-xr-x", "root/root")}


def test_it_depends_on_what_a_node_needs(root: Path, pytestconfig: pytest.Config) -> None:
    """The first group of set-up; what is there for people is recommended."""
    setup = (pytestconfig.rootpath / "deploy/setup.sh").read_text()
    group = re.search(r"# the product:.*\n((?:  [^#\n].*\n)+)", setup)
    assert group
    control = (root / "DEBIAN/control").read_text()
    (depends,) = re.findall(r"^Depends: (.*)$", control, re.MULTILINE)
    (recommends,) = re.findall(r"^Recommends: (.*)$", control, re.MULTILINE)
    assert set(group[1].split()) - set(re.findall(r"[a-z][a-z0-9.+-]+", f"{depends} {recommends}")) == set()
    assert f"python3 (>= {sys.version_info[0]}.{sys.version_info[1]})" in depends


def test_its_apparmor_rules_are_those_that_the_documents_give(root: Path) -> None:
    document = (root / "usr/share/doc/virtshim/operator.md").read_text()
    rules = [path for path in (root / "usr/share/virtshim/apparmor").rglob("*") if path.is_file()]
    assert len(rules) == 2
    for path in rules:
        for line in path.read_text().splitlines():
            assert f"    {line}\n" in document


def test_every_command_has_a_manual_page(root: Path) -> None:
    group = typer.main.get_command(app)
    commands = [f"virtshim-{name}" for name in group.list_commands(typer.Context(group))]
    for name in ("virtshim", *commands):
        page = gzip.decompress((root / f"usr/share/man/man8/{name}.8.gz").read_bytes()).decode()
        assert page.startswith(f'.TH "{name.upper()}" "8"')
        assert ".SH SYNOPSIS" in page


def test_a_page_says_what_the_help_of_its_command_says() -> None:
    small = typer.Typer(add_completion=False)

    @small.command()
    def hold(pod: str, grace: int = typer.Option(30, "--grace", help="seconds; 'none' is .5")) -> None:
        """Hold a pod (gently). It runs on.

        .hidden is not a macro.
        """

    @small.command(hidden=True)
    def secret() -> None:
        """Nobody's."""

    found = dict(pages(small, "it", "1", 0))
    assert set(found) == {"it.8", "it-hold.8"}
    page = found["it-hold.8"]
    assert "it\\-hold \\- Hold a pod\n" in page
    assert "\n\\&.hidden is not a macro.\n" in page
    assert ".B \\-\\-grace <int>\nseconds; \\(aqnone\\(aq is .5 [default: 30]\n" in page


@pytest.mark.parametrize(
    ("shell", "path"),
    [
        ("bash", "usr/share/bash-completion/completions/virtshim"),
        ("zsh", "usr/share/zsh/vendor-completions/_virtshim"),
        ("fish", "usr/share/fish/vendor_completions.d/virtshim.fish"),
    ],
)
def test_a_shell_completes_commands_by_asking_the_program(root: Path, shell: str, path: str) -> None:
    (instruction,) = set(re.findall(r"_VIRTSHIM_COMPLETE=(\w+)", (root / path).read_text()))
    asked = {
        "bash": {"COMP_WORDS": "virtshim con", "COMP_CWORD": "1"},
        "zsh": {"_TYPER_COMPLETE_ARGS": "virtshim con"},
        "fish": {"_TYPER_COMPLETE_ARGS": "virtshim con", "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
    }[shell]
    done = subprocess.run(
        [sys.executable, "-c", "import sys; sys.argv[0] = 'virtshim'; from virtshim.cli.main import main; main()"],
        capture_output=True, text=True, check=False, env={**os.environ, "_VIRTSHIM_COMPLETE": instruction, **asked},
    )  # fmt: skip
    assert "console" in done.stdout, done.stdout + done.stderr
    assert "proxy" not in done.stdout


@pytest.mark.parametrize("name", ["postinst", "prerm", "postrm"])
def test_a_script_of_the_package_is_one_for_every_shell(root: Path, name: str) -> None:
    done = subprocess.run(["dash", "-n", str(root / "DEBIAN" / name)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
