"""The dashboard can be used only with the printed address, once, from this machine, by its own page."""

from __future__ import annotations

import http.client
import re
import signal
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import pytest
from fakes.dashboard_node import DashboardNode

from virtshim.cri.client import MARK

pytestmark = pytest.mark.operator

UPGRADE = {
    "Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
}  # fmt: skip


def ask(url: str, method: str = "GET", address: str = "127.0.0.1", **headers: str) -> tuple[int, dict[str, str], str]:
    """Sends a request. `headers` with underscores for hyphens. The test resolves the host name, not this machine's
    resolver."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(address, parts.port, timeout=60)
    try:
        headers = {"Host": parts.netloc, **headers}
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, f"{parts.path}?{parts.query}", headers=sent)
        answer = connection.getresponse()
        upgraded = answer.status == 101
        return (
            answer.status,
            {name.lower(): value for name, value in answer.getheaders()},
            "" if upgraded else answer.read().decode(),
        )
    finally:
        connection.close()


def test_the_printed_address_works_once_and_for_one_browser(dashboard: Any) -> None:
    assert re.match(r"http://virtshim-[0-9a-f]{32}\.localhost:\d+/[\w-]{22}/login\?token=[\w-]{43}", dashboard.login)
    assert ask(dashboard.address)[0] == 401
    assert ask(f"{dashboard.address}login?token=guessed")[0] == 403
    status, headers, _ = ask(dashboard.login)
    assert status == 303
    cookie = headers["set-cookie"]
    assert {"HttpOnly", "SameSite=Strict", f"Path={urlsplit(dashboard.address).path}"} <= set(cookie.split("; "))
    assert "expires" not in cookie.lower()
    assert ask(dashboard.login)[0] == 403
    mine = cookie.partition(";")[0]
    status, headers, text = ask(dashboard.address, Cookie=mine)
    assert status == 200
    assert "script-src 'self';" in headers["content-security-policy"]
    assert "unsafe-inline" not in headers["content-security-policy"].partition("style-src")[0]
    assert headers["x-content-type-options"] == "nosniff"
    assert "<script>" not in text
    assert ask(dashboard.address, Cookie=f"{mine}x")[0] == 401


def test_other_host_names_and_origins_are_refused(dashboard: Any) -> None:
    mine = ask(dashboard.login)[1]["set-cookie"].partition(";")[0]
    host = urlsplit(dashboard.origin).netloc
    live = f"{dashboard.address}live"
    for name in ("evil.example", "localhost", "127.0.0.1", host.partition(":")[0].replace("virtshim-", "virtshim-0")):
        assert ask(dashboard.address, Cookie=mine, Host=name)[0] == 421
        assert ask(dashboard.login, Host=name)[0] == 421
    assert ask(dashboard.address, Cookie=mine, Host=f"evil.example:{host.rpartition(':')[2]}")[0] == 421
    assert ask(dashboard.address, Cookie=mine, Origin="http://evil.example")[0] == 403
    assert ask(dashboard.address, Cookie=mine, Sec_Fetch_Site="cross-site")[0] == 403
    assert ask(live, Cookie=mine, **UPGRADE)[0] == 403, "a WebSocket without an Origin"
    assert ask(live, Cookie=mine, **UPGRADE, Origin="null")[0] == 403
    assert ask(live, Cookie=mine, **UPGRADE, Origin="http://127.0.0.1:1")[0] == 403
    assert ask(live, **UPGRADE, Origin=dashboard.origin)[0] == 401
    assert ask(live, Cookie=mine, **UPGRADE, Origin=dashboard.origin)[0] == 101
    assert ask(f"{dashboard.address}logout", "POST", Cookie=mine)[0] == 403
    assert ask(f"{dashboard.address}logout", "POST", Cookie=mine, Origin=dashboard.origin)[0] == 204
    assert ask(dashboard.address, Cookie=mine)[0] == 401


def test_an_action_needs_the_session_and_the_pages_own_origin(dashboard: Any, node: DashboardNode) -> None:
    made = node.add("web", labels={MARK: "1"})
    assert made.vm is not None
    mine = ask(dashboard.login)[1]["set-cookie"].partition(";")[0]
    of_the_page = {"Origin": dashboard.origin, "Cookie": mine}
    reset, stop = f"vms/{made.vm.id}/reset", f"pods/{made.status.id}/stop"
    for path in (reset, stop):
        url = f"{dashboard.address}{path}"
        assert ask(url, "POST", Cookie=mine)[0] == 403, "no Origin"
        for origin in ("http://evil.example", "null", dashboard.origin.replace("http:", "https:")):
            assert ask(url, "POST", Cookie=mine, Origin=origin)[0] == 403, origin
        assert ask(url, "POST", **of_the_page, Sec_Fetch_Site="cross-site")[0] == 403
        assert ask(url, "POST", **of_the_page, Host="localhost")[0] == 421
        assert ask(url, "POST", Origin=dashboard.origin)[0] == 401
        assert ask(url, **of_the_page)[0] == 405, "a link or a picture acts on nothing"
    assert ask(f"{dashboard.address}vms/{made.vm.id}/save", "POST", **of_the_page)[0] == 404
    assert ask(f"{dashboard.address}vms/{made.vm.id}/screenshot")[0] == 401
    assert node.acted == []
    assert ask(f"{dashboard.address}{reset}", "POST", **of_the_page)[0] == 200
    assert ask(f"{dashboard.address}{stop}", "POST", **of_the_page)[0] == 200
    assert node.acted == ["reset", "stop within 30 s"]


def test_the_dashboard_listens_on_ipv4_and_ipv6_loopback(dashboard: Any) -> None:
    mine = ask(dashboard.login, address="::1")[1]["set-cookie"].partition(";")[0]
    for address in ("127.0.0.1", "::1"):
        assert ask(dashboard.address, address=address, Cookie=mine)[0] == 200


def test_responses_may_not_be_cached(dashboard: Any) -> None:
    mine = ask(dashboard.login)[1]["set-cookie"].partition(";")[0]
    for path in ("", "assets/main.js", "assets/main.css"):
        assert ask(f"{dashboard.address}{path}", Cookie=mine)[1]["cache-control"] == "no-store", path


def test_nothing_is_served_but_the_pages_own_files(dashboard: Any) -> None:
    mine = ask(dashboard.login)[1]["set-cookie"].partition(";")[0]
    assert ask(f"{dashboard.address}assets/main.js", Cookie=mine)[0] == 200
    for path in ("assets/..%2f..%2fdist.inputs", "assets/.inputs", "assets/none.js", "assets/", "pods/..%2fx", "etc"):
        assert ask(f"{dashboard.address}{path}", Cookie=mine)[0] == 404, path
    assert ask(f"{dashboard.origin}/", Cookie=mine)[0] == 404
    assert ask(f"{dashboard.origin}/")[0] == 401
    assert ask(f"{dashboard.address}pods/none", Cookie=mine)[0] == 404
    assert ask(f"{dashboard.address}pods/node/graph?span=3600", Cookie=mine)[0] == 200
    assert ask(f"{dashboard.address}pods/node/graph?span=7", Cookie=mine)[0] == 400


def test_sessions_end_with_the_program(node: DashboardNode, dashboard_of: Callable[[str], Any], dashboard: Any) -> None:
    mine = ask(dashboard.login)[1]["set-cookie"].partition(";")[0]
    other = dashboard_of(node.socket)
    assert ask(other.address, Cookie=mine)[0] == 401
    assert urlsplit(other.origin).hostname != urlsplit(dashboard.origin).hostname, "nor is what a browser keeps for one"
    dashboard.process.send_signal(signal.SIGTERM)
    assert dashboard.process.wait(60) == 0
    with pytest.raises(ConnectionRefusedError):
        ask(dashboard.address, Cookie=mine)
