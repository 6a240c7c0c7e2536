"""The image calls pull, list, inspect and remove images over the wire."""

import hashlib
import itertools
import json
from datetime import datetime
from typing import Any

import grpc
import pytest
from fakes.background import Background
from fakes.cri import Client, refused
from fakes.journal import WAIT_LIMIT
from fakes.world import IMAGE, World

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.model.errors import ResourceExhausted, SignatureRefused, Unavailable
from virtshim.model.image import ImageConfig

pytestmark = pytest.mark.cri

Code = grpc.StatusCode
OTHER = "registry.test/vm/other:2"


def status(client: Client, reference: str) -> pb.Image | None:
    answer = client.ImageStatus(pb.ImageStatusRequest(image=pb.ImageSpec(image=reference)))
    return answer.image if answer.HasField("image") else None


def listed(client: Client, reference: str = "") -> list[pb.Image]:
    request = pb.ListImagesRequest()
    if reference:
        request.filter.image.image = reference
    return list(client.ListImages(request).images)


def remove(client: Client, reference: str) -> None:
    client.RemoveImage(pb.RemoveImageRequest(image=pb.ImageSpec(image=reference)))


def test_a_pull_returns_the_id_under_which_the_image_is_listed(client: Client, world: World) -> None:
    digest = world.outside.files.publish(OTHER, b"other disk")
    assert client.pull(OTHER) == digest.value
    image = status(client, OTHER)
    assert image is not None
    assert image.id == digest.value
    assert list(image.repo_tags) == [OTHER]
    assert list(image.repo_digests) == [f"registry.test/vm/other@{digest}"]
    assert image.size == 10
    assert image in listed(client)


def test_an_image_answers_to_id_prefix_tag_and_digest(client: Client) -> None:
    (image,) = listed(client)
    digits = image.id.removeprefix("sha256:")
    for reference in (image.id, digits, digits[:12], f"sha256:{digits[:8]}", IMAGE, image.repo_digests[0]):
        assert status(client, reference) == image
        assert listed(client, reference) == [image]


def test_a_pull_for_an_unknown_runtime_handler_is_refused(client: Client) -> None:
    spec = pb.ImageSpec(image=IMAGE, runtime_handler="gvisor")
    with refused(Code.INVALID_ARGUMENT, "gvisor"):
        client.PullImage(pb.PullImageRequest(image=spec))
    spec.runtime_handler = "virtshim"
    assert client.PullImage(pb.PullImageRequest(image=spec)).image_ref


def test_verbose_status_describes_the_disk(client: Client, world: World) -> None:
    said = ImageConfig(entrypoint=("/bin/x",), stop_signal="SIGQUIT")
    world.outside.files.publish(OTHER, b"other disk", config=said)
    client.pull(OTHER)
    request = pb.ImageStatusRequest(image=pb.ImageSpec(image=OTHER), verbose=True)
    facts = json.loads(client.ImageStatus(request).info["info"])
    assert (facts["format"], facts["virtualSize"]) == ("qcow2", 80)
    assert facts["config"] == {"Entrypoint": ["/bin/x"], "StopSignal": "SIGQUIT"}
    assert datetime.fromisoformat(facts["pulledAt"]).tzinfo is not None
    request.verbose = False
    assert not client.ImageStatus(request).info


@pytest.mark.parametrize(
    ("user", "uid", "username"),
    [("", None, ""), ("1002", 1002, ""), ("1003:users", 1003, ""), ("www-data", None, "www-data"), ("a:b", None, "a")],
)
def test_the_status_of_an_image_has_its_user(
    client: Client, world: World, user: str, uid: int | None, username: str
) -> None:
    """kubelet decides about runAsNonRoot by this user and passes it on as run_as_user; the conformance client checks it."""
    world.outside.files.publish(OTHER, b"other disk", config=ImageConfig(user=user))
    client.pull(OTHER)
    for image in (status(client, OTHER), *listed(client, OTHER)):
        assert image is not None
        assert (image.uid.value if image.HasField("uid") else None, image.username) == (uid, username)


def test_a_name_without_a_tag_means_latest(client: Client, world: World) -> None:
    world.outside.files.publish("registry.test/bare", b"disk")
    client.pull("registry.test/bare")
    image = status(client, "registry.test/bare:latest")
    assert image is not None
    assert list(image.repo_tags) == ["registry.test/bare:latest"]


def test_a_pull_by_digest_gives_that_digest_and_no_tag(client: Client, world: World) -> None:
    by_digest = f"registry.test/vm/other@{world.outside.files.publish(OTHER, b'other disk')}"
    client.pull(by_digest)
    image = status(client, by_digest)
    assert image is not None
    assert (list(image.repo_tags), list(image.repo_digests)) == ([], [by_digest])
    assert client.pull(OTHER) == image.id
    tagged = status(client, by_digest)
    assert tagged is not None
    assert (list(tagged.repo_tags), list(tagged.repo_digests)) == ([OTHER], [by_digest])


def test_every_call_takes_every_form_of_a_name(client: Client, world: World) -> None:
    pulled = client.pull()
    forms = (
        pulled,
        pulled.removeprefix("sha256:"),
        pulled[:17],
        pulled[7:19],
        IMAGE,
        f"registry.test/vm/guest@{pulled}",
    )
    for n, form in enumerate(forms):
        made = client.create(client.run(f"pod-{n}"), image=pb.ImageSpec(image=form))
        assert client.status(made).image_id == pulled
        remove(client, form)
        assert listed(client, form) == []
        client.pull()


def test_images_that_share_a_disk_have_their_own_ids_and_statuses(client: Client, world: World) -> None:
    """kubelet knows only the id that PullImage returned, and removes images by it."""
    says = {
        OTHER: ImageConfig("1002", entrypoint=("/bin/a",)),
        "registry.test/b:1": ImageConfig("1003", cmd=("/bin/b",)),
    }
    ids: dict[str, str] = {}
    for name, config in says.items():
        world.outside.files.publish(name, b"one disk", config=config)
        ids[name] = client.pull(name)
    assert len(set(ids.values())) == 2
    for n, (name, config) in enumerate(says.items()):
        by_name = status(client, name)
        assert by_name is not None
        (repo_digest,) = by_name.repo_digests
        for reference in (ids[name], repo_digest):
            assert status(client, reference) == by_name
        assert (by_name.id, by_name.uid.value, by_name.size) == (ids[name], config.uid, len(b"one disk"))
        made = client.create(client.run(f"pod-{n}"), image=pb.ImageSpec(image=ids[name]))
        told = client.status(made)
        assert (told.image_id, told.image_ref) == (ids[name], repo_digest)
        assert [c.image_id for c in client.ListContainers(pb.ListContainersRequest()).containers if c.id == made] == [
            ids[name]
        ]
        (container,) = (c for c in world.records.containers.all() if c.id.value == made)
        assert container.spec.command == (*config.entrypoint, *config.cmd)
    remove(client, ids[OTHER])
    assert status(client, OTHER) is None
    left = status(client, "registry.test/b:1")
    assert left is not None
    assert left.id == ids["registry.test/b:1"]


def test_a_prefix_of_two_ids_is_refused_everywhere(client: Client, world: World) -> None:
    sandbox = client.run()
    # Some two of so many contents have ids that begin with the same four digits.
    contents = (f"disk {n}".encode() for n in itertools.count())
    seen: dict[str, bytes] = {}
    for content in contents:
        prefix = hashlib.sha256(content).hexdigest()[:4]
        if prefix in seen:
            break
        seen[prefix] = content
    for name, disk in (("registry.test/a:1", content), ("registry.test/b:1", seen[prefix])):
        world.outside.files.publish(name, disk)
        client.pull(name)
    for call in (
        lambda: status(client, prefix),
        lambda: listed(client, f"sha256:{prefix}"),
        lambda: remove(client, prefix),
        lambda: client.create(sandbox, image=pb.ImageSpec(image=prefix)),
    ):
        with refused(Code.INVALID_ARGUMENT, "fits 2 images"):
            call()
    assert len(listed(client)) == 3


@pytest.mark.parametrize("reference", ["registry.test/none:1", f"sha256:{'0' * 64}"])
def test_a_missing_image_is_an_empty_answer(client: Client, reference: str) -> None:
    assert status(client, reference) is None
    assert listed(client, reference) == []
    remove(client, reference)


@pytest.mark.parametrize(
    "name",
    ["has blank", "UPPER CASE", "a//b:tag:tag", "guest@sha256:short", "\x01", pytest.param("x" * 5000, id="long")],
)
def test_a_malformed_reference_is_refused(client: Client, name: str) -> None:
    for call in (
        lambda: status(client, name),
        lambda: client.pull(name),
        lambda: remove(client, name),
    ):
        with refused(Code.INVALID_ARGUMENT, "malformed image reference|at most 2048 are allowed"):
            call()


def test_an_empty_reference_is_refused_and_never_means_all(client: Client) -> None:
    for call in (lambda: status(client, ""), lambda: client.pull(""), lambda: remove(client, "")):
        with refused(Code.INVALID_ARGUMENT, "empty"):
            call()
    assert len(listed(client)) == 1


def test_pulling_an_image_that_does_not_exist_returns_not_found(client: Client) -> None:
    with refused(Code.NOT_FOUND, "not at its source"):
        client.pull("registry.test/none:1")


def pull_with(client: Client, **auth: Any) -> str:
    request = pb.PullImageRequest(image=pb.ImageSpec(image=OTHER), auth=pb.AuthConfig(**auth) if auth else None)
    return client.PullImage(request).image_ref


def test_each_pull_checks_the_credentials(client: Client, world: World) -> None:
    world.outside.files.publish(OTHER, b"secret disk", password="right")
    for auth in ({}, {"username": "me", "password": "wrong"}):
        with refused(Code.PERMISSION_DENIED, "credentials"):
            pull_with(client, **auth)
    pull_with(client, username="me", password="right")
    with refused(Code.PERMISSION_DENIED):
        pull_with(client)


def test_every_form_of_credentials_reaches_the_source_and_none_reaches_the_log(
    client: Client, world: World, capfd: pytest.CaptureFixture[str]
) -> None:
    world.outside.files.publish(OTHER, b"disk")
    pull_with(
        client,
        username="u",
        password="hunter2",
        auth="YQ==",
        server_address="s",
        identity_token="i",
        registry_token="r",
    )
    credentials = world.outside.files.fetched[-1][1]
    assert credentials is not None
    values = (credentials.username, credentials.password, credentials.auth, credentials.server_address)
    assert (*values, credentials.identity_token, credentials.registry_token) == ("u", "hunter2", "YQ==", "s", "i", "r")
    assert "hunter2" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("seconds", [0.001, 0.1])
def test_a_pull_is_cancelled_at_its_deadline(client: Client, world: World, seconds: float) -> None:
    world.outside.files.publish(OTHER, b"big disk")
    world.outside.files.stalled = True
    with refused(Code.DEADLINE_EXCEEDED):
        client.PullImage(pb.PullImageRequest(image=pb.ImageSpec(image=OTHER)), timeout=seconds)
    assert status(client, OTHER) is None
    world.outside.files.stalled = False
    assert client.pull(OTHER)


def test_a_pull_is_cancelled_when_its_client_leaves(client: Client, world: World) -> None:
    world.outside.files.publish(OTHER, b"big disk")
    world.outside.files.stalled = True
    gate = world.journal.hold("files.fetch")
    call = client.image.PullImage.future(pb.PullImageRequest(image=pb.ImageSpec(image=OTHER)))
    gate.wait()
    gate.open()
    call.cancel()
    assert world.outside.files.gave_up.wait(WAIT_LIMIT)
    assert status(client, OTHER) is None


def test_a_pull_continues_when_the_client_of_another_pull_of_the_image_leaves(client: Client, world: World) -> None:
    world.outside.files.publish(OTHER, b"other disk")
    gate = world.journal.hold("files.fetch")
    first = client.image.PullImage.future(pb.PullImageRequest(image=pb.ImageSpec(image=OTHER)))
    gate.wait()
    first.cancel()
    pulled = client.pull(OTHER)
    gate.open()
    image = status(client, OTHER)
    assert image is not None
    assert image.id == pulled


@pytest.mark.parametrize("error", [ResourceExhausted("no space left"), Unavailable("registry is down")])
def test_a_pull_that_fails_lists_nothing_and_can_be_repeated(client: Client, world: World, error: Any) -> None:
    world.outside.files.publish(OTHER, b"other disk")
    world.journal.fail("files.fetch", error)
    with refused(Code.RESOURCE_EXHAUSTED if "space" in str(error) else Code.UNKNOWN, str(error)):
        client.pull(OTHER)
    assert status(client, OTHER) is None
    client.pull(OTHER)


def test_an_unreachable_registry_gives_the_error_that_kubelet_recognises(client: Client, world: World) -> None:
    """kubelet compares the beginning of the message, and only if the code is UNKNOWN."""
    world.journal.fail("files.fetch", Unavailable("registry.test cannot be reached"))
    with pytest.raises(grpc.RpcError) as caught:
        client.pull()
    assert caught.value.code() is Code.UNKNOWN
    assert caught.value.details() == "RegistryUnavailable: registry.test cannot be reached"


def test_a_missing_signature_gives_the_error_that_kubelet_recognises(client: Client, world: World) -> None:
    world.journal.fail("files.fetch", SignatureRefused("image 'x' has no cosign signature"))
    with pytest.raises(grpc.RpcError) as caught:
        client.pull()
    assert caught.value.code() is Code.UNKNOWN
    assert caught.value.details() == "SignatureValidationFailed: image 'x' has no cosign signature"


def test_parallel_pulls_of_one_image_give_one_id(client: Client, world: World) -> None:
    world.outside.files.publish(OTHER, b"other disk")
    pulls = [Background(lambda: client.pull(OTHER)) for _ in range(8)]
    assert len({pull.done() for pull in pulls}) == 1
    assert len(listed(client)) == 2


def test_removal_takes_all_tags_and_may_be_repeated(client: Client, world: World) -> None:
    world.outside.files.publish(OTHER, b"a disk")
    assert client.pull(OTHER) == client.pull()
    for _ in range(2):
        remove(client, OTHER)
    assert listed(client) == []
    assert world.outside.files.files == {}


def test_an_image_in_use_can_be_removed_and_its_vm_runs_on(client: Client, world: World) -> None:
    sandbox, made = client.running()
    image = client.status(made).image_id
    remove(client, image)
    assert listed(client) == []
    assert client.status(made).state == pb.CONTAINER_RUNNING
    assert client.status(made).image_id == image
    client.remove_pod(sandbox)
    assert world.outside.files.files == {}


def test_image_fs_info_has_what_kubelet_dereferences(client: Client) -> None:
    answer = client.ImageFsInfo(pb.ImageFsInfoRequest())
    for (use,), mountpoint, taken in (
        (answer.image_filesystems, "/images", 6),
        (answer.container_filesystems, "/state", 0),
    ):
        assert use.fs_id.mountpoint == mountpoint
        assert use.HasField("used_bytes")
        assert use.used_bytes.value == taken
        assert use.timestamp > 0


def test_image_fs_info_separates_container_disks_from_images(client: Client) -> None:
    client.create(client.run())
    (containers,) = client.ImageFsInfo(pb.ImageFsInfoRequest()).container_filesystems
    (images,) = client.ImageFsInfo(pb.ImageFsInfoRequest()).image_filesystems
    assert containers.used_bytes.value >= 1 << 20
    assert containers.inodes_used.value > 0
    assert images.used_bytes.value == 6
