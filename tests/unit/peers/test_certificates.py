"""A node accepts only proper certificates, of others and of its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from fakes.node_certificates import CLIENT, SERVER, ClusterCa
from structlog.testing import capture_logs

from virtshim.model.errors import PermissionRefused, ShimError, Unavailable, WrongState
from virtshim.peers.certificates import PeerFiles, read_certificate
from virtshim.peers.client import PeerClient
from virtshim.peers.ports import PeerLink
from virtshim.peers.server import PeerServer
from virtshim.system.live import Live

pytestmark = pytest.mark.outlive

Serve = Callable[..., PeerClient]
WAIT = 30.0


def greet(link: PeerLink) -> None:
    link.send({"peer": link.peer}, WAIT)
    link.receive(WAIT)


def greeted(client: PeerClient, node: str = "two") -> object:
    with client.connect(node, WAIT) as link:
        return link.receive(WAIT)


def test_a_node_is_refused_if_its_certificate_names_another_one(serve: Serve) -> None:
    client = serve(greet)
    with pytest.raises(PermissionRefused, match=r"node three: the certificate at 127\.0\.0\.1 port \d+ names node two"):
        greeted(client, "three")
    assert greeted(client) == {"peer": "one"}


@pytest.mark.parametrize("names", [(), ("*.example",), ("two", "three"), ("Two",)])
def test_a_certificate_must_name_exactly_one_node(ca: ClusterCa, names: tuple[str, ...]) -> None:
    assert "must have one DNS name, the node's" in trouble_of(ca.node(*names))


def trouble_of(files: PeerFiles) -> str:
    with pytest.raises(WrongState) as caught:
        PeerClient(files, Live({})).check()
    with pytest.raises(WrongState), PeerClient(files, Live({})).connect("two", WAIT):
        pass
    return str(caught.value)


def test_a_node_without_certificate_is_told_what_to_set() -> None:
    assert "set peers.certificate, peers.key and peers.ca" in trouble_of(PeerFiles())


def test_the_node_says_what_is_wrong_with_its_files(ca: ClusterCa, tmp_path: Path) -> None:
    good = ca.node("one")
    other, foreign = ca.node("one"), ClusterCa(tmp_path).node("one")
    assert f"peers.key: {tmp_path}/none cannot be read: No such file" in trouble_of(
        PeerFiles(good.certificate, f"{tmp_path}/none", good.ca)
    )
    assert f"peers.ca: {tmp_path} is not a regular file" in trouble_of(
        PeerFiles(good.certificate, good.key, str(tmp_path))
    )
    assert "do not fit together: key values mismatch" in trouble_of(PeerFiles(good.certificate, other.key, good.ca))
    assert f"peers.ca: {good.key} has no usable certificate" in trouble_of(
        PeerFiles(good.certificate, good.key, good.key)
    )
    assert "other nodes would refuse" in trouble_of(PeerFiles(good.certificate, good.key, foreign.ca))
    assert "certificate has expired" in trouble_of(ca.node("one", lasts=-60))
    for usage in (CLIENT, SERVER):
        assert "unsuitable certificate purpose" in trouble_of(ca.node("one", usages=[usage]))
    PeerClient(good, Live({})).check()


@pytest.mark.parametrize(("mode", "group"), [(0o644, 0), (0o604, 0), (0o660, 0), (0o640, 4)])
def test_a_key_that_others_may_read_is_refused_with_the_remedy(ca: ClusterCa, mode: int, group: int) -> None:
    files = ca.node("one")
    os.chown(files.key, 0, group)
    os.chmod(files.key, mode)
    assert f"chown root:root {files.key} && chmod 0600 {files.key}" in trouble_of(files)


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o640])
def test_a_key_of_root_alone_is_used(ca: ClusterCa, mode: int) -> None:
    files = ca.node("one")
    os.chmod(files.key, mode)
    PeerClient(files, Live({})).check()


def test_a_key_with_a_password_is_refused_and_asks_nobody(ca: ClusterCa) -> None:
    files = ca.node("one")
    key = load_pem_private_key(Path(files.key).read_bytes(), None)
    Path(files.key).write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"x")))
    assert "do not fit together" in trouble_of(files)


def test_certificate_and_key_may_be_in_one_file(ca: ClusterCa, serve: Serve) -> None:
    files = ca.node("one")
    with open(files.key, "ab") as both:
        both.write(Path(files.certificate).read_bytes())
    assert greeted(serve(greet, PeerFiles(files.key, files.key, files.ca))) == {"peer": "one"}


def in_one_file(files: PeerFiles) -> str:
    return "".join(Path(path).read_text() for path in (files.key, files.certificate, files.ca))


def test_all_parts_may_be_in_one_file(ca: ClusterCa, serve: Serve, tmp_path: Path) -> None:
    both = []
    for node in ("one", "two"):
        path = tmp_path / f"{node}.pem"
        path.touch(mode=0o600)
        path.write_text(in_one_file(ca.node(node)))
        both.append(PeerFiles(str(path), str(path), str(path)))
    assert greeted(serve(greet, *both)) == {"peer": "one"}


def test_a_file_that_is_replaced_while_it_is_read_gives_parts_that_fit(
    ca: ClusterCa, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, new, really_open = tmp_path / "node.pem", tmp_path / "new.pem", os.open
    for one, node in ((path, "one"), (new, "uno")):
        one.touch(mode=0o600)
        one.write_text(in_one_file(ca.node(node)))

    def replacing(name: str, *others: int) -> int:
        """Replaces the file as soon as it has been opened."""
        found = really_open(name, *others)
        if new.exists():
            new.rename(path)
        return found

    monkeypatch.setattr(os, "open", replacing)
    assert read_certificate(PeerFiles(str(path), str(path), str(path))).node == "one"


def test_new_certificates_hold_for_the_next_connection_and_cut_no_other(ca: ClusterCa, serve: Serve) -> None:
    mine, theirs = ca.node("one"), ca.node("two")
    client = serve(greet, mine, theirs)
    with client.connect("two", WAIT) as link:
        assert link.receive(WAIT) == {"peer": "one"}
        ca.node("uno", into=Path(mine.certificate).parent)
        ca.node("three", into=Path(theirs.certificate).parent)
        assert greeted(client, "three") == {"peer": "uno"}
        link.send({"still": "open"}, WAIT)


def test_half_replaced_files_leave_the_former_certificate_in_force_and_are_logged(ca: ClusterCa, serve: Serve) -> None:
    mine = ca.node("one")
    client = serve(greet, mine)
    assert greeted(client) == {"peer": "one"}
    with capture_logs() as logs:
        os.replace(ca.node("uno").certificate, mine.certificate)
        for _ in range(3):
            assert greeted(client) == {"peer": "one"}
        ca.node("uno", into=Path(mine.certificate).parent)
        assert greeted(client) == {"peer": "uno"}
    events = [one["event"] for one in logs if one["event"].startswith("peers.certificates")]
    assert events == ["peers.certificates.unusable", "peers.certificates.usable"]


def test_a_server_without_usable_certificate_serves_as_soon_as_it_has_one(ca: ClusterCa, tmp_path: Path) -> None:
    theirs = tmp_path / "later"
    server = PeerServer("127.0.0.1:0", PeerFiles(*(str(theirs / name) for name in ("certificate", "key", "ca"))), greet)
    server.start()
    client = PeerClient(ca.node("one"), Live({"two": f"127.0.0.1:{server.port}"}))
    try:
        with capture_logs() as logs:
            for _ in range(2):
                with pytest.raises(Unavailable):
                    greeted(client)
        ((trouble, remedy),) = [(one["event"], one["remedy"]) for one in logs if one["log_level"] == "warning"]
        assert (trouble, remedy) == ("peers.no_certificate", "correct the setting")
        ca.node("two", into=theirs)
        assert greeted(client) == {"peer": "one"}
    finally:
        server.close()


def test_new_addresses_hold_for_the_next_connection(ca: ClusterCa) -> None:
    server = PeerServer("127.0.0.1:0", ca.node("two"), greet)
    server.start()
    addresses = Live({"two": "127.0.0.1:1"})
    client = PeerClient(ca.node("one"), addresses)
    with pytest.raises(Unavailable, match="port 1 cannot be reached: Connection refused"):
        greeted(client)
    addresses.now = {"two": f"127.0.0.1:{server.port}"}
    assert greeted(client) == {"peer": "one"}
    server.close()


def refusal(client: PeerClient) -> ShimError:
    with pytest.raises(ShimError) as caught:
        greeted(client)
    return caught.value


def test_a_server_of_another_ca_is_refused(ca: ClusterCa, tmp_path: Path) -> None:
    foreign = ClusterCa(tmp_path)
    server = PeerServer("127.0.0.1:0", foreign.node("two"), greet)
    server.start()
    told = refusal(PeerClient(ca.node("one"), Live({"two": f"127.0.0.1:{server.port}"})))
    server.close()
    assert isinstance(told, PermissionRefused)
    assert "is not valid: " in str(told)


def test_a_node_is_told_that_its_certificate_is_refused(ca: ClusterCa, tmp_path: Path) -> None:
    """Its CA file has both CAs, the other node's has one."""
    foreign = ClusterCa(tmp_path)
    mine = foreign.node("one")
    with open(mine.ca, "ab") as both:
        both.write(ca.pem)
    server = PeerServer("127.0.0.1:0", ca.node("two"), greet)
    server.start()
    told = refusal(PeerClient(mine, Live({"two": f"127.0.0.1:{server.port}"})))
    server.close()
    assert isinstance(told, PermissionRefused)
    assert "node two: refuses this node's certificate: tlsv1 alert unknown ca" in str(told)
