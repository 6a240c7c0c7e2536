"""`virtshim check` tries `kubernetes.kubeconfig` with an API server over TLS."""

import contextlib
import dataclasses
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from fakes.apiserver import Api, kubeconfig
from fakes.full_records import SANDBOX

from virtshim.config.settings import Settings
from virtshim.model.sandbox import Sandbox, SandboxPhase
from virtshim.preflight.api_server import named_objects
from virtshim.preflight.checks import ALL
from virtshim.preflight.finding import Finding, Level
from virtshim.preflight.node_checks import cluster_objects
from virtshim.store import rows

pytestmark = pytest.mark.operator

REVIEWS = "/prefix/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
TOKEN = {"token": "secret"}
ASKS = {"VirtletSSHKeySource": "secret/keys", "VirtletCloudInitUserDataSource": "configmap/ud"}


@pytest.fixture
def api(apiserver: Api) -> Api:
    apiserver.asked.clear()
    apiserver.answers = {}
    return apiserver


def reviews(*allowed: str, events: bool = True) -> Callable[[Any], Any]:
    """Of what is asked, these are allowed: RESOURCE, or RESOURCE NAMESPACE/NAME; and whether Events are."""

    def answer(review: Any) -> Any:
        wanted = review["spec"]["resourceAttributes"]
        assert review["kind"] == "SelfSubjectAccessReview"
        if wanted["resource"] == "events":
            assert wanted == {"verb": "create", "resource": "events"}
            return {"status": {"allowed": events}}
        assert wanted["verb"] == "get"
        one = f" {wanted['namespace']}/{wanted['name']}" if "name" in wanted else ""
        return {"status": {"allowed": wanted["resource"] + one in allowed}}

    return answer


def pod(name: str, annotations: Mapping[str, str], phase: SandboxPhase = SandboxPhase.READY) -> Sandbox:
    key = dataclasses.replace(SANDBOX.key, namespace="team", name=name)
    config = dataclasses.replace(SANDBOX.config, annotations=dict(annotations))
    return dataclasses.replace(SANDBOX, key=key, config=config, profile={}, phase=phase)


def told(path: str, place: Path, *pods: Sandbox, damaged: Sequence[str] = ()) -> list[Finding]:
    """`damaged`: names of pods whose records are."""
    state = place / "state"
    state.mkdir(exist_ok=True)
    with contextlib.closing(sqlite3.connect(state / "state.db")) as database:
        columns = "id text, namespace text, name text, created_at int, document text"
        database.execute(f"create table if not exists sandboxes ({columns})")
        made = [(one.key.name, one.key.namespace, one.key.name, rows.SANDBOX.text(one)) for one in pods]
        database.executemany("insert into sandboxes values (?, ?, ?, 1, ?)", made)
        database.executemany("insert into sandboxes values ('0123', 'team', ?, 2, 'damaged')", [(n,) for n in damaged])
        database.commit()
    settings = {"paths": {"state_dir": str(state)}, "kubernetes": {"kubeconfig": path}}
    return list(cluster_objects(Settings.model_validate(settings)))


def test_check_includes_the_api_server() -> None:
    assert cluster_objects in ALL


def test_a_node_without_a_kubeconfig_gets_no_finding(tmp_path: Path) -> None:
    assert told("", tmp_path) == []


def test_objects_that_this_node_may_not_get_are_named_with_the_remedy(api: Api, tmp_path: Path) -> None:
    api.answers[REVIEWS] = reviews("configmaps team/ud")
    found, _ = told(kubeconfig(api, tmp_path, TOKEN), tmp_path, pod("web", ASKS))
    assert found.level is Level.WARNING
    assert found.text.endswith("this node may not get objects that its pods name: secret team/keys")
    assert "as a volume" in found.remedy
    assert "docs/security.md, Secrets by name" in found.remedy


def test_the_finding_is_ok_if_all_objects_that_pods_name_may_be_read(api: Api, tmp_path: Path) -> None:
    """Each is asked for once, and pods that are gone name nothing."""
    api.answers[REVIEWS] = reviews("configmaps team/ud", "secrets team/keys")
    gone = pod("gone", {"VirtletSSHKeySource": "secret/another"}, SandboxPhase.NOT_READY)
    found, _ = told(kubeconfig(api, tmp_path, TOKEN), tmp_path, pod("web", ASKS), pod("db", ASKS), gone)
    assert (found.level, found.remedy) == (Level.OK, "")
    assert found.text.endswith("this node may get the objects that its pods name (2)")
    assert len(api.asked) == 2 + 1  # whether Events may be created


def test_objects_that_were_not_tried_are_counted_separately(api: Api, tmp_path: Path) -> None:
    names = [f"s{number}" for number in range(10)]
    api.answers[REVIEWS] = reviews(*(f"secrets team/{name}" for name in names[:8]))
    pods = [pod(name, {"VirtletSSHKeySource": f"secret/{name}"}) for name in names]
    found, _ = told(kubeconfig(api, tmp_path, TOKEN), tmp_path, *pods)
    assert found.text.endswith("the objects that its pods name (8); 2 more were not tried")
    assert len(api.asked) == 8 + 1


@pytest.mark.parametrize(
    ("allowed", "said"),
    [
        (("secrets", "configmaps"), "all secrets and configmaps of the cluster"),
        ((), "the objects that pods' specs and Roles of their namespaces allow"),
    ],
)
def test_without_pods_that_name_objects_the_finding_says_what_the_node_may_read(
    api: Api, tmp_path: Path, allowed: tuple[str, ...], said: str
) -> None:
    api.answers[REVIEWS] = reviews(*allowed)
    found, _ = told(kubeconfig(api, tmp_path, TOKEN), tmp_path)
    assert found.level is Level.OK
    assert said in found.text


def test_pods_with_unreadable_records_are_not_counted_as_naming_nothing(api: Api, tmp_path: Path) -> None:
    api.answers[REVIEWS] = reviews("secrets", "configmaps")
    found, _ = told(kubeconfig(api, tmp_path, TOKEN), tmp_path, damaged=["odd"])
    assert found.level is Level.WARNING
    assert "names any" not in found.text
    assert found.text.endswith(
        "of the cluster; pods of this node may name more objects, but the records of sandbox 0123 (team/odd) cannot be read"
    )
    assert "config.unreadable" in found.remedy


def test_readable_pods_are_reported_beside_unreadable_records(api: Api, tmp_path: Path) -> None:
    api.answers[REVIEWS] = reviews("configmaps team/ud")
    found, _ = told(kubeconfig(api, tmp_path, TOKEN), tmp_path, pod("web", ASKS), damaged=["odd"])
    assert (
        "this node may not get objects that its pods name: secret team/keys; pods of this node may name more"
        in found.text
    )
    assert "sandbox 0123 (team/odd)" in found.text
    assert "as a volume" in found.remedy
    assert "config.unreadable" in found.remedy


def test_an_unreadable_state_database_does_not_mean_a_node_without_pods(api: Api, tmp_path: Path) -> None:
    api.answers[REVIEWS] = reviews("secrets", "configmaps")
    state = tmp_path / "state"
    state.mkdir()
    (state / "state.db").write_text("no database, but long enough to be taken for a damaged one" * 20)
    settings = {"paths": {"state_dir": str(state)}, "kubernetes": {"kubeconfig": kubeconfig(api, tmp_path, TOKEN)}}
    found, _ = cluster_objects(Settings.model_validate(settings))
    assert (found.level, found.remedy) == (Level.WARNING, "run this as root")
    assert f"may name more objects, but the state database {state}/state.db cannot be read" in found.text


@pytest.mark.parametrize(
    ("allowed", "level", "said"),
    [
        (True, Level.OK, "this node may create Events of pods"),
        (False, Level.WARNING, "problems of VMs appear only in the logs of their containers"),
    ],
)
def test_the_finding_says_whether_pods_get_events(
    api: Api, tmp_path: Path, allowed: bool, level: Level, said: str
) -> None:
    api.answers[REVIEWS] = reviews("secrets", events=allowed)
    _, found = told(kubeconfig(api, tmp_path, TOKEN), tmp_path)
    assert (found.subject, found.level) == ("Events", level)
    assert said in found.text
    assert ("docs/security.md, Events of pods" in found.remedy) is not allowed


@pytest.mark.parametrize(
    ("status", "said", "remedy"),
    [
        (401, "does not know the kubeconfig's user", "renew the user's token or certificate"),
        (403, "does not tell the user its rights", "bind the ClusterRole system:basic-user"),
        (500, "answers 500", "check that it is an API server"),
    ],
)
def test_a_server_that_rejects_the_credentials_is_a_warning(
    api: Api, tmp_path: Path, status: int, said: str, remedy: str
) -> None:
    api.answers[REVIEWS] = status
    (found,) = told(kubeconfig(api, tmp_path, TOKEN), tmp_path)
    assert found.level is Level.WARNING
    assert said in found.text
    assert remedy in found.remedy


@pytest.mark.parametrize(
    ("user", "cluster", "said"),
    [
        ({**TOKEN, "as": "root"}, {}, "its user's as: "),
        (TOKEN, {"proxy-url": "http://proxy"}, "its cluster's proxy-url: "),
        (TOKEN, {"insecure-skip-tls-verify": True}, "anybody could pose as the server"),
        (TOKEN, {"certificate-authority": "none"}, "No such file"),
        (TOKEN, {"server": "https://127.0.0.1:1"}, "refused"),
    ],
)
def test_an_unusable_kubeconfig_is_a_warning_with_the_reason(
    api: Api, tmp_path: Path, user: dict[str, Any], cluster: dict[str, Any], said: str
) -> None:
    (found,) = told(kubeconfig(api, tmp_path, user, **cluster), tmp_path)
    assert found.level is Level.WARNING
    assert said in found.text
    assert found.remedy
    assert api.asked == []


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    (found,) = told(f"{tmp_path}/none", tmp_path)
    assert f"kubernetes.kubeconfig {tmp_path}/none: " in found.text


def test_malformed_annotations_name_no_objects() -> None:
    assert named_objects([pod("odd", {"VirtletSSHKeySource": "keys"}), pod("plain", {})]) == []
