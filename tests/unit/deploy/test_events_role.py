"""deploy/events.yaml gives an account the right to create Events, and no other right."""

from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.operator

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
DOCUMENTS: list[Any] = list(yaml.safe_load_all((DEPLOY / "events.yaml").read_text()))
BY_KIND = {document["kind"]: document for document in DOCUMENTS}


def test_the_account_may_create_events_and_do_nothing_else() -> None:
    assert BY_KIND["ClusterRole"]["rules"] == [{"apiGroups": [""], "resources": ["events"], "verbs": ["create"]}]
    (subject,) = BY_KIND["ClusterRoleBinding"]["subjects"]
    assert {key: subject[key] for key in ("name", "namespace")} == BY_KIND["ServiceAccount"]["metadata"]
    assert BY_KIND["ClusterRoleBinding"]["roleRef"]["name"] == BY_KIND["ClusterRole"]["metadata"]["name"]


def test_the_namespace_is_the_daemonsets() -> None:
    daemonset = list(yaml.safe_load_all((DEPLOY / "kustomize/overlays/mixed/daemonset.yaml").read_text()))
    assert BY_KIND["Namespace"] in daemonset
