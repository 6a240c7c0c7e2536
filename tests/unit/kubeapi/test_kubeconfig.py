"""Unsupported fields of a kubeconfig are refused and not ignored."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from fakes.apiserver import Api, data, kubeconfig

from virtshim.kubeapi.asking import get
from virtshim.kubeapi.kubeconfig import access, access_in_cluster
from virtshim.model.errors import InvalidRequest

VERSION = "/prefix/version"
TOKEN = {"token": "secret"}


@pytest.fixture
def api(apiserver: Api) -> Api:
    apiserver.answers = {VERSION: {"major": "1"}}
    apiserver.asked.clear()
    return apiserver


def refusal(path: str) -> str:
    with pytest.raises(InvalidRequest) as error:
        access(path)
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("as", "system:admin", "use a user that has the rights itself"),
        ("as-uid", "0", "use a user that has the rights itself"),
        ("as-groups", ["system:masters"], "use a user that has the rights itself"),
        ("as-user-extra", {"scopes": ["view"]}, "use a user that has the rights itself"),
        ("username", "me", "use a user with a token or a certificate"),
        ("password", "hunter2", "use a user with a token or a certificate"),
        ("exec", {"command": "aws"}, "use a user with a token or a certificate"),
        ("auth-provider", {"name": "gcp"}, "use a user with a token or a certificate"),
        ("tokenfile", "token", "correct or remove it"),
    ],
)
def test_kubeconfig_fields_that_change_the_user_are_refused_by_name(
    api: Api, tmp_path: Path, name: str, value: Any, remedy: str
) -> None:
    """Also of a user that could ask without it."""
    certificate = {"client-certificate-data": data(api.certificate), "client-key-data": data(api.key)}
    for user in (TOKEN, certificate):
        said = refusal(kubeconfig(api, tmp_path, {**user, name: value}))
        assert f"its user's {name}: " in said
        assert remedy in said
        assert "hunter2" not in said


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("proxy-url", "socks5://hunter2@proxy", "name a server that this node reaches itself"),
        ("certificate-authorities", ["ca.crt"], "correct or remove it"),
    ],
)
def test_kubeconfig_fields_that_change_the_server_are_refused_by_name(
    api: Api, tmp_path: Path, name: str, value: Any, remedy: str
) -> None:
    said = refusal(kubeconfig(api, tmp_path, TOKEN, **{name: value}))
    assert f"its cluster's {name}: " in said
    assert remedy in said
    assert "hunter2" not in said


def test_a_field_without_a_value_counts_as_absent(api: Api, tmp_path: Path) -> None:
    empty = {"as": "", "as-groups": [], "exec": None, "auth-provider": {}, "username": "", "tokenFile": ""}
    found = access(kubeconfig(api, tmp_path, {**TOKEN, **empty}, **{"proxy-url": "", "tls-server-name": ""}))
    assert get(found, "/version").status == 200


@pytest.mark.parametrize("user", [{}, {"token": ""}, {"client-certificate-data": ""}])
def test_a_user_without_credentials_is_refused(api: Api, tmp_path: Path, user: dict[str, Any]) -> None:
    assert "neither a token nor a certificate" in refusal(kubeconfig(api, tmp_path, user))


def test_an_empty_token_file_is_no_token(api: Api, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("\n")
    assert "tokenFile is empty" in refusal(kubeconfig(api, tmp_path, {"tokenFile": "token"}))


def test_a_token_and_a_token_file_together_are_refused(api: Api, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    assert "token and tokenFile" in refusal(kubeconfig(api, tmp_path, {**TOKEN, "tokenFile": "token"}))


def test_a_certificate_without_its_key_is_refused(api: Api, tmp_path: Path) -> None:
    for there, missing in (("client-certificate", "client-key"), ("client-key", "client-certificate")):
        user = {**TOKEN, f"{there}-data": data(api.certificate)}
        assert f"its user has no {missing}:" in refusal(kubeconfig(api, tmp_path, user))


def test_an_encrypted_key_is_refused_without_a_prompt(api: Api, tmp_path: Path) -> None:
    locked = tmp_path / "locked.pem"
    argv = ["openssl", "ec", "-aes256", "-passout", "pass:hunter2", "-in", str(api.key), "-out", str(locked)]
    subprocess.run(argv, check=True, capture_output=True, timeout=60)
    user = {"client-certificate": str(api.certificate), "client-key": str(locked)}
    assert "client-key has a passphrase" in refusal(kubeconfig(api, tmp_path, user))


def test_two_entries_of_one_name_are_refused(api: Api, tmp_path: Path) -> None:
    path = Path(kubeconfig(api, tmp_path, TOKEN))
    document = yaml.safe_load(path.read_text())
    document["users"].append({"name": "me", "user": {"token": "another"}})
    path.write_text(yaml.safe_dump(document))
    assert "it has 2 users named 'me'" in refusal(str(path))


@pytest.mark.parametrize("server", ["https://me:hunter2@127.0.0.1", "http://me:hunter2@127.0.0.1", "me:hunter2@here"])
def test_a_user_in_the_address_is_refused_and_not_shown(api: Api, tmp_path: Path, server: str) -> None:
    said = refusal(kubeconfig(api, tmp_path, TOKEN, server=server))
    assert "the address has a user" in said
    assert "hunter2" not in said


@pytest.mark.parametrize("end", ["?x=1", "#x"])
def test_an_address_with_more_than_a_path_is_refused(api: Api, tmp_path: Path, end: str) -> None:
    assert "is not an https address" in refusal(kubeconfig(api, tmp_path, TOKEN, server=f"https://127.0.0.1/{end}"))


def test_the_server_must_have_the_name_in_tls_server_name(api: Api, tmp_path: Path) -> None:
    path = kubeconfig(api, tmp_path, TOKEN, **{"tls-server-name": "kubernetes.example"})
    assert get(access(path), "/version").document == {"major": "1"}
    path = kubeconfig(api, tmp_path, TOKEN, **{"tls-server-name": "another.example"})
    with pytest.raises(OSError, match=r"another\.example"):
        get(access(path), "/version")
    assert [path for path, _, _ in api.asked] == [VERSION]


def test_a_pod_uses_its_service_account(tmp_path: Path) -> None:
    api = Api(tmp_path)
    try:
        (tmp_path / "ca.crt").write_bytes(api.certificate.read_bytes())
        (tmp_path / "token").write_text("secret\n")
        port = str(api.server.server_address[1])
        found = access_in_cluster(
            {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": port}, str(tmp_path)
        )
        api.answers["/version"] = {"major": "1"}
        assert get(found, "/version").document == {"major": "1"}
    finally:
        api.close()


def test_a_program_outside_of_a_cluster_needs_a_kubeconfig() -> None:
    with pytest.raises(InvalidRequest, match="name a kubeconfig"):
        access_in_cluster({})
