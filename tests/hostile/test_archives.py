"""Tenants cannot keep other tenants' secrets in an archive of `virtshim diag`."""

from __future__ import annotations

import json
import time

import pytest

from virtshim.cli.diag.secrets import Secrets

pytestmark = pytest.mark.hostile

PASSWORD = "hunter2-of-another-tenant"
MANY = 30_000


def test_a_record_full_of_secrets_does_not_crowd_out_other_records() -> None:
    secrets = Secrets()
    with secrets.one_record():
        secrets.record({"annotations": {f"a{n}": f"not-a-secret-{n}" for n in range(MANY)}})
    assert "more secrets" in secrets.trouble
    with secrets.one_record():
        secrets.record({"annotations": {"user-data": PASSWORD}})
    assert PASSWORD not in secrets.cleaned(f"a log says {PASSWORD} once")


def test_one_pod_does_not_crowd_out_the_other_pods_of_a_listing() -> None:
    secrets = Secrets()
    pods = [{"annotations": {"x": " ".join(f"word-{n}-{m}" for m in range(MANY // 10))}} for n in range(10)]
    kept = secrets.answer({"items": [*pods, {"annotations": {"user-data": PASSWORD}}]})
    assert PASSWORD not in json.dumps(kept)
    assert PASSWORD not in secrets.cleaned(f"a log says {PASSWORD} once")


@pytest.mark.parametrize("place", ["row", "document", "labels", "answer"])
def test_a_tenant_with_many_pods_does_not_crowd_out_other_tenants(place: str) -> None:
    """He has many small records; the limit is not first come, first served."""
    secrets = Secrets()
    for n in range(60):
        pod = pod_of("hostile", place, {f"a{m}": f"not-a-secret-{n}-{m}" for m in range(400)})
        with secrets.one_record(pod):
            secrets.record(pod)
    assert "namespace held more secrets" in secrets.trouble
    for n in range(50):
        pod = pod_of("honest", place, {"user-data": f"{PASSWORD}-{n}"})
        with secrets.one_record(pod):
            secrets.record(pod)
    text = "".join(f"a log says {PASSWORD}-{n} once\n" for n in range(50))
    assert PASSWORD not in secrets.cleaned(text)


def pod_of(namespace: str, place: str, annotations: dict[str, str]) -> object:
    """The data of virtshim or kubelet about a pod: the state database's row and document, a copy of a record, CRI's
    answer."""
    labels = {"io.kubernetes.pod.namespace": namespace, "namespace": "honest"}
    pod: object = {
        "row": [{"namespace": namespace, "annotations": annotations}, None],
        "document": [{"key": {"namespace": namespace}, "config": {"annotations": annotations}}],
        "labels": [{"config": {"labels": labels, "annotations": annotations}}],
        "answer": {"metadata": {"namespace": namespace}, "annotations": annotations},
    }[place]
    return pod


def test_each_of_many_tenants_has_its_share_beside_records_without_a_tenant() -> None:
    secrets = Secrets()
    for n in range(60):
        for record in ({"namespace": f"hostile-{n}"}, None):
            with secrets.one_record(record):
                secrets.record({"annotations": {f"a{m}": f"not-a-secret-{n}-{m}-{record}" for m in range(400)}})
    with secrets.one_record({"namespace": "honest"}):
        secrets.record({"annotations": {"user-data": PASSWORD}})
    assert "more secrets" in secrets.trouble
    assert PASSWORD not in secrets.cleaned(f"a log says {PASSWORD} once")


def test_ordinary_records_cause_no_trouble() -> None:
    secrets = Secrets()
    with secrets.one_record():
        secrets.record({"annotations": {"user-data": PASSWORD}})
    assert secrets.trouble == ""


def test_many_records_do_not_make_an_archive_slow() -> None:
    secrets = Secrets()
    for n in range(50):
        with secrets.one_record():
            secrets.record({"annotations": {"x": " ".join(f"word-{n}-{m}" for m in range(2000))}})
    began = time.thread_time()
    secrets.cleaned("nothing of it is here\n" * 10_000)
    assert time.thread_time() - began < 10
