"""A refused thread for work in a pod's namespace is an error of the node and not of the pod. The integration tests do
real work there."""

from __future__ import annotations

import threading

import pytest

from tapmanager.errors import TapmanagerError
from tapmanager.links import netns


def test_a_refused_thread_is_an_error_of_the_node_and_not_of_the_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may have as many as there is memory for."""

    def none_left(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none_left)
    with pytest.raises(TapmanagerError, match="can't start new thread") as caught:
        netns.run_inside("/proc/self/ns/net", lambda: None)
    assert caught.value.kind == "unavailable"
