"""`virtshim check` reports the service and the token of the agent on a node that runs VMs alone."""

from __future__ import annotations

import base64
import json
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from virtshim.config.settings import Settings
from virtshim.kubeapi.kubeconfig import TokenClaims, token_claims
from virtshim.preflight.api_server import agent_findings
from virtshim.preflight.checks import ALL
from virtshim.preflight.finding import Level
from virtshim.preflight.node_checks import cluster_agent
from virtshim.preflight.virtualization import ProgramOutput

pytestmark = pytest.mark.operator

NOW = 1_800_000_000.0
ACTIVE = ProgramOutput("active")


def token(node: str = "n1", **claims: Any) -> str:
    """As `kubectl create token` prints one."""
    bound = {"namespace": "virtshim-cluster", "node": {"name": node, "uid": "1"}} if node else {}
    document = {"iss": "https://cluster", "iat": NOW - 3600, "exp": NOW + 82800, "kubernetes.io": bound, **claims}
    parts = [base64.urlsafe_b64encode(json.dumps(one).encode()).decode().rstrip("=") for one in ({}, document)]
    return ".".join([*parts, "c2lnbmF0dXJl"])


def kubeconfig(place: Path, **user: Any) -> str:
    document = {
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "one", "user": "me"}}],
        "clusters": [{"name": "one", "cluster": {"server": "https://192.0.2.1:6443"}}],
        "users": [{"name": "me", "user": user}],
    }
    path = place / "agent.kubeconfig"
    path.write_text(yaml.safe_dump(document))
    return str(path)


def test_check_includes_the_agent_and_says_nothing_of_it_on_other_nodes(tmp_path: Path) -> None:
    assert cluster_agent in ALL
    assert cluster_agent(Settings(), str(tmp_path / "none")) == []
    assert cluster_agent(Settings(), kubeconfig(tmp_path, token=token()))[0].text


def test_a_running_agent_with_a_fresh_token_is_in_order(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(token())
    (found,) = agent_findings(kubeconfig(tmp_path, tokenFile="token"), ACTIVE, NOW)
    assert (found.level, "bound to node n1, expires at 2027-01-16 07:00 UTC" in found.text) == (Level.OK, True)


@pytest.mark.parametrize(
    ("user", "told", "remedy"),
    [
        ({"token": token(exp=NOW - 1, iat=NOW - 86400)}, "expired at 2027-01-15 07:59 UTC", "write a new token"),
        ({"token": token(iat=NOW - 60000, exp=NOW + 20000)}, "two thirds of its life", "write a new token"),
        ({"token": token("")}, "no token that is bound to a node", "never use kubelet's kubeconfig"),
        ({"token": "opaque"}, "no token that is bound to a node", "never use kubelet's kubeconfig"),
        ({"tokenFile": "none"}, "No such file", "correct the file"),
        ({}, "neither a token nor a certificate", "correct the file"),
    ],
)
def test_a_token_that_does_not_hold_is_named_with_the_remedy(
    tmp_path: Path, user: dict[str, Any], told: str, remedy: str
) -> None:
    (found,) = agent_findings(kubeconfig(tmp_path, **user), ACTIVE, NOW)
    assert found.level is Level.WARNING
    assert told in found.text
    assert remedy in found.remedy
    assert "opaque" not in found.text


@pytest.mark.parametrize(
    ("state", "told"),
    [
        (ProgramOutput("inactive"), "virtshim-agent.service is inactive"),
        (ProgramOutput("failed"), "virtshim-agent.service is failed"),
        (ProgramOutput(trouble="no systemd"), "whether it runs is not known: no systemd"),
    ],
)
def test_an_agent_that_has_credentials_and_does_not_run_is_named(
    tmp_path: Path, state: ProgramOutput, told: str
) -> None:
    _, found = agent_findings(kubeconfig(tmp_path, token=token()), state, NOW)
    assert (found.level, told in found.text, bool(found.remedy)) == (Level.WARNING, True, True)


@pytest.mark.parametrize("text", ["", "a.b", "a.b.c", "a.W10.c", "a.MQ.c", "a.eyJrdWJlcm5ldGVzLmlvIjogMX0.c"])
def test_any_other_text_is_a_token_that_says_nothing(text: str) -> None:
    assert token_claims(text) == TokenClaims()


def test_a_token_says_its_node_and_its_times() -> None:
    assert token_claims(token(iat=1, exp=time.time())).node == "n1"
    assert token_claims(token(iat=1, exp=2)) == TokenClaims("n1", 1.0, 2.0)
    assert token_claims(token(iat="x", exp=None)) == TokenClaims("n1")
