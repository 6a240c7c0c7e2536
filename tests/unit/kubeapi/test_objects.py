"""Secrets and ConfigMaps are read from an API server over TLS."""

import base64
import gc
import socket
import ssl
import threading
from pathlib import Path
from typing import Any

import pytest
from fakes.apiserver import Api, kubeconfig

from virtshim.kubeapi.asking import RequestLimits
from virtshim.kubeapi.objects import KubeObjects
from virtshim.model.errors import PermissionRefused, ShimError, Unavailable, WrongState
from virtshim.seed.sources import DataSource

SECRET = DataSource("secret", "keys")
CONFIGMAP = DataSource("configmap", "keys")
PATHS = {
    SECRET: "/prefix/api/v1/namespaces/team/secrets/keys",
    CONFIGMAP: "/prefix/api/v1/namespaces/team/configmaps/keys",
}
TOKEN = {"token": "secret"}


def encoded(content: bytes) -> str:
    return base64.b64encode(content).decode()


@pytest.fixture
def api(apiserver: Api) -> Api:
    apiserver.answers = {
        PATHS[SECRET]: {"data": {"password": encoded(b"hunter2"), "bytes": encoded(b"\xff\x00")}},
        PATHS[CONFIGMAP]: {"data": {"text": "ünï\n"}, "binaryData": {"bytes": encoded(b"\xff\x00")}},
    }
    apiserver.asked.clear()
    return apiserver


def refusal(objects: KubeObjects, source: DataSource = SECRET) -> ShimError:
    with pytest.raises(ShimError) as error:
        objects.read(source, "team")
    return error.value


def test_a_secret_and_a_configmap_are_read_as_bytes(api: Api, tmp_path: Path) -> None:
    objects = KubeObjects(kubeconfig(api, tmp_path, TOKEN))
    assert objects.read(SECRET, "team") == {"password": b"hunter2", "bytes": b"\xff\x00"}
    assert objects.read(CONFIGMAP, "team") == {"text": "ünï\n".encode(), "bytes": b"\xff\x00"}
    assert [path for path, _, _ in api.asked] == [PATHS[SECRET], PATHS[CONFIGMAP]]


def test_an_object_without_data_is_empty(api: Api, tmp_path: Path) -> None:
    api.answers = {PATHS[SECRET]: {"kind": "Secret"}, PATHS[CONFIGMAP]: {"data": None}}
    objects = KubeObjects(kubeconfig(api, tmp_path, TOKEN))
    assert objects.read(SECRET, "team") == objects.read(CONFIGMAP, "team") == {}


def test_the_kubeconfig_is_read_each_time_and_a_reload_may_name_another(api: Api, tmp_path: Path) -> None:
    objects = KubeObjects(kubeconfig(api, tmp_path, {"tokenFile": "token"}))  # beside it
    (tmp_path / "token").write_text("old\n")
    assert isinstance(refusal(objects), PermissionRefused)
    (tmp_path / "token").write_text("secret\n")
    assert objects.read(SECRET, "team")
    objects.use("")
    assert "kubernetes.kubeconfig" in str(refusal(objects))


def test_a_namespace_cannot_escape_its_path(api: Api, tmp_path: Path) -> None:
    objects = KubeObjects(kubeconfig(api, tmp_path, TOKEN))
    with pytest.raises(WrongState):
        objects.read(SECRET, "other/../../namespaces/team")
    assert [path for path, _, _ in api.asked] == [
        "/prefix/api/v1/namespaces/other%2F..%2F..%2Fnamespaces%2Fteam/secrets/keys"
    ]


@pytest.mark.parametrize(
    ("status", "kind", "said"),
    [
        (404, WrongState, "it does not exist in the pod's namespace"),
        (403, PermissionRefused, "name it in a volume of the pod as well"),
        (401, PermissionRefused, "may not read it"),
        (429, Unavailable, "answers 429"),
        (500, Unavailable, "answers 500"),
        (302, Unavailable, "answers 302"),
    ],
)
def test_a_refusal_of_the_server_is_reported_with_a_remedy(
    api: Api, tmp_path: Path, status: int, kind: type[ShimError], said: str
) -> None:
    api.answers[PATHS[SECRET]] = status
    error = refusal(KubeObjects(kubeconfig(api, tmp_path, TOKEN)))
    assert type(error) is kind
    assert said in str(error)


def test_no_credentials_are_sent_to_a_server_without_a_valid_certificate(api: Api, tmp_path: Path) -> None:
    """Neither by a certificate of somebody else, nor because the file says that it need not."""
    someone = tmp_path / "someone"
    someone.mkdir()
    other = Api(someone)
    try:
        path = kubeconfig(api, tmp_path, TOKEN)
        (tmp_path / "ca.crt").write_bytes(other.certificate.read_bytes())
        error = refusal(KubeObjects(path))
        assert isinstance(error, Unavailable)
        assert "certificate verify failed" in str(error)
        path = kubeconfig(api, tmp_path, TOKEN, **{"insecure-skip-tls-verify": True})
        assert "anybody could pose as the server" in str(refusal(KubeObjects(path)))
        assert api.asked == []
    finally:
        other.close()


@pytest.mark.parametrize(
    "text",
    [
        "users: [{token: 'hunter2",
        "{a: b",
        "hunter2",
        'users:\n- {name: me, user: {token: "hunter2\\nX: y"}}\n',
    ],
)
def test_no_error_shows_the_content_of_the_kubeconfig(tmp_path: Path, text: str) -> None:
    (tmp_path / "kubeconfig").write_text(text)
    assert "hunter2" not in str(refusal(KubeObjects(str(tmp_path / "kubeconfig"))))


@pytest.mark.parametrize("token", ["hunter2\nX: y", "hunter2 x", "hünter2"])
def test_a_malformed_token_is_neither_sent_nor_shown(api: Api, tmp_path: Path, token: str) -> None:
    error = refusal(KubeObjects(kubeconfig(api, tmp_path, {"token": token})))
    assert "its user's token" in str(error)
    assert token.split(maxsplit=1)[0] not in str(error)
    assert api.asked == []


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert f"{tmp_path}/none" in str(refusal(KubeObjects(f"{tmp_path}/none")))


def test_malformed_base64_is_refused_and_not_shown(api: Api, tmp_path: Path) -> None:
    api.answers[PATHS[SECRET]] = {"data": {"password": "hunter2!"}}
    error = refusal(KubeObjects(kubeconfig(api, tmp_path, TOKEN)))
    assert isinstance(error, Unavailable)
    assert "hunter2" not in str(error)


def test_an_answer_that_is_too_large_is_refused(api: Api, tmp_path: Path) -> None:
    api.answers[PATHS[SECRET]] = {"data": {"a": "A" * 2000}}
    objects = KubeObjects(kubeconfig(api, tmp_path, TOKEN), RequestLimits(answer=1000))
    assert "larger than 1000 bytes" in str(refusal(objects))
    gc.collect()  # a socket that is open still is told now


def test_a_proxy_of_the_daemons_environment_is_not_used(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("https_proxy", "HTTPS_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert KubeObjects(kubeconfig(api, tmp_path, TOKEN)).read(SECRET, "team")


@pytest.mark.parametrize(
    "sent",
    [b"", b"SSH-2.0-OpenSSH_9.2\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}"],
    ids=["nothing", "ssh", "half"],
)
def test_a_truncated_answer_is_an_error(api: Api, tmp_path: Path, sent: bytes) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(api.certificate, api.key)
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with context.wrap_socket(listening.accept()[0], server_side=True) as connection:
                connection.recv(1000)
                connection.sendall(sent)

        server = threading.Thread(target=serve)
        server.start()
        path = kubeconfig(api, tmp_path, TOKEN, server=f"https://127.0.0.1:{listening.getsockname()[1]}")
        error = refusal(KubeObjects(path))
        server.join(60)
    assert isinstance(error, Unavailable)
    assert str(error).startswith(f"the API server cannot be asked (kubernetes.kubeconfig {path}): ")
    assert not str(error).endswith(": ")


def test_an_unreachable_server_is_reported_with_the_systems_error(api: Api, tmp_path: Path) -> None:
    error = refusal(KubeObjects(kubeconfig(api, tmp_path, TOKEN, server="https://127.0.0.1:1")))
    assert str(error).endswith("Connection refused")
    assert "Authorization" not in str(error)


def test_a_silent_server_is_given_up(api: Api, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        server = f"https://127.0.0.1:{silent.getsockname()[1]}"
        done: list[Any] = []
        path = kubeconfig(api, tmp_path, TOKEN, server=server)
        asker = threading.Thread(target=lambda: done.append(refusal(KubeObjects(path, RequestLimits(0.2)))))
        asker.start()
        asker.join(60)
        assert isinstance(done[0], Unavailable)
