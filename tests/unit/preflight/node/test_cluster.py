"""`virtshim check` finds the cluster's RuntimeClasses, at an API server over TLS with tokens and certificates."""

from pathlib import Path
from typing import Any

import pytest
from fakes.apiserver import Api, data, kubeconfig

from virtshim.config.settings import Settings
from virtshim.preflight.api_server import runtime_classes_in
from virtshim.preflight.finding import Level
from virtshim.preflight.node_checks import of_cluster
from virtshim.preflight.overhead import RuntimeClass

pytestmark = pytest.mark.operator

HANDLERS = ("virtshim",)
CLASSES = "/prefix/apis/node.k8s.io/v1/runtimeclasses"
OURS = {"metadata": {"name": "vms"}, "handler": "virtshim", "overhead": {"podFixed": {"memory": "256Mi"}}}
OTHER = {"metadata": {"name": "gvisor"}, "handler": "runsc"}


@pytest.fixture
def api(apiserver: Api) -> Api:
    apiserver.answers = {CLASSES: {"items": [OTHER, OURS]}}
    apiserver.asked.clear()
    return apiserver


def test_the_class_with_our_handler_is_found_with_a_token(api: Api, tmp_path: Path) -> None:
    path = kubeconfig(api, tmp_path, {"token": "secret"})
    assert runtime_classes_in(path, HANDLERS) == [RuntimeClass("RuntimeClass vms", "virtshim", 256 << 20)]
    assert api.asked == [(CLASSES, "Bearer secret", False)]
    (tmp_path / "token").write_text("secret\n")
    assert not runtime_classes_in(kubeconfig(api, tmp_path, {"tokenFile": f"{tmp_path}/token"}), HANDLERS)[0].trouble


def test_the_class_is_found_with_a_certificate_in_a_file_or_inline(api: Api, tmp_path: Path) -> None:
    inside = {"client-certificate-data": data(api.certificate), "client-key-data": data(api.key)}
    beside = {"client-certificate": str(api.certificate), "client-key": str(api.key)}
    for user in (inside, beside):
        path = kubeconfig(api, tmp_path, user, **{"certificate-authority-data": data(api.certificate)})
        assert [one.trouble for one in runtime_classes_in(path, HANDLERS)] == [""]
    assert [shown for _, _, shown in api.asked] == [True, True]


@pytest.mark.parametrize(
    ("user", "cluster", "said"),
    [
        ({"token": "wrong"}, {}, "answers 403"),
        ({"exec": {"command": "aws"}}, {}, "does not run a login program"),
        ({"token": "secret"}, {"certificate-authority": "none"}, "No such file"),
        ({"token": "secret"}, {"certificate-authority-data": "***"}, "is not base64"),
        ({"token": "secret"}, {"server": "http://127.0.0.1"}, "not an https address"),
        ({"token": "secret"}, {"server": "https://127.0.0.1:1"}, "refused"),
    ],
)
def test_an_unreachable_cluster_is_a_warning_with_the_reason(
    api: Api, tmp_path: Path, user: dict[str, Any], cluster: dict[str, Any], said: str
) -> None:
    (told,) = of_cluster(kubeconfig(api, tmp_path, user, **cluster))(settings(tmp_path))
    assert told.level is Level.WARNING
    assert said in told.text


@pytest.mark.parametrize("text", ["", "[]", "a: [", "current-context: x"])
def test_a_malformed_kubeconfig_is_reported(tmp_path: Path, text: str) -> None:
    (tmp_path / "k").write_text(text)
    assert runtime_classes_in(str(tmp_path / "k"), HANDLERS)[0].trouble
    assert runtime_classes_in(str(tmp_path / "none"), HANDLERS)[0].trouble


def test_the_warning_for_a_cluster_without_our_class_says_what_to_apply(api: Api, tmp_path: Path) -> None:
    api.answers = {CLASSES: {"items": [OTHER]}}
    (told,) = of_cluster(kubeconfig(api, tmp_path, {"token": "secret"}))(settings(tmp_path))
    assert told.level is Level.WARNING
    assert "kubectl apply -f /etc/virtshim/runtimeclass.yaml" in told.text


def test_a_good_class_is_ok(api: Api, tmp_path: Path) -> None:
    (told,) = of_cluster(kubeconfig(api, tmp_path, {"token": "secret"}))(settings(tmp_path))
    assert (told.level, told.subject) == (Level.OK, "RuntimeClass")


def settings(place: Path) -> Settings:
    return Settings.model_validate({"paths": {"state_dir": str(place)}})
