"""VirtletImageMapping objects become translation files of the node, and nothing else in the directory changes."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from fakes.cluster_rights import ShippedRights
from fakes.kubernetes_api import RESOURCES, Asked, KubernetesApi, Refused

from virtshim.cluster.agent import Agent
from virtshim.images.translations import read_translations, translate
from virtshim.kubeapi.kubeconfig import access
from virtshim.model.errors import Unavailable
from virtshim.model.text import is_object_name
from virtshim.system.clock import SystemClock

AGENT = "system:serviceaccount:virtshim-cluster:virtshim-agent"
MAPPINGS = "virtletimagemappings"
CLUSTER = Path(__file__).resolve().parents[3] / "deploy/kustomize/overlays/cluster"
# A spec as Virtlet's own clients write it: every field of its types, empty ones as null.
SPEC: dict[str, Any] = {
    "prefix": "prod",
    "translations": [
        {"name": "cirros", "url": "https://images.example/cirros.img", "transport": "slow"},
        {"regexp": r"centos/(\d+)-(\d+)", "url": "https://images.example/$1/CentOS-$2.qcow2"},
    ],
    "transports": {"slow": {"timeout": 30000, "maxRedirects": 2, "tls": {"serverName": "other.example"}}},
}
NULLS: dict[str, Any] = {"translations": [{"name": "tiny", "url": "images.example/tiny.img"}], "transports": None}
BAD: dict[str, Any] = {"translations": [{"name": "cirros"}]}


def mapping(name: str = "prod", spec: Any = SPEC, namespace: str = "kube-system") -> dict[str, Any]:
    return {"metadata": {"namespace": namespace, "name": name}, "spec": spec}


@contextlib.contextmanager
def no_virtshim() -> Iterator[Any]:
    raise Unavailable("there is no admin socket")
    yield


@pytest.fixture
def rights() -> ShippedRights:
    return ShippedRights({AGENT: {"authentication.kubernetes.io/node-name": ["n1"]}})


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "etc/images"


@pytest.fixture
def agent_of(api: KubernetesApi, directory: Path) -> Iterator[Callable[[], Agent]]:
    """Agents of node n1, where virtshim is down: mirroring goes on without it."""
    running: list[Agent] = []
    api.tokens["agent"] = AGENT
    config = api.kubeconfig("agent")

    def start() -> Agent:
        made = Agent("n1", "virtshim-cluster", lambda: access(config), SystemClock(), no_virtshim, str(directory))
        running.append(made)
        made.start()
        return made

    yield start
    for one in running:
        one.close()


@pytest.fixture
def agent(agent_of: Callable[[], Agent]) -> Agent:
    return agent_of()


def look_until(api: KubernetesApi, agent: Agent, condition: Callable[[], Any]) -> None:
    """The agent looks, as its watch brings news, until the condition holds."""
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "it has not come about"
        with api.news:
            api.news.wait(0.02)
        agent.look()


def url_of(directory: Path, name: str) -> str:
    """Where virtshim would pull this image from."""
    found = translate(name, read_translations(str(directory)))
    return found.url if found is not None else ""


def names(directory: Path) -> list[str]:
    return sorted(one.name for one in directory.iterdir()) if directory.exists() else []


def events(api: KubernetesApi) -> list[tuple[str, str, str]]:
    return [(one["involvedObject"]["name"], one["reason"], one["message"]) for one in api.all("events")]


def test_virtshim_pulls_by_a_mapping_of_virtlet(api: KubernetesApi, agent: Agent, directory: Path) -> None:
    api.put(MAPPINGS, mapping())
    api.put(MAPPINGS, mapping("nulls", NULLS))
    look_until(api, agent, lambda: len(names(directory)) == 2)
    assert url_of(directory, "prod/cirros") == "https://images.example/cirros.img"
    assert url_of(directory, "prod/centos/7-2009") == "https://images.example/7/CentOS-2009.qcow2"
    assert url_of(directory, "tiny") == "images.example/tiny.img"
    found = translate("prod/cirros", read_translations(str(directory)))
    assert found is not None
    assert (found.transport.timeout, found.transport.max_redirects) == (30.0, 2)
    assert [one.stat().st_mode & 0o777 for one in directory.iterdir()] == [0o600, 0o600]
    assert events(api) == []


def test_a_changed_mapping_changes_its_file_and_a_deleted_one_goes(
    api: KubernetesApi, agent: Agent, directory: Path
) -> None:
    api.put(MAPPINGS, mapping("tiny", NULLS))
    look_until(api, agent, lambda: names(directory) == ["tiny.yaml"])
    rule = {"name": "tiny", "url": "https://new.example/tiny.img"}
    api.edit(MAPPINGS, "kube-system", "tiny", lambda one: one["spec"].update(translations=[rule]))
    look_until(api, agent, lambda: url_of(directory, "tiny") == "https://new.example/tiny.img")
    api.gone(MAPPINGS, "kube-system", "tiny")
    look_until(api, agent, lambda: names(directory) == [])


def test_a_mapping_of_another_namespace_means_nothing(api: KubernetesApi, agent: Agent, directory: Path) -> None:
    """Else whoever may write in any namespace would decide what the images of all others are."""
    api.put(MAPPINGS, mapping("stranger", NULLS, "shop"))
    api.put(MAPPINGS, mapping())
    look_until(api, agent, lambda: names(directory))
    assert names(directory) == ["prod.yaml"]


def test_an_agent_that_starts_removes_what_was_deleted_meanwhile(
    api: KubernetesApi, agent_of: Callable[[], Agent], directory: Path
) -> None:
    api.put(MAPPINGS, mapping())
    first = agent_of()
    look_until(api, first, lambda: names(directory))
    first.close()
    api.gone(MAPPINGS, "kube-system", "prod")
    look_until(api, agent_of(), lambda: names(directory) == [])


def test_files_stay_while_the_api_server_is_away(
    api: KubernetesApi, agent_of: Callable[[], Agent], directory: Path
) -> None:
    api.put(MAPPINGS, mapping())
    agent = agent_of()
    look_until(api, agent, lambda: names(directory))

    def away(asked: Asked) -> None:
        raise Refused(503, "ServiceUnavailable", "no")

    api.before = away
    api.forget_history()
    agent.look()
    agent.close()
    fresh = Agent("n1", "virtshim-cluster", agent.access, SystemClock(), no_virtshim, str(directory))
    before = len(api.asked)
    fresh.mappings.start()
    look_until(api, fresh, lambda: any(MAPPINGS in one for one in api.asked[before:]))
    fresh.close()
    assert url_of(directory, "prod/cirros") == "https://images.example/cirros.img"


def test_a_mapping_that_does_not_parse_keeps_its_last_good_file_and_says_why_once(
    api: KubernetesApi, agent: Agent, directory: Path
) -> None:
    api.put(MAPPINGS, mapping())
    look_until(api, agent, lambda: names(directory))
    api.edit(MAPPINGS, "kube-system", "prod", lambda one: one.update(spec=BAD))
    look_until(api, agent, lambda: events(api))
    agent.look()
    ((name, reason, message),) = events(api)
    assert (name, reason) == ("prod", "MappingRefused")
    assert message.startswith("node n1: ")
    assert "entry 1 of translations has no url" in message
    assert url_of(directory, "prod/cirros") == "https://images.example/cirros.img"
    api.edit(MAPPINGS, "kube-system", "prod", lambda one: one.update(spec=NULLS))
    look_until(api, agent, lambda: url_of(directory, "tiny"))
    api.edit(MAPPINGS, "kube-system", "prod", lambda one: one.update(spec=BAD))
    look_until(api, agent, lambda: len(events(api)) == 2)


@pytest.mark.parametrize(
    "spec",
    [
        {"translations": [{"regexp": "(", "url": "x"}]},
        {"translation": []},
        {"spec": NULLS},
        [],
        "text",
        {"prefix": "x" * (1 << 20)},
    ],
    ids=["regexp", "key", "nested", "list", "text", "size"],
)
def test_a_mapping_that_would_stop_every_pull_makes_no_file_and_does_not_stop_the_others(
    api: KubernetesApi, agent: Agent, directory: Path, spec: Any
) -> None:
    api.put(MAPPINGS, mapping("bad", spec))
    api.put(MAPPINGS, mapping("good", NULLS))
    look_until(api, agent, lambda: names(directory) and events(api))
    assert names(directory) == ["good.yaml"]
    assert [(name, reason) for name, reason, _ in events(api)] == [("bad", "MappingRefused")]
    assert url_of(directory, "tiny") == "images.example/tiny.img"


def test_an_event_about_a_mapping_with_a_long_name_has_a_name_that_the_api_server_takes(
    api: KubernetesApi, agent: Agent
) -> None:
    api.put(MAPPINGS, mapping("a" * 199 + "-" + "b" * 40, "text"))
    look_until(api, agent, lambda: events(api))
    assert is_object_name(api.all("events")[0]["metadata"]["name"])


def test_files_of_others_are_left_alone(api: KubernetesApi, agent: Agent, directory: Path) -> None:
    """Also a copy of a mirrored file under another name, which is its maker's."""
    api.put(MAPPINGS, mapping())
    look_until(api, agent, lambda: names(directory))
    mirrored = (directory / "prod.yaml").read_text()
    others = {"copy.yaml": mirrored, "own.yaml": "translations: []\n", "prod.yaml.bak": mirrored, "notes": "x"}
    for name, text in others.items():
        (directory / name).write_text(text)
    (directory / "link.yaml").symlink_to(directory / "own.yaml")
    api.gone(MAPPINGS, "kube-system", "prod")
    look_until(api, agent, lambda: "prod.yaml" not in names(directory))
    assert names(directory) == sorted([*others, "link.yaml"])
    assert {name: (directory / name).read_text() for name in others} == others


@pytest.mark.parametrize("kind", ["file", "link", "broken link", "directory", "pipe"])
def test_something_else_of_that_name_stays_and_the_mapping_says_so(
    api: KubernetesApi, agent: Agent, directory: Path, tmp_path: Path, kind: str
) -> None:
    directory.mkdir(parents=True)
    there, target = directory / "prod.yaml", tmp_path / "target"
    target.write_text("translations: []\n")
    if kind == "file":
        there.write_text("translations: []\n")
    elif kind == "directory":
        there.mkdir()
    elif kind == "pipe":
        subprocess.run(["mkfifo", str(there)], check=True)
    else:
        there.symlink_to(target if kind == "link" else tmp_path / "nowhere")
    before = there.lstat()
    api.put(MAPPINGS, mapping())
    look_until(api, agent, lambda: events(api))
    agent.look()
    ((name, reason, message),) = events(api)
    assert (name, reason) == ("prod", "FileInTheWay")
    assert str(there) in message
    assert (there.lstat().st_ino, there.lstat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert (target.read_text(), (tmp_path / "nowhere").exists()) == ("translations: []\n", False)
    there.rename(tmp_path / "elsewhere")
    look_until(api, agent, lambda: url_of(directory, "prod/cirros"))


@pytest.mark.parametrize("name", ["../outside", "..", ".", "a/b", "/etc/passwd", "a\nb", "A", "-a", "a" * 251, ""])
def test_no_name_leaves_the_directory(
    api: KubernetesApi, agent: Agent, directory: Path, tmp_path: Path, name: str
) -> None:
    """An API server makes no such object; a forged answer would have one."""
    before = {one for one in tmp_path.rglob("*") if directory not in one.parents}
    api.put(MAPPINGS, mapping(name))
    api.put(MAPPINGS, mapping("good", NULLS))
    look_until(api, agent, lambda: names(directory) and events(api))
    assert names(directory) == ["good.yaml"]
    assert {one for one in tmp_path.rglob("*") if directory not in one.parents} - before <= {
        directory.parent,
        directory,
    }
    ((_, reason, message),) = events(api)
    assert (reason, "its name makes no file name" in message) == ("MappingRefused", True)


def test_the_longest_names_have_files(api: KubernetesApi, agent: Agent, directory: Path) -> None:
    api.put(MAPPINGS, mapping("a" * 250, NULLS))
    look_until(api, agent, lambda: url_of(directory, "tiny"))


def test_a_mirrored_file_that_somebody_has_opened_to_others_is_closed_again(
    api: KubernetesApi, agent: Agent, directory: Path
) -> None:
    """It may hold the key of a client certificate."""
    api.put(MAPPINGS, mapping())
    look_until(api, agent, lambda: names(directory))
    (directory / "prod.yaml").chmod(0o644)
    agent.look()
    assert (directory / "prod.yaml").stat().st_mode & 0o777 == 0o600


# Kills its own process, as SIGKILL does, before its Nth use of the directory.
DOOMED = """
import os, signal, sys
from virtshim.cluster.image_mappings import ImageMappings
directory, left = sys.argv[1], int(sys.argv[2])
documents = [{"metadata": {"name": name, "resourceVersion": "2"}, "spec": {"translations": [
    {"name": name, "url": "https://new.example/" + name}]}} for name in ("changed", "fresh")]
def hook(event, args):
    global left
    paths = [one for one in args if isinstance(one, str) and one.startswith(directory)]
    if paths and event in ("open", "os.listdir", "os.rename", "os.remove", "os.mkdir"):
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(hook)
ImageMappings(directory, print).settle(documents)
"""


def test_a_kill_between_any_two_steps_leaves_whole_files_and_the_next_look_the_rest(tmp_path: Path) -> None:
    from virtshim.cluster.image_mappings import ImageMappings

    def of(name: str, host: str) -> dict[str, Any]:
        rule = {"name": name, "url": f"https://{host}.example/{name}"}
        return {"metadata": {"name": name, "resourceVersion": host}, "spec": {"translations": [rule]}}

    points = 0
    for left in range(100):
        directory = tmp_path / str(left)
        ImageMappings(str(directory), print).settle([of("changed", "old"), of("goes", "old")])
        (directory / "own.yaml").write_text("translations: [{name: own, url: https://own.example/own}]\n")
        done = subprocess.run([sys.executable, "-c", DOOMED, str(directory), str(left)], check=False, timeout=60)
        found = {name: url_of(directory, name) for name in ("changed", "goes", "fresh", "own")}
        assert found["own"] == "https://own.example/own"
        assert found["changed"] in ("https://old.example/changed", "https://new.example/changed")
        assert found["goes"] in ("https://old.example/goes", "")
        assert found["fresh"] in ("https://new.example/fresh", "")
        again = ImageMappings(str(directory), print)
        for _ in range(2):
            again.settle([of("changed", "new"), of("fresh", "new")])
        assert names(directory) == ["changed.yaml", "fresh.yaml", "own.yaml"]
        assert url_of(directory, "changed") == "https://new.example/changed"
        if done.returncode == 0:
            points = left
            break
    assert points > 10


def test_the_definition_has_virtlets_names_and_takes_every_object_of_virtlet(api: KubernetesApi) -> None:
    found = yaml.safe_load((CLUSTER / "imagemapping.yaml").read_text())
    spec, (version,) = found["spec"], found["spec"]["versions"]
    assert (found["metadata"]["name"], spec["group"], version["name"]) == (
        f"{MAPPINGS}.virtlet.k8s",
        "virtlet.k8s",
        "v1",
    )
    assert spec["names"] == {
        "kind": "VirtletImageMapping",
        "plural": MAPPINGS,
        "singular": "virtletimagemapping",
        "shortNames": ["vim"],
    }
    assert spec["scope"] == "Namespaced"
    kept = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    assert kept == {"type": "object", "x-kubernetes-preserve-unknown-fields": True}


@pytest.mark.parametrize(
    ("method", "path", "body", "told"),
    [
        ("GET", f"{MAPPINGS}/shop/", None, "cannot list resource"),
        ("GET", f"{MAPPINGS}/kube-system/prod", None, "cannot get resource"),
        ("PATCH", f"{MAPPINGS}/kube-system/prod", {"spec": {}}, "cannot patch resource"),
        ("DELETE", f"{MAPPINGS}/kube-system/prod", None, "cannot delete resource"),
        ("POST", "events/shop/", {"involvedObject": {"kind": "VirtletImageMapping"}}, "cannot create resource"),
        ("POST", "events/kube-system/", {"involvedObject": {"kind": "Pod"}}, "only of image mappings"),
    ],
)
def test_an_agent_may_only_read_the_mappings_that_count_and_speak_of_them(
    api: KubernetesApi, rights: ShippedRights, method: str, path: str, body: Any, told: str
) -> None:
    api.put(MAPPINGS, mapping())
    plural, namespace, name = path.split("/")
    (resource,) = [one for one in RESOURCES if one.plural == plural]
    body = {"metadata": {"name": "one"}, **body} if method == "POST" else body
    with pytest.raises(Refused, match=told):
        api.answer(Asked(method, resource, namespace, name, "", {}, body, AGENT))
    rights.refused.clear()
