"""The Debian package has the right contents, is reproducible, and is installed and purged by dpkg. `make e2e-install`
tests it on a machine with systemd and VMs."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer
import yaml
from deb.manpages import pages

from virtshim.cli.main import app

pytestmark = [pytest.mark.operator, pytest.mark.timeout(300)]

UNITS = ("tapmanager", "virtshim-shares", "virtshim", "virtshim-proxy", "virtshim-device-plugin", "virtshim-agent")
# A domain that nobody can own.
PACKAGER = {"DEBFULLNAME": "Ada Packager", "DEBEMAIL": "ada@packages.test"}
PYTHON = "/usr/bin/python3"


def built(project: Path, directory: Path) -> Path:
    if shutil.which("dpkg-deb") is None:
        pytest.skip("NOT TESTED: dpkg-deb is not installed")
    directory.mkdir(parents=True)
    # A separate work directory, whose name would show up in a careless build.
    environment = {**os.environ, **PACKAGER, "SOURCE_DATE_EPOCH": "1700000000", "TMPDIR": str(directory)}
    argv = ["sh", "-c", 'umask 077; exec "$@"', "sh", str(project / "deploy/deb/build.sh"), str(directory), "7.8.9"]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    (package,) = directory.glob("*.deb")
    return package


@pytest.fixture(scope="module")
def package(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(pytestconfig.rootpath, tmp_path_factory.mktemp("deb") / "first")


@pytest.fixture(scope="module")
def root(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked package, with DEBIAN beside usr."""
    directory = tmp_path_factory.mktemp("unpacked")
    subprocess.run(["dpkg-deb", "--raw-extract", str(package), str(directory)], check=True)
    return directory


@pytest.mark.full
def test_the_package_is_reproducible(
    package: Path, pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> None:
    again = built(pytestconfig.rootpath, tmp_path_factory.mktemp("another") / "place")
    digests = [hashlib.sha256(one.read_bytes()).hexdigest() for one in (package, again)]
    assert digests[0] == digests[1]


def test_no_file_contains_the_build_directory(root: Path, package: Path, pytestconfig: pytest.Config) -> None:
    places = [str(package.parent).encode(), str(pytestconfig.rootpath).encode() + b"/"]
    found = [
        str(path.relative_to(root))
        for path in root.rglob("*")
        if path.is_file() and not path.is_symlink() and any(place in path.read_bytes() for place in places)
    ]
    assert found == []


def test_the_package_has_every_program_and_document_that_its_units_name(root: Path) -> None:
    for unit in UNITS:
        text = (root / f"usr/lib/systemd/system/{unit}.service").read_text()
        (program,) = re.findall(r"^ExecStart=/(\S+)", text, re.MULTILINE)
        assert os.access(root / program, os.X_OK), program
        (document,) = re.findall(r"^Documentation=file:/(\S+)", text, re.MULTILINE)
        assert (root / document).is_file(), document
    assert (root / "usr/bin/virtshim").resolve() == root / "usr/lib/virtshim/bin/virtshim"
    assert os.access(root / "usr/libexec/virtshim/vmwrapper", os.X_OK)
    assert list((root / "usr/lib/virtshim/lib").glob("python3.*/site-packages/virtshim/dashboard/dist/index.html"))


def test_no_unit_of_the_package_is_enabled(root: Path) -> None:
    assert [str(one) for one in root.rglob("*.wants")] == []


def test_the_package_has_alerts_a_dashboard_and_a_flexvolume_driver(root: Path, pytestconfig: pytest.Config) -> None:
    deploy, shipped = pytestconfig.rootpath / "deploy", root / "usr/share/virtshim"
    ours = {path.name: path.read_bytes() for path in (deploy / "monitoring").iterdir()}
    assert "grafana-dashboard.json" in ours
    found = {path.name: path.read_bytes() for path in (shipped / "monitoring").iterdir()}
    alerts = yaml.safe_load(found.pop("alerts.yaml"))
    assert found == ours
    assert alerts == yaml.safe_load((deploy / "kustomize/overlays/monitoring/alerts.yaml").read_text())["spec"]
    assert os.access(shipped / "flexvolume_driver", os.X_OK)


def test_the_package_has_what_kubectl_applies(root: Path, pytestconfig: pytest.Config) -> None:
    ours, shipped = (
        {path.relative_to(tree): path.read_bytes() for path in tree.rglob("*") if path.is_file()}
        for tree in (pytestconfig.rootpath / "deploy/kustomize", root / "usr/share/virtshim/kustomize")
    )
    assert Path("overlays/mixed/kustomization.yaml") in ours
    assert shipped == ours


def test_the_package_is_named_after_its_distribution_and_maintained_by_its_packager(root: Path, package: Path) -> None:
    said = Path("/etc/os-release").read_text()
    name, version = (re.findall(rf'^{key}="?([^"\n]+)', said, re.MULTILINE)[0] for key in ("ID", "VERSION_ID"))
    debians = f"7.8.9~{name.replace('debian', 'deb')}{version}"
    assert package.name == f"virtshim_{debians}_amd64.deb"
    control = (root / "DEBIAN/control").read_text()
    assert f"\nVersion: {debians}\n" in control
    assert "\nMaintainer: Ada Packager <ada@packages.test>\n" in control
    changelog = gzip.decompress((root / "usr/share/doc/virtshim/changelog.gz").read_bytes()).decode()
    assert changelog.startswith(f"virtshim ({debians}) ")
    assert "\n -- Ada Packager <ada@packages.test>  " in changelog


def releases(project: Path) -> dict[str, tuple[str, str]]:
    """Python, and the package with virtiofsd, of each release that the recipe knows."""
    text = (project / "deploy/deb/build.sh").read_text()
    rows = re.findall(r"^  (\S+)\) own_python=(\S+)(?: virtiofsd=(\S+))? ;;$", text, re.MULTILINE)
    return {release: (python, virtiofsd or "virtiofsd") for release, python, virtiofsd in rows}


def as_on(release: str, directory: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    """Runs a command where /etc/os-release is that of `release`, such as ubuntu24.04."""
    name, number = re.findall(r"([a-z]+)(.+)", release)[0]
    said = directory / "os-release"
    said.write_text(f'ID={"debian" if name == "deb" else name}\nVERSION_ID="{number}"\n')
    there = 'mount --bind "$1" /etc/os-release && shift && exec "$@"'
    words = ["unshare", "--mount", "sh", "-c", there, "sh", str(said), *argv]
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: wants root")
def test_each_distribution_names_its_package_so_that_apt_upgrades_it_with_the_node(
    pytestconfig: pytest.Config, tmp_path: Path
) -> None:
    recipe, versions = str(pytestconfig.rootpath / "deploy/deb/build.sh"), []
    for release in ("deb12", "deb13", "ubuntu24.04", "ubuntu26.04"):
        name = as_on(release, tmp_path, recipe, "--name", "7.8.9").stdout
        versions.append(name.removeprefix("virtshim_").removesuffix("_amd64.deb\n"))
    assert versions == ["7.8.9~deb12", "7.8.9~deb13", "7.8.9~ubuntu24.04", "7.8.9~ubuntu26.04"]
    for lower, higher in (versions[:2], versions[2:], (versions[1], "7.8.9"), ("7.8.8", versions[0])):
        subprocess.run(["dpkg", "--compare-versions", lower, "lt", higher], check=True)


def test_the_document_names_the_python_of_each_release(pytestconfig: pytest.Config) -> None:
    page = (pytestconfig.rootpath / "docs/install.md").read_text()
    rows = re.findall(r"^\| `virtshim_VERSION~(\S+)_amd64\.deb` \| .+? \| ([0-9.]+) \|", page, re.MULTILINE)
    known = releases(pytestconfig.rootpath)
    assert dict(rows) == {release: python for release, (python, _) in known.items()}
    assert known["ubuntu24.04"] == ("3.12", "virtiofsd")


@pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: wants root")
def test_a_build_with_another_python_than_the_releases_own_is_refused(
    pytestconfig: pytest.Config, tmp_path: Path
) -> None:
    here = subprocess.run([PYTHON, "--version"], capture_output=True, text=True, check=True).stdout
    own = here.split()[1].rpartition(".")[0]
    known = releases(pytestconfig.rootpath)
    other = next(release for release, (python, _) in known.items() if python != own)
    out = tmp_path / "out"
    done = as_on(other, tmp_path, str(pytestconfig.rootpath / "deploy/deb/build.sh"), str(out))
    assert (done.returncode, os.listdir(out)) == (1, []), done.stderr
    assert f"{PYTHON} is Python {own}, but {other} has Python {known[other][0]}" in done.stderr


def test_apt_installs_virtiofsd_when_a_node_gets_the_package_for_debian_13(
    pytestconfig: pytest.Config, tmp_path: Path
) -> None:
    """This asks for apt's plan and installs nothing. Debian 12's QEMU has a virtiofsd, Debian 13's has none. apt does not
    install a package by an upgrade if the earlier version recommended it, too."""
    recommends = re.findall(
        r"^Recommends: .*\n(?: .*\n)*", (pytestconfig.rootpath / "deploy/deb/control").read_text(), re.MULTILINE
    )[0]
    known = releases(pytestconfig.rootpath)

    def stanza(package: str, version: str, *more: str) -> str:
        head = (
            "Architecture: amd64",
            "Maintainer: Ada <ada@packages.test>",
            "Description: x",
            "Filename: ./x.deb",
            "Size: 1",
        )
        return "\n".join((f"Package: {package}", f"Version: {version}", *head, *more)) + "\n\n"

    def virtshim(release: str, *more: str) -> str:
        return stanza("virtshim", f"1.0~{release}", recommends.replace("@VIRTIOFSD@", known[release][1]).strip(), *more)

    there = "Status: install ok installed"
    (tmp_path / "Packages").write_text(
        virtshim("deb13") + stanza("virtiofsd", "1.13") + stanza("qemu-system-common", "1:10.0")
    )
    (tmp_path / "status").write_text(virtshim("deb12", there) + stanza("qemu-system-common", "1:10.0", there))
    (tmp_path / "sources").write_text(f"deb [trusted=yes] file:{tmp_path} ./\n")
    for directory in ("lists/partial", "cache/archives/partial", "empty"):
        (tmp_path / directory).mkdir(parents=True)
    places = {
        "Dir::State::lists": "lists", "Dir::State::status": "status", "Dir::State": ".", "Dir::Cache": "cache",
        "Dir::Etc::sourcelist": "sources", "Dir::Etc::sourceparts": "empty", "Dir::Etc::preferencesparts": "empty",
    }  # fmt: skip
    options = [word for key, name in places.items() for word in ("-o", f"{key}={tmp_path / name}")]
    options += ["-o", "APT::Architecture=amd64", "-o", "APT::Sandbox::User=root", "-o", "APT::Install-Recommends=true"]

    def apt(*words: str) -> str:
        done = subprocess.run(["apt-get", *options, *words], capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    apt("update")
    planned = re.findall(r"^Inst (\S+)", apt("--simulate", "install", "virtshim"), re.MULTILINE)
    assert sorted(planned) == ["virtiofsd", "virtshim"]


def test_a_maintainer_without_an_address_is_refused(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    done = subprocess.run(
        [str(pytestconfig.rootpath / "deploy/deb/build.sh"), str(tmp_path)],
        env={**os.environ, **PACKAGER, "DEBEMAIL": "ada"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, os.listdir(tmp_path)) == (1, [])
    assert "DEBFULLNAME and DEBEMAIL make no maintainer: Ada Packager <ada>" in done.stderr


def test_a_package_for_an_unknown_distribution_is_refused_with_the_known_ones(
    pytestconfig: pytest.Config, tmp_path: Path
) -> None:
    argv = [str(pytestconfig.rootpath / "deploy/deb/elsewhere.sh"), "buster", str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (done.returncode, os.listdir(tmp_path)) == (1, [])
    assert "bookworm (Debian 12), trixie (Debian 13), noble (Ubuntu 24.04)" in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: wants root")
def test_without_the_keys_of_ubuntus_archive_the_build_says_where_they_are(
    pytestconfig: pytest.Config, tmp_path: Path
) -> None:
    """Debian 12 has no package with them."""
    absent = str(tmp_path / "absent.gpg")
    done = subprocess.run(
        [str(pytestconfig.rootpath / "deploy/deb/elsewhere.sh"), "noble", str(tmp_path)],
        env={**os.environ, "UBUNTU_KEYRING": absent}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, os.listdir(tmp_path)) == (1, [])
    assert f"{absent} is missing; copy that file of an Ubuntu machine" in done.stderr
    assert "UBUNTU_KEYRING=FILE" in done.stderr


def test_lintian_finds_nothing(package: Path) -> None:
    """It also reports overrides that are not needed any more."""
    if shutil.which("lintian") is None:
        pytest.skip("NOT TESTED: lintian is not installed")
    argv = ["lintian", "--allow-root", "--fail-on=error,warning", "--tag-display-limit=9", str(package)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_every_compiled_module_loads(root: Path) -> None:
    """Their symbols are stripped."""
    site = next((root / "usr/lib/virtshim/lib").glob("python3.*/site-packages"))
    modules = sorted({str(path.relative_to(site)).split(".")[0].replace("/", ".") for path in site.rglob("*.so")})
    assert len(modules) > 20
    load = (
        "import importlib, sys; sys.path.append(sys.argv[1])\nfor name in sys.argv[2:]: importlib.import_module(name)"
    )
    done = subprocess.run([PYTHON, "-IS", "-c", load, str(site), *modules], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_program_runs_from_its_own_packages_alone(root: Path) -> None:
    site = next((root / "usr/lib/virtshim/lib").glob("python3.*/site-packages"))
    look = "import sys; sys.path[:] = [one for one in sys.path if 'site-packages' not in one] + [sys.argv.pop(1)]"
    run = f"{look}; from virtshim.cli.main import main; main()"
    done = subprocess.run([PYTHON, "-IS", "-c", run, str(site), "version"], capture_output=True, text=True, check=False)
    assert done.stdout == "7.8.9\n", done.stderr


def test_files_are_writable_by_root_only_and_readable_by_all(package: Path) -> None:
    listed = subprocess.run(["dpkg-deb", "-c", str(package)], capture_output=True, text=True, check=True).stdout
    kinds = {(line.split()[0], line.split()[1]) for line in listed.splitlines() if line[0] != "l"}
    assert kinds == {("drwxr-xr-x", "root/root"), ("-rw-r--r--", "root/root"), ("-rwxr-xr-x", "root/root")}


def test_the_package_depends_on_what_a_node_needs(root: Path, pytestconfig: pytest.Config) -> None:
    """The package depends on the first group of set-up; it recommends packages for people."""
    setup = (pytestconfig.rootpath / "deploy/setup.sh").read_text()
    group = re.search(r"# the product:.*\n((?:  [^#\n].*\n)+)", setup)
    assert group
    control = (root / "DEBIAN/control").read_text()
    (depends,) = re.findall(r"^Depends: (.*)$", control, re.MULTILINE)
    (recommends,) = re.findall(r"^Recommends: (.*)$", control, re.MULTILINE)
    assert set(group[1].split()) - set(re.findall(r"[a-z][a-z0-9.+-]+", f"{depends} {recommends}")) == set()
    # Its compiled packages work with this version alone.
    (needed,) = (root / "usr/lib/virtshim/lib").glob("python3.*")
    assert needed.name in depends.split(", ")
    assert os.readlink(root / "usr/lib/virtshim/bin/python3").endswith(f"/usr/bin/{needed.name}".removeprefix("/usr"))


def test_the_apparmor_rules_are_those_in_the_documents(root: Path) -> None:
    document = (root / "usr/share/doc/virtshim/install.md").read_text()
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


def test_each_manual_page_has_the_help_of_its_command() -> None:
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


@pytest.mark.parametrize("name", ["preinst", "postinst", "prerm", "postrm"])
def test_the_packages_scripts_run_in_every_shell(root: Path, name: str) -> None:
    done = subprocess.run(["dash", "-n", str(root / "DEBIAN" / name)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# Runs in a mount namespace of its own, with this machine's root file system below a layer in memory. What is
# installed there is gone with the namespace. No service runs there, not even systemd.
_LAYER = """
set -e
mount --make-rprivate /
mount -t tmpfs layer "$1"
mkdir "$1/upper" "$1/work" "$1/root"
mount -t overlay -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" overlay "$1/root"
mount --rbind /proc "$1/root/proc"
mount --rbind /dev "$1/root/dev"
for name in run tmp var/tmp; do mount -t tmpfs "$name" "$1/root/$name"; done
cp "$2" "$1/root/var/tmp/virtshim.deb"
echo ready
exec cat
"""


@dataclass(frozen=True)
class Node:
    """A Debian without systemd, in memory."""

    holder: int
    """A process of its mount namespace."""
    place: Path

    def run(self, *argv: str, code: int | None = 0) -> str:
        """Runs a command; returns its standard output. `code`: the expected exit code, None for any."""
        return self._enter("chroot", str(self.place / "root"), *argv, code=code)

    def changed(self, name: str) -> list[str]:
        """The files and directories of that name in the layer."""
        return self._enter("find", str(self.place / "upper"), "-iname", name).splitlines()

    def _enter(self, *argv: str, code: int | None = 0) -> str:
        done = subprocess.run(
            ["nsenter", f"--mount=/proc/{self.holder}/ns/mnt", *argv],
            capture_output=True, text=True, check=False, timeout=120,
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "DEBIAN_FRONTEND": "noninteractive"},
        )  # fmt: skip
        assert code is None or done.returncode == code, done.stdout + done.stderr
        return done.stdout


@pytest.fixture
def installed(package: Path, tmp_path: Path) -> Iterator[Node]:
    if os.geteuid() != 0:
        pytest.skip("NOT TESTED: wants root")
    argv = ["unshare", "--mount", "sh", "-c", _LAYER, "sh", str(tmp_path), str(package)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout
        assert holder.stdout.readline() == "ready\n"
        node = Node(holder.pid, tmp_path)
        node.run("dpkg", "--install", "/var/tmp/virtshim.deb")
        yield node
        assert holder.stdin
        holder.stdin.close()


def test_the_installed_program_runs_with_its_users_directories_and_units(installed: Node) -> None:
    assert installed.run("virtshim", "version") == "7.8.9\n"
    assert installed.run("dpkg-query", "--show", "--showformat=${db:Status-Status}", "virtshim") == "installed"
    assert "/usr/sbin/nologin" in installed.run("getent", "passwd", "virtshim-parser")
    assert (
        installed.run("stat", "--format=%F", "/etc/virtshim", "/var/lib/virtshim", "/run/virtshim") == 3 * "directory\n"
    )
    assert "751" in installed.run("dpkg-statoverride", "--list", "/var/lib/libvirt/qemu")
    for unit in UNITS:
        installed.run("systemd-analyze", "verify", "--man=no", f"/lib/systemd/system/{unit}.service")


def test_the_installed_check_finds_the_packages_parts_and_no_running_daemon(installed: Node) -> None:
    found = {one["subject"]: one for one in json.loads(installed.run("virtshim", "check", "--json", code=None))}
    for subject in ("root", "QEMU", "qemu-img", "volumes", "image parsers", "QEMU user", "vmwrapper"):
        assert found[subject]["level"] == "ok", found[subject]
    for daemon in ("tapmanager", "virtshim", "virtshim-shares"):
        assert found[daemon]["level"] == "warning", found[daemon]


def test_a_purge_leaves_nothing_of_the_package(installed: Node) -> None:
    assert installed.changed("*virtshim*") != []
    installed.run("dpkg", "--purge", "virtshim")
    assert installed.changed("*virtshim*") == []
    # The distribution's tools keep what their files were before: /etc/passwd-.
    naming = ("grep", "-rl", "--exclude=*-", "virtshim", "/etc", "/var/lib/dpkg/statoverride", "/var/lib/dpkg/status")
    assert installed.run(*naming, code=1) == ""


def test_an_upgrade_keeps_units_that_an_earlier_package_had_in_lib(installed: Node) -> None:
    """/lib is a link to /usr/lib, so dpkg knows the same file by two names."""
    earlier = "Package: virtshim\nVersion: 7.8.8\nArchitecture: amd64\nMaintainer: Ada <ada@packages.test>\nDescription: units\n"
    make = """
        set -e
        cd /var/tmp
        mkdir -p earlier/DEBIAN earlier/lib/systemd/system
        cp /usr/lib/systemd/system/virtshim*.service /usr/lib/systemd/system/tapmanager.* earlier/lib/systemd/system/
        printf %s "$1" > earlier/DEBIAN/control
        dpkg-deb --build earlier earlier.deb
        dpkg --install earlier.deb
        systemctl enable virtshim.service
    """
    installed.run("sh", "-c", make, "sh", earlier)
    assert "\n/lib/systemd/system/virtshim.service\n" in installed.run("dpkg", "--listfiles", "virtshim")
    installed.run("dpkg", "--install", "/var/tmp/virtshim.deb")
    assert "\n/usr/lib/systemd/system/virtshim.service\n" in installed.run("dpkg", "--listfiles", "virtshim")
    # All files are there and unchanged.
    assert installed.run("dpkg", "--verify", "virtshim") == ""
    assert installed.run("systemctl", "is-enabled", "virtshim.service") == "enabled\n"
    installed.run("test", "-e", "/etc/systemd/system/multi-user.target.wants/virtshim.service")


@pytest.mark.full
@pytest.mark.timeout(1500)
def test_the_package_for_another_debian_is_built_there_and_refused_here(
    installed: Node, pytestconfig: pytest.Config, tmp_path: Path
) -> None:
    here = installed.run("sh", "-c", ". /etc/os-release && echo $VERSION_CODENAME").strip()
    suite, release = {"bookworm": ("trixie", "deb13")}.get(here, ("bookworm", "deb12"))
    argv = [str(pytestconfig.rootpath / "deploy/deb/elsewhere.sh"), suite, str(tmp_path), "8.0.0"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if "cannot be had" in done.stderr:
        pytest.skip(f"NOT TESTED: {done.stderr[-200:]}")
    assert done.returncode == 0, done.stdout + done.stderr
    (package,) = tmp_path.glob("*.deb")
    assert package.name == f"virtshim_8.0.0~{release}_amd64.deb"

    shutil.copy(package, f"/proc/{installed.holder}/root{installed.place}/root/var/tmp/other.deb")
    said = installed.run("sh", "-c", "dpkg --install /var/tmp/other.deb 2>&1", code=1)
    assert f"virtshim: this package is for {release}, with Python 3." in said
    assert installed.run("virtshim", "version") == "7.8.9\n"
