"""Whatever a guest says of itself is cut down to a small size."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from virtshim.guest.agent_questions import ask_guest_info
from virtshim.guest.wait import CancellableDeadline
from virtshim.model.ids import ContainerId

CONTAINER = ContainerId("c" * 64)


def test_only_what_the_agent_answers_is_in_the_guest_info(clients, make_guest):
    guest = make_guest()
    guest.canned = {
        "guest-get-host-name": {"host-name": "web-0"},
        "guest-get-osinfo": {"id": "debian", "version-id": "12", "pretty-name": "Debian\n12", "more": 1},
        "guest-network-get-interfaces": [
            {
                "name": "eth0",
                "hardware-address": "52:54:00:00:00:01",
                "ip-addresses": [{"ip-address": "10.0.0.2", "prefix": 24, "ip-address-type": "ipv4"}],
            }
        ],
        "guest-get-fsinfo": [{"mountpoint": "/", "type": "ext4", "name": "vda1", "used-bytes": 5, "total-bytes": 9}],
    }
    assert clients.guest_info(CONTAINER, 10) == {
        "hostname": "web-0",
        "system": {"pretty-name": "Debian?12", "id": "debian", "version-id": "12"},
        "interfaces": [{"name": "eth0", "mac": "52:54:00:00:00:01", "addresses": ["10.0.0.2/24"]}],
        "filesystems": [{"mountpoint": "/", "type": "ext4", "device": "vda1", "usedBytes": 5, "totalBytes": 9}],
    }


def test_without_an_answer_the_guest_info_is_empty(clients):
    assert clients.guest_info(CONTAINER, 0.2) == {}


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.sampled_from(["name", "ip-addresses", "users", "host-name"]), inner)
    ),
)


class Says:
    """An agent with the same answer to every question."""

    def __init__(self, answer):
        self.answer = answer

    def ask(self, *_question):
        return self.answer


def told_by(answer):
    return ask_guest_info(Says(answer), CancellableDeadline.after(60))


@given(_JSON)
def test_any_answer_is_read_without_an_error(answer):
    facts = told_by(answer)
    assert set(facts) == {"agentVersion", "system", "hostname", "interfaces", "users", "filesystems"}
    json.dumps(facts)


def test_a_huge_answer_is_cut_down():
    text = "x" * 100_000
    address = {"ip-address": text, "prefix": 1 << 70}
    item = {"name": text, "mountpoint": text, "user": text, "type": text, "ip-addresses": [address] * 1000}
    for answer in (dict.fromkeys(("id", "pretty-name", "host-name", "version"), text), [item] * 1000):
        assert all(len(json.dumps(fact)) < 50_000 for fact in told_by(answer).values())
