"""`virtshim up --with-containerd` configures a containerd of the node's own."""

import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from virtshim.cli import containerd
from virtshim.cli.node_dir import NodeDir, NodeOptions, write_node
from virtshim.config.settings import Settings
from virtshim.model.errors import NotFound

pytestmark = [pytest.mark.operator, pytest.mark.proxy, pytest.mark.usefixtures("clean_environment")]


@pytest.fixture
def node() -> Iterator[NodeDir]:
    """With a short path."""
    with tempfile.TemporaryDirectory(prefix="n-") as directory:
        yield NodeDir.at(directory)


def settings_of(node: NodeDir, cni_bin_dir: Path) -> Settings:
    return write_node(node, NodeOptions(node.path, cni_bin_dir=str(cni_bin_dir), with_containerd=True))


def test_containerd_is_the_proxys_primary_and_uses_the_nodes_network(
    node: NodeDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for program in ("containerd", "runc"):
        (tmp_path / program).touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    settings = settings_of(node, tmp_path)
    containerd.set_up(node, settings)
    written = tomllib.loads(Path(node.containerd, "config.toml").read_text())
    assert written["grpc"]["address"] == settings.proxy.primary.socket == f"{node.run}/containerd.sock"
    network = written["plugins"]["io.containerd.grpc.v1.cri"]["cni"]
    assert network == {"bin_dir": str(tmp_path), "conf_dir": settings.tapmanager.cni_conf_dir}
    assert all(written[place].startswith(f"{node.path}/") for place in ("root", "state"))


def test_without_containerd_the_error_says_what_to_install(
    node: NodeDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        NotFound, match=r"--with-containerd: containerd is not installed; run `apt-get install containerd runc`"
    ):
        containerd.set_up(node, settings_of(node, tmp_path))


def test_a_node_that_never_had_containerd_has_nothing_to_remove(node: NodeDir) -> None:
    assert containerd.remove_pods(node) == []
