"""The proxy's settings decide which runtimes it serves."""

from pathlib import Path

import pytest

from virtshim.cli.proxy import proxy_command, routes
from virtshim.config.settings import Settings, load_settings
from virtshim.model.errors import InvalidRequest

PRIMARY = '[proxy.primary]\nsocket = "/run/crio/crio.sock"\nname = "crio"\n'


def loaded(path: Path, text: str) -> Settings:
    file = path / "config.toml"
    file.write_text(text)
    return load_settings(str(file))


def test_without_settings_the_proxy_serves_containerd_and_this_nodes_virtshim() -> None:
    made = routes(Settings())
    assert [(one.name, one.socket) for one in made.runtimes] == [
        ("containerd", "/run/containerd/containerd.sock"), ("virtlet.cloud", "/run/virtshim/virtshim.sock"),
    ]  # fmt: skip
    assert made.for_pod("virtshim", {}).name == "virtlet.cloud"
    assert made.for_image("virtlet.cloud/cirros", "", {}) is made.others[0]
    assert Settings().proxy_socket == "/run/virtshim/proxy.sock"


def test_drop_ins_may_add_any_number_of_runtimes(tmp_path: Path) -> None:
    (tmp_path / "config.toml.d").mkdir()
    (tmp_path / "config.toml.d/10.toml").write_text(
        '[[proxy.others]]\nwhen_down = "fail"\n'
        '[[proxy.others]]\nname = "kata"\nsocket = "/run/kata.sock"\nhandlers = ["kata"]\nimage_prefixes = []\n'
    )
    made = routes(loaded(tmp_path, PRIMARY))
    assert [(one.name, one.degraded) for one in made.runtimes] == [
        ("crio", False),
        ("virtlet.cloud", False),
        ("kata", True),
    ]


def test_a_list_of_the_primarys_handlers_is_complete(tmp_path: Path) -> None:
    made = routes(loaded(tmp_path, PRIMARY + 'handlers = ["runc"]\n'))
    assert made.for_pod("runc", {}).name == "crio"
    with pytest.raises(
        InvalidRequest, match="no runtime of this node has the RuntimeClass handler 'gvisor'; known are runc, virtshim"
    ):
        made.for_pod("gvisor", {})


def test_pods_of_the_handler_virtshim_pod_are_the_primarys_and_their_vm_virtshims(tmp_path: Path) -> None:
    """Only this node's virtshim can run a VM in another runtime's pod; the primary may name the handler as one of its own."""
    kata = '[[proxy.others]]\n[[proxy.others]]\nname = "kata"\nsocket = "/run/kata.sock"\nhandlers = []\nimage_prefixes = []'
    for text in ("", PRIMARY + 'handlers = ["runc"]', PRIMARY + 'handlers = ["virtshim-pod"]', PRIMARY + kata):
        made = routes(loaded(tmp_path, text))
        assert made.for_pod("virtshim-pod", {}) is made.primary
        assert made.vms_of("virtshim-pod") is made.vms is made.others[0]
        assert made.vms_of("virtshim") is made.vms_of("") is None
    made = routes(loaded(tmp_path, '[[proxy.others]]\nsocket = "/run/kata.sock"'))
    assert made.vms is None


def test_an_image_of_such_a_pod_is_the_vms_if_its_name_says_so(tmp_path: Path) -> None:
    made = routes(Settings())
    assert made.for_image("virtlet.cloud/cirros", "virtshim-pod", {}) is made.vms
    assert made.for_image("busybox", "virtshim-pod", {}) is made.primary


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[[proxy.others]]\nname = "containerd"', "two runtimes have the name containerd"),
        (
            '[[proxy.others]]\n[[proxy.others]]\nname = "b"\nhandlers = []\nimage_prefixes = []',
            "two runtimes have the socket",
        ),
        ('[[proxy.others]]\nsocket = "/a"\n[[proxy.others]]\nname = "b"', "two runtimes have the handler virtshim"),
        ('[proxy.primary]\nhandlers = ["virtshim"]', "two runtimes have the handler virtshim"),
        ('[proxy]\nsocket = "/run/containerd/containerd.sock"', "cannot serve /run/containerd/containerd.sock"),
        (
            '[[proxy.others]]\nsocket = "/a"\npod_handlers = ["virtshim-pod"]',
            "pod_handlers are only for this node's virtshim",
        ),
        ('[[proxy.others]]\nhandlers = ["virtshim-pod"]', "two runtimes have the handler virtshim-pod"),
        ('[[proxy.others]]\nname = "../x"', "'../x' is not a valid runtime name"),
        ('[[proxy.others]]\nwhen_down = "maybe"', r"proxy\.others\[0\]\.when_down: Input should be"),
        ('[proxy]\nprimray = "x"', "proxy.primray"),
    ],
)
def test_contradictory_settings_are_refused(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        loaded(tmp_path, text)


def test_a_default_socket_used_for_two_purposes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="must all be different"):
        routes(loaded(tmp_path, '[proxy]\nsocket = "/run/virtshim/virtshim.sock"'))


def test_a_directory_and_a_file_exclude_each_other() -> None:
    with pytest.raises(InvalidRequest, match="--dir and --config"):
        proxy_command("file", "directory")


def test_a_node_can_refuse_pods_that_the_annotation_alone_sends_to_another_runtime(tmp_path: Path) -> None:
    made = routes(loaded(tmp_path, '[proxy]\nannotation_alone = "refuse"\n'))
    target = {"kubernetes.io/target-runtime": "virtlet.cloud"}
    with pytest.raises(InvalidRequest, match=r"proxy\.annotation_alone.*runtimeClassName with the handler virtshim"):
        made.for_pod("", target)
    assert made.for_pod("virtshim", target).name == "virtlet.cloud"
    assert made.for_pod("", {"kubernetes.io/target-runtime": "containerd"}).name == "containerd"
    # kubelet does not always say the handler with an image; its pod has been judged.
    assert made.for_image("cirros", "", target) is made.others[0]
    assert routes(Settings()).for_pod("", target).name == "virtlet.cloud"
