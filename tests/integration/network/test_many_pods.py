"""Pods that are attached at the same moment do not wait for each other."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from tap_node import TapNode, sandbox

pytestmark = pytest.mark.network

PODS = 20
MANY = 50


def test_attaches_run_their_plugins_in_parallel(tap_node: TapNode) -> None:
    """Each pod's plugin waits for those of all others."""
    here = tap_node.folder / "here"
    here.mkdir()
    tap_node.plugin(
        "together",
        f"""test $CNI_COMMAND = DEL && exit 0
: > {here}/$CNI_CONTAINERID
while set -- {here}/*; test $# -lt {PODS}; do sleep 0.1; done
echo '{{"cniVersion": "1.0.0"}}'
""",
    )
    tap_node.configure({"type": "together"}, tap_node.bridge_plugin())
    pods = [sandbox() for _ in range(PODS)]
    with ThreadPoolExecutor(PODS) as pool:
        attached = list(pool.map(tap_node.attach, pods))
        addresses = {one["ips"][0] for one in attached}
        list(pool.map(tap_node.release, pods))
    assert len(addresses) == PODS
    assert tap_node.listed() == []


def test_fifty_pods_are_attached_while_one_pods_plugin_is_slow(tap_node: TapNode) -> None:
    """The slow plugin ends when all others are attached. Afterwards nothing is left of any pod."""
    held, slow = sandbox(), tap_node.folder / "go-on"
    tap_node.plugin(
        "slow",
        f"""test $CNI_COMMAND$CNI_CONTAINERID = ADD{held} && while test ! -e {slow}; do sleep 0.1; done
test $CNI_COMMAND = DEL || echo '{{"cniVersion": "1.0.0"}}'
""",
    )
    tap_node.configure({"type": "slow"}, tap_node.bridge_plugin())
    pods = [sandbox() for _ in range(MANY)]
    with ThreadPoolExecutor(MANY + 1) as pool:
        waiting = pool.submit(tap_node.attach, held)
        attached = list(pool.map(lambda pod: tap_node.attach(pod, timeout=120), pods))
        assert not waiting.done()
        slow.touch()
        attached.append(waiting.result())
        list(pool.map(lambda pod: tap_node.release(pod, timeout=120), [*pods, held]))
    assert len({one["ips"][0] for one in attached}) == MANY + 1
    assert tap_node.listed() == []
