"""The controller signs certificates for nodes, and agents renew them, with a stateful API server and real connections
between nodes."""

from __future__ import annotations

import base64
import contextlib
import datetime as dt
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID
from fakes.cluster_rights import ShippedRights
from fakes.kubernetes_api import RESOURCES, Asked, KubernetesApi, Refused
from structlog.testing import capture_logs

from virtshim.cluster.api import Api
from virtshim.cluster.node_certificate import NodeCertificate
from virtshim.cluster.signer import Signer
from virtshim.kubeapi.kubeconfig import access
from virtshim.model.errors import ShimError
from virtshim.peers.certificates import OwnCertificate, PeerFiles, read_certificate
from virtshim.peers.client import PeerClient
from virtshim.peers.ports import PeerLink
from virtshim.peers.server import PeerServer
from virtshim.system.clock import SystemClock
from virtshim.system.live import Live

NAMESPACE = "virtshim-cluster"
CONTROLLER = f"system:serviceaccount:{NAMESPACE}:virtshim-controller"
AGENT = f"system:serviceaccount:{NAMESPACE}:virtshim-agent"
NODE_NAME = "authentication.kubernetes.io/node-name"
REQUESTS = "certificatesigningrequests"
CA = "virtshim-node-ca"
HOUR = 3600.0
DAY = 24 * HOUR
WAIT = 30.0


class Ahead(SystemClock):
    """Goes before the machine's clock."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.waited = 0.0

    def now_ns(self) -> int:
        return super().now_ns() + int(self.seconds * 1e9)

    def monotonic(self) -> float:
        return super().monotonic() + self.seconds + self.waited


@pytest.fixture
def rights() -> ShippedRights:
    extra = {f"agent-{node}": {NODE_NAME: [node]} for node in ("n1", "n2")}
    return ShippedRights(extra, components=("certificates",))


@pytest.fixture
def cluster(api: KubernetesApi, rights: ShippedRights) -> KubernetesApi:
    api.extra = rights.extra
    api.tokens |= dict.fromkeys(rights.extra, AGENT)
    return api


@pytest.fixture
def sign(cluster: KubernetesApi) -> Iterator[Callable[..., Signer]]:
    with contextlib.ExitStack() as stack:

        def start(ahead: float = 0.0) -> Signer:
            config = cluster.kubeconfig("controller")
            made = Signer(lambda: access(config), Ahead(ahead), NAMESPACE)
            stack.callback(made.close)
            made.start()
            return made

        yield start


class Node:
    """Its agent, which acts while a test waits."""

    def __init__(self, api: KubernetesApi, name: str, place: Path) -> None:
        self.api, self.name, self.clock = api, name, Ahead()
        config = api.kubeconfig(f"agent-{name}")
        self.directory = place / name
        self.agent = NodeCertificate(name, NAMESPACE, str(self.directory), Api(lambda: access(config)), self.clock)

    @property
    def files(self) -> PeerFiles:
        return self.agent.files

    @property
    def text(self) -> str:
        return (self.directory / "node.pem").read_text()

    @property
    def own(self) -> OwnCertificate | None:
        try:
            return read_certificate(self.files)
        except ShimError:
            return None

    def until(self, condition: Callable[[], Any]) -> Any:
        end = time.monotonic() + WAIT
        while not (found := condition()):
            assert time.monotonic() < end, "it has not come about"
            self.agent.look()
            self.clock.waited += 0.5
            with self.api.news:
                self.api.news.wait(0.02)
        return found

    def later(self, seconds: float) -> None:
        self.clock.seconds += seconds
        self.agent.look()

    def renewed(self) -> None:
        before = self.text
        self.until(lambda: self.text != before)


@pytest.fixture
def node_of(cluster: KubernetesApi, tmp_path: Path) -> Callable[[str], Node]:
    return lambda name: Node(cluster, name, tmp_path)


@pytest.fixture
def n1(node_of: Callable[[str], Node]) -> Node:
    return node_of("n1")


@pytest.fixture
def both(sign: Callable[..., Signer], node_of: Callable[[str], Node]) -> tuple[Node, Node]:
    """Two nodes with certificates."""
    sign()
    nodes = node_of("n1"), node_of("n2")
    for one in nodes:
        one.until(lambda one=one: one.own)  # type: ignore[misc]
    return nodes


@contextlib.contextmanager
def served(node: Node) -> Iterator[Live[Any]]:
    """The addresses of nodes; the node greets whoever connects, and waits for a word."""

    def greet(link: PeerLink) -> None:
        link.send({"peer": link.peer}, WAIT)
        link.receive(WAIT)

    server = PeerServer("127.0.0.1:0", node.files, greet)
    server.start()
    try:
        yield Live({node.name: f"127.0.0.1:{server.port}"})
    finally:
        server.close()


def greeted(source: Node, target: Node) -> Any:
    with served(target) as addresses, PeerClient(source.files, addresses).connect(target.name, WAIT) as link:
        return link.receive(WAIT)["peer"]


def requests(api: KubernetesApi) -> list[dict[str, Any]]:
    return api.all(REQUESTS)


# --- getting and renewing


def test_nodes_with_certificates_of_the_signer_accept_each_other(both: tuple[Node, Node]) -> None:
    n1, n2 = both
    assert (greeted(n1, n2), greeted(n2, n1)) == ("n1", "n2")


def test_a_certificate_lasts_for_a_day_at_most_and_says_nothing_but_the_nodes_name(both: tuple[Node, Node]) -> None:
    found = x509.load_pem_x509_certificates(both[0].text.encode())[0]
    assert found.not_valid_after_utc - found.not_valid_before_utc <= dt.timedelta(days=1)
    assert list(found.subject) == []
    assert found.extensions.get_extension_for_class(x509.BasicConstraints).value.ca is False


def test_the_file_is_of_root_alone_and_nothing_else_is_left(both: tuple[Node, Node]) -> None:
    directory = both[0].directory
    assert os.listdir(directory) == ["node.pem"]
    assert [path.stat().st_mode & 0o777 for path in (directory, directory / "node.pem")] == [0o700, 0o600]


def test_a_certificate_is_renewed_with_a_new_key_when_two_thirds_of_its_time_are_over(both: tuple[Node, Node]) -> None:
    n1, n2 = both
    before = n1.text
    n1.later(15.5 * HOUR)
    assert (n1.text, len(requests(n1.api))) == (before, 2)
    n1.later(HOUR)
    n1.renewed()
    assert n1.text.partition("BEGIN CERTIFICATE")[0] != before.partition("BEGIN CERTIFICATE")[0]
    assert (greeted(n1, n2), greeted(n2, n1)) == ("n1", "n2")


def test_a_renewal_cuts_no_connection_and_holds_for_the_next_one(both: tuple[Node, Node]) -> None:
    n1, n2 = both
    with served(n2) as addresses:
        client = PeerClient(n1.files, addresses)
        with client.connect("n2", WAIT) as link:
            assert link.receive(WAIT) == {"peer": "n1"}
            for one in both:
                one.later(17 * HOUR)
                one.renewed()
            with client.connect("n2", WAIT) as second:
                assert second.receive(WAIT) == {"peer": "n1"}
            link.send({"still": "open"}, WAIT)


def test_a_good_certificate_costs_one_request_a_minute(both: tuple[Node, Node]) -> None:
    n1, _ = both
    n1.later(61)
    before = len(n1.api.asked)
    for _ in range(3):
        n1.agent.look()
    assert n1.api.asked[before:] == []
    n1.later(61)
    assert n1.api.asked[before:] == [f"GET /api/v1/namespaces/{NAMESPACE}/configmaps/{CA}"]


def test_a_file_that_is_damaged_or_of_another_node_is_replaced(both: tuple[Node, Node]) -> None:
    n1, n2 = both
    for text in ("rubbish", n2.text):
        (n1.directory / "node.pem").write_text(text)
        n1.later(6 * 60)
        n1.until(lambda: n1.own is not None and n1.own.node == "n1")


# --- what is refused


def csr(*names: str, key: Any = None, subject: str = "", more: Any = None) -> str:
    key = key or ec.generate_private_key(ec.SECP256R1())
    attributes = [x509.NameAttribute(NameOID.COMMON_NAME, subject)] if subject else []
    made = x509.CertificateSigningRequestBuilder().subject_name(x509.Name(attributes))
    if names:
        made = made.add_extension(x509.SubjectAlternativeName([x509.DNSName(name) for name in names]), critical=True)
    if more is not None:
        made = made.add_extension(more, critical=False)
    text = made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    return base64.b64encode(text).decode()


def forged() -> str:
    """A request for somebody else's key: its own signature is wrong."""
    der = bytearray(x509.load_pem_x509_csr(base64.b64decode(csr("n1"))).public_bytes(serialization.Encoding.DER))
    der[-1] ^= 1
    text = b"-----BEGIN CERTIFICATE REQUEST-----\n" + base64.encodebytes(bytes(der))
    return base64.b64encode(text + b"-----END CERTIFICATE REQUEST-----\n").decode()


def put(api: KubernetesApi, name: str = "asked", status: Any = None, **changes: Any) -> None:
    """A request as the API server has it from the agent of n1."""
    spec = {
        "request": csr("n1"),
        "signerName": "virtshim.io/node",
        "expirationSeconds": 86400,
        "usages": ["digital signature", "client auth", "server auth"],
        "username": AGENT,
        "extra": {NODE_NAME: ["n1"]},
        **changes,
    }
    api.put(REQUESTS, {"metadata": {"name": name}, "spec": spec, "status": status or {}})


def answered(api: KubernetesApi, name: str = "asked") -> tuple[list[tuple[str, str]], bool]:
    """Types and reasons of the conditions, and whether there is a certificate; as soon as there is an answer."""
    end = time.monotonic() + WAIT
    while True:
        status = api.one(REQUESTS, "", name).get("status", {})
        said = [(one["type"], one["reason"]) for one in status.get("conditions", ())]
        if status.get("certificate") or any(kind in ("Denied", "Failed") for kind, _ in said):
            return said, "certificate" in status
        assert time.monotonic() < end, "there is no answer"
        with api.news:
            api.news.wait(0.05)


# The difference from a right request of node n1, and the reason for its denial.
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"request": csr("n2")}, "WrongName"),
    ({"request": csr("n1", "n2")}, "WrongName"),
    ({"request": csr("*.example")}, "WrongName"),
    ({"request": csr()}, "WrongName"),
    ({"request": csr("n1", subject="n1")}, "WrongName"),
    ({"request": csr("n1", more=x509.BasicConstraints(ca=True, path_length=None))}, "WrongName"),
    ({"request": csr("n1", key=ec.generate_private_key(ec.SECP384R1()))}, "WrongKey"),
    ({"request": csr("n1", key=rsa.generate_private_key(65537, 1024))}, "WrongKey"),
    ({"request": forged()}, "WrongKey"),
    ({"request": base64.b64encode(b"rubbish").decode()}, "Unreadable"),
    ({"request": "no base64"}, "Unreadable"),
    ({"request": "A" * 10_000}, "Unreadable"),
    ({"usages": ["client auth", "server auth"]}, "WrongUsages"),
    ({"usages": ["digital signature", "client auth", "server auth", "cert sign"]}, "WrongUsages"),
    ({"expirationSeconds": 86401}, "LastsTooLong"),
    ({"extra": {NODE_NAME: ["n2"]}}, "WrongName"),
    ({"extra": {NODE_NAME: ["n1", "n2"]}}, "NoNode"),
    ({"extra": {}}, "NoNode"),
    ({"username": "system:serviceaccount:shop:virtshim-agent"}, "NoAgent"),
    ({"username": "system:node:n1"}, "NoAgent"),
]


def test_a_request_that_is_not_right_is_denied_with_the_reason(
    cluster: KubernetesApi, sign: Callable[..., Signer]
) -> None:
    for number, (changes, _) in enumerate(WRONG):
        put(cluster, f"wrong-{number}", **changes)
    sign()
    told = [answered(cluster, f"wrong-{number}") for number in range(len(WRONG))]
    assert told == [([("Denied", reason)], False) for _, reason in WRONG]


def test_a_wrong_request_keeps_no_right_one_waiting(cluster: KubernetesApi, sign: Callable[..., Signer]) -> None:
    put(cluster, "a", request=csr("n2"))
    put(cluster, "b")
    sign()
    assert [answered(cluster, name)[1] for name in ("a", "b")] == [False, True]


def test_a_request_without_a_time_gets_a_day(cluster: KubernetesApi, sign: Callable[..., Signer]) -> None:
    sign()
    put(cluster)
    cluster.edit(REQUESTS, "", "asked", lambda one: one["spec"].pop("expirationSeconds"))
    assert answered(cluster)[1]


def test_a_wrong_request_that_somebody_has_approved_is_not_signed(
    cluster: KubernetesApi, sign: Callable[..., Signer]
) -> None:
    approved = {"type": "Approved", "status": "True", "reason": "ByHand"}
    put(cluster, request=csr("n2"), status={"conditions": [approved]})
    sign()
    assert answered(cluster) == ([("Approved", "ByHand"), ("Failed", "WrongName")], False)


def test_a_request_that_somebody_has_denied_stays_so(cluster: KubernetesApi, sign: Callable[..., Signer]) -> None:
    denied = {"type": "Denied", "status": "True", "reason": "ByHand"}
    put(cluster, "a", status={"conditions": [denied]})
    put(cluster, "b")
    sign()
    assert answered(cluster, "b")[1]
    assert answered(cluster, "a") == ([("Denied", "ByHand")], False)


def test_requests_for_other_signers_are_left_alone(cluster: KubernetesApi, sign: Callable[..., Signer]) -> None:
    put(cluster, "a", signerName="kubernetes.io/kubelet-serving")
    put(cluster, "b")
    sign()
    assert answered(cluster, "b")[1]
    assert cluster.one(REQUESTS, "", "a")["status"] == {}


def test_an_agent_that_asks_for_another_nodes_name_keeps_its_own_certificate_and_logs_the_reason(
    both: tuple[Node, Node], tmp_path: Path
) -> None:
    """With node n1's token, and n2's name."""
    n1, _ = both
    config = n1.api.kubeconfig("agent-n1")
    liar = NodeCertificate("n2", NAMESPACE, str(tmp_path / "liar"), Api(lambda: access(config)), n1.clock)
    with capture_logs() as logs:
        n1.until(lambda: liar.look() or [one for one in logs if "WrongName" in one.get("error", "")])
    assert not (tmp_path / "liar").exists()


# --- the CA


def test_a_lost_ca_is_made_anew_and_all_nodes_follow(
    cluster: KubernetesApi, both: tuple[Node, Node], sign: Callable[..., Signer]
) -> None:
    n1, n2 = both
    cluster.gone("secrets", NAMESPACE, CA)
    assert greeted(n1, n2) == "n1"
    sign()
    for one in both:
        one.later(6 * 60)
        one.renewed()
    assert (greeted(n1, n2), greeted(n2, n1)) == ("n1", "n2")


def test_an_old_ca_is_renewed_with_its_key_so_that_no_node_needs_a_new_certificate(
    cluster: KubernetesApi, both: tuple[Node, Node], sign: Callable[..., Signer]
) -> None:
    n1, n2 = both
    before = cluster.one("configmaps", NAMESPACE, CA)
    sign(250 * DAY)
    n1.until(lambda: cluster.one("configmaps", NAMESPACE, CA) != before)
    # The new certificate of the CA begins later, by the controller's clock. So the first one still counts here.
    n1.later(61)
    assert (n1.own is not None, greeted(n1, n2)) == (True, "n1")


def test_nodes_with_the_former_and_the_renewed_certificate_of_the_ca_accept_each_other(both: tuple[Node, Node]) -> None:
    from virtshim.cluster.node_ca import NodeCa

    n1, n2 = both
    had = NodeCa.of(n1.api.one("secrets", NAMESPACE, CA))
    renewed = had.renewed(time.time()).text
    n1.api.edit("configmaps", NAMESPACE, CA, lambda one: one["data"].update({"ca.crt": renewed}))
    count = len(requests(n1.api))
    n1.later(61)
    assert (renewed in n1.text, had.text in n2.text, len(requests(n1.api))) == (True, True, count)
    assert (greeted(n1, n2), greeted(n2, n1)) == ("n1", "n2")


@pytest.mark.parametrize("data", [{}, {"tls.crt": "cnViYmlzaA==", "tls.key": "cnViYmlzaA=="}])
def test_a_damaged_ca_is_not_replaced_and_the_log_has_the_remedy(
    cluster: KubernetesApi, sign: Callable[..., Signer], data: dict[str, str]
) -> None:
    secret = {"metadata": {"namespace": NAMESPACE, "name": CA}, "type": "kubernetes.io/tls", "data": data}
    cluster.put("secrets", secret)
    put(cluster)
    with capture_logs() as logs:
        sign()
        wait_for(cluster, lambda: [one for one in logs if "delete it, and a new CA is made" in one.get("error", "")])
    assert cluster.one("secrets", NAMESPACE, CA)["data"] == data
    assert cluster.one(REQUESTS, "", "asked")["status"] == {}


def wait_for(api: KubernetesApi, condition: Callable[[], Any]) -> None:
    end = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < end, "it has not come about"
        with api.news:
            api.news.wait(0.05)


def test_two_controllers_make_one_ca_and_answer_each_request_once(
    cluster: KubernetesApi, sign: Callable[..., Signer], node_of: Callable[[str], Node]
) -> None:
    sign()
    sign()
    nodes = node_of("n1"), node_of("n2")
    for one in nodes:
        one.until(lambda one=one: one.own)  # type: ignore[misc]
    assert (greeted(*nodes), greeted(nodes[1], nodes[0])) == ("n1", "n2")
    assert len(cluster.all("secrets")) == len(cluster.all("configmaps")) == 1
    said = [[one["type"] for one in found["status"]["conditions"]] for found in requests(cluster)]
    assert said == [["Approved"], ["Approved"]]


# --- trouble


def away(_asked: Asked) -> None:
    raise Refused(503, "ServiceUnavailable", "the API server is away")


def troubles(logs: Any) -> list[tuple[str, str]]:
    return [(one["event"], one["meanwhile"]) for one in logs if one["log_level"] == "warning" and "meanwhile" in one]


def test_while_the_api_server_is_away_the_certificate_stays_and_the_log_says_until_when(
    both: tuple[Node, Node],
) -> None:
    n1, n2 = both
    before, n1.api.before = n1.text, away
    with capture_logs() as logs:
        for _ in range(3):
            n1.later(8 * HOUR)
    ((event, meanwhile),) = troubles(logs)
    assert (event, "is valid until 20" in meanwhile) == ("certificate.not_renewed", True)
    assert (n1.text, greeted(n1, n2)) == (before, "n1")
    n1.api.before = None
    with capture_logs() as logs:
        n1.later(61)
        n1.renewed()
    assert "certificate.works_again" in [one["event"] for one in logs]


def test_a_node_without_any_usable_certificate_says_that_no_vm_moves(n1: Node) -> None:
    n1.api.before = away
    with capture_logs() as logs:
        n1.agent.look()
    assert troubles(logs) == [("certificate.missing", "no VM moves to this node or away from it")]


def test_without_a_signing_controller_the_request_waits_and_the_log_has_the_remedy(
    n1: Node, sign: Callable[..., Signer], cluster: KubernetesApi
) -> None:
    with capture_logs() as logs:
        n1.agent.look()
    assert "run the controller with --sign-certificates" in logs[0]["error"]
    first = sign()
    wait_for(cluster, lambda: cluster.all("configmaps"))
    first.close()
    n1.later(61)
    with capture_logs() as logs:
        n1.later(61)
    assert "is the controller running with --sign-certificates?" in logs[0]["error"]
    sign()
    n1.until(lambda: n1.own)
    assert len(requests(cluster)) == 1


def test_a_clock_that_differs_too_much_leaves_the_former_certificate_in_force(
    n1: Node, sign: Callable[..., Signer], cluster: KubernetesApi
) -> None:
    first = sign(3 * 60)
    n1.until(lambda: n1.own)
    first.close()
    before = n1.text
    sign(HOUR)
    with capture_logs() as logs:
        n1.later(17 * HOUR)
        n1.until(lambda: [one for one in logs if "compare this node's clock" in one.get("error", "")])
    assert (n1.text, n1.own is not None) == (before, True)
    assert os.listdir(n1.directory) == ["node.pem"]
    for _ in range(10):  # it does not ask again and again
        n1.later(20)
    assert len(requests(cluster)) == 2


def test_a_directory_that_cannot_be_written_is_told(sign: Callable[..., Signer], n1: Node) -> None:
    sign()
    n1.directory.write_text("no directory")
    with capture_logs() as logs:
        n1.until(lambda: [one for one in logs if "File exists" in one.get("error", "")])


# The agent in a process of its own, which ends at its Nth action on a file of the directory, or after its Nth request.
_DYING = """
import os, sys, time
from virtshim.cluster.api import Api
from virtshim.cluster.node_certificate import NodeCertificate
from virtshim.kubeapi.kubeconfig import access
from virtshim.system.clock import SystemClock

config, directory, left, ahead = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])

def count(event, arguments):
    global left
    of_file = event in ("open", "os.rename", "os.remove", "os.mkdir") and str(arguments[0]).startswith(directory)
    if of_file or event == "socket.connect":
        left -= 1
        if not left:
            os.kill(os.getpid(), 9)

class Later(SystemClock):
    def now_ns(self):
        return super().now_ns() + int(ahead * 1e9)

agent = NodeCertificate("n1", "virtshim-cluster", directory, Api(lambda: access(config)), Later())
path = agent.files.certificate
before = open(path).read() if os.path.exists(path) else ""
sys.addaudithook(count)
while not os.path.exists(path) or open(path).read() == before:
    agent.look()
    time.sleep(0.02)
os._exit(0)
"""


def test_a_kill_at_any_moment_leaves_the_former_or_the_new_certificate_whole(both: tuple[Node, Node]) -> None:
    n1, n2 = both
    config, seen = n1.api.kubeconfig("agent-n1"), set()
    for kill_at in range(1, 200):
        argv = [sys.executable, "-c", _DYING, config, str(n1.directory), str(kill_at), str(17 * HOUR)]
        before = n1.text
        done = subprocess.run(argv, check=False, timeout=60, capture_output=True, text=True)
        assert done.returncode in (0, -9), done.stderr
        assert n1.own is not None, f"killed at its action {kill_at}"
        assert set(os.listdir(n1.directory)) <= {"node.pem", "candidate.pem", "candidate.pem.new"}
        seen.add(n1.text == before)
        if done.returncode == 0:
            break
    else:
        pytest.fail("it was never fast enough")
    assert seen == {True, False}
    assert greeted(n1, n2) == "n1"
    assert os.listdir(n1.directory) == ["node.pem"]


# --- rights


def ask(api: KubernetesApi, user: str, method: str, path: str, body: Any = None, token: str = "") -> Any:
    """`path`: PLURAL/NAMESPACE/NAME, and a subresource."""
    plural, namespace, name, sub = (*path.split("/"), "")[:4]
    (resource,) = [one for one in RESOURCES if one.plural == plural]
    return api.answer(Asked(method, resource, namespace, name, sub, {}, body, user, token))


def test_both_programs_need_every_right_that_they_get_for_certificates(
    cluster: KubernetesApi, rights: ShippedRights, sign: Callable[..., Signer], n1: Node
) -> None:
    first = sign()
    n1.until(lambda: n1.own)
    first.close()
    before = cluster.one("configmaps", NAMESPACE, CA)
    sign(250 * DAY)  # renews the CA
    wait_for(cluster, lambda: cluster.one("configmaps", NAMESPACE, CA) != before)
    for user in (CONTROLLER, AGENT):
        assert rights.granted(user) - ShippedRights().granted(user) == rights.used[user]


SECRET: dict[str, Any] = {"metadata": {"name": CA}, "type": "kubernetes.io/tls", "data": {}}
APPROVED = {"status": {"conditions": [{"type": "Approved", "status": "True", "reason": "Mine"}]}}


@pytest.mark.parametrize(
    ("method", "path", "body", "told"),
    [
        ("GET", "secrets/shop/key", None, "cannot get resource"),
        ("GET", f"secrets/{NAMESPACE}/other", None, "cannot get resource"),
        ("GET", f"secrets/{NAMESPACE}/", None, "cannot list resource"),
        ("DELETE", f"secrets/{NAMESPACE}/{CA}", None, "cannot delete resource"),
        ("POST", "secrets/shop/", SECRET, "cannot create resource"),
        ("POST", f"secrets/{NAMESPACE}/", {**SECRET, "metadata": {"name": "other"}}, "of the nodes' CA"),
        (
            "POST",
            f"secrets/{NAMESPACE}/",
            {**SECRET, "type": "kubernetes.io/service-account-token"},
            "of the nodes' CA",
        ),
        ("POST", f"configmaps/{NAMESPACE}/", {"metadata": {"name": "other"}, "data": {}}, "of the nodes' CA"),
        ("PATCH", f"configmaps/{NAMESPACE}/other", {"data": {}}, "cannot patch resource"),
        ("PATCH", f"{REQUESTS}//foreign/approval", APPROVED, 'cannot approve resource "signers"'),
        ("PATCH", f"{REQUESTS}//foreign/status", {"status": {}}, 'cannot sign resource "signers"'),
        ("PATCH", f"{REQUESTS}//foreign", {"metadata": {"labels": {"a": "b"}}}, "cannot patch resource"),
    ],
)
def test_the_controller_may_touch_nothing_else_for_certificates(
    cluster: KubernetesApi, rights: ShippedRights, method: str, path: str, body: Any, told: str
) -> None:
    put(cluster, "foreign", signerName="kubernetes.io/kubelet-serving")
    with pytest.raises(Refused, match=told):
        ask(cluster, CONTROLLER, method, path, body)
    rights.refused.clear()


def wanted(**changes: Any) -> dict[str, Any]:
    spec = {
        "request": csr("n1"),
        "signerName": "virtshim.io/node",
        "expirationSeconds": 86400,
        "usages": ["client auth"],
    }
    return {"metadata": {"name": "mine"}, "spec": {**spec, **changes}}


@pytest.mark.parametrize(
    ("method", "path", "body", "token", "told"),
    [
        ("GET", f"secrets/{NAMESPACE}/{CA}", None, "agent-n1", "cannot get resource"),
        ("GET", f"secrets/{NAMESPACE}/", None, "agent-n1", "cannot list resource"),
        ("PATCH", f"configmaps/{NAMESPACE}/{CA}", {"data": {}}, "agent-n1", "cannot patch resource"),
        ("GET", f"configmaps/{NAMESPACE}/other", None, "agent-n1", "cannot get resource"),
        ("GET", f"{REQUESTS}//", None, "agent-n1", "cannot list resource"),
        ("PATCH", f"{REQUESTS}//own/approval", APPROVED, "agent-n1", "cannot patch resource"),
        ("PATCH", f"{REQUESTS}//own/status", {"status": {}}, "agent-n1", "cannot patch resource"),
        ("DELETE", f"{REQUESTS}//own", None, "agent-n1", "cannot delete resource"),
        (
            "POST",
            f"{REQUESTS}//",
            wanted(signerName="kubernetes.io/kube-apiserver-client"),
            "agent-n1",
            "only the signer",
        ),
        ("POST", f"{REQUESTS}//", wanted(expirationSeconds=86401), "agent-n1", "a day at most"),
        ("POST", f"{REQUESTS}//", wanted(), "", "names no node"),
    ],
)
def test_an_agent_may_do_nothing_else_for_its_certificate(
    cluster: KubernetesApi, rights: ShippedRights, method: str, path: str, body: Any, token: str, told: str
) -> None:
    put(cluster, "own")
    with pytest.raises(Refused, match=told):
        ask(cluster, AGENT, method, path, body, token)
    rights.refused.clear()


def test_what_an_agent_writes_about_itself_into_a_request_does_not_count(
    cluster: KubernetesApi, sign: Callable[..., Signer]
) -> None:
    """The API server writes who has asked."""
    sign()
    lie = wanted(request=csr("n2"), usages=["digital signature", "client auth", "server auth"])
    lie["spec"] |= {"username": AGENT, "extra": {NODE_NAME: ["n2"]}}
    ask(cluster, AGENT, "POST", f"{REQUESTS}//", lie, "agent-n1")
    assert answered(cluster, "mine") == ([("Denied", "WrongName")], False)


def test_without_the_component_neither_program_has_these_rights() -> None:
    plain = ShippedRights()
    for user in (CONTROLLER, AGENT):
        assert not [
            right for right in plain.granted(user) if right[1] in ("secrets", "configmaps", "signers", REQUESTS)
        ]
