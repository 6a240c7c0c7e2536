"""A namespace has VirtualMachines, two nodes, a controller and its webhook, on the stand-in for the API server and on a
real control plane."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fakes.control_planes import KUBECONFIG, NAMESPACE, PODS, Plane, RealPlane, StandIn
from fakes.shop import SMALL, Shop
from fakes.vm_nodes import VmNodes

from virtshim.cluster.api import below
from virtshim.cluster.controller import Controller
from virtshim.cluster.evictions import Answer
from virtshim.cluster.moving import MoveLimits
from virtshim.cluster.webhook import Webhook
from virtshim.system.clock import SystemClock


@pytest.fixture(scope="session")
def _real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealPlane]:
    made = RealPlane(KUBECONFIG, tmp_path_factory.mktemp("control-plane"))
    yield made
    made.close()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "plane" in metafunc.fixturenames:
        metafunc.parametrize("plane", ["stand-in", "control-plane"] if KUBECONFIG else ["stand-in"], indirect=True)


@pytest.fixture
def plane(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Plane]:
    if request.param == "stand-in":
        made = StandIn(tmp_path)
        yield made
        made.close()
    else:
        yield request.getfixturevalue("_real")


@pytest.fixture
def nodes(plane: Plane) -> Iterator[VmNodes]:
    own = secrets.token_hex(3)
    made = VmNodes(plane, (f"n1-{own}", f"n2-{own}"))
    yield made
    made.close()


@pytest.fixture
def shop(plane: Plane, nodes: VmNodes) -> Iterator[Shop]:
    made = Shop(plane, nodes)
    yield made
    made.close()


@pytest.fixture
def controller_of(plane: Plane) -> Iterator[Callable[..., Controller]]:
    running: list[Controller] = []

    def start(limits: MoveLimits = MoveLimits()) -> Controller:  # noqa: B008
        made = Controller(plane.user("virtshim-controller").access, SystemClock(), NAMESPACE, limits)
        running.append(made)
        made.start()
        return made

    yield start
    for one in running:
        one.close()


@pytest.fixture
def controller(shop: Shop, controller_of: Callable[..., Controller]) -> Controller:
    return controller_of()


class _Counted:
    """A webhook's answers."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self.asked = 0

    def __call__(self, namespace: str, name: str, *, dry_run: bool) -> Answer:
        self.asked += 1
        return self._controller.evicted(namespace, name, dry_run=dry_run)


@pytest.fixture
def webhook_of(plane: Plane, shop: Shop) -> Iterator[Callable[[Controller], Webhook]]:
    running: list[Webhook] = []

    def start(controller: Controller) -> Webhook:
        evicted = _Counted(controller)
        made = Webhook((plane.listen, 0), plane.webhook_name, evicted, controller.api, SystemClock())
        running.append(made)
        made.tell_certificate()
        made.start()
        plane.reach(made.port)
        # The API server hears of it after some time.
        probe = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"probe-{len(running)}"}, **SMALL}
        plane.admin.do("POST", below(PODS, shop.name), probe)
        shop.nodes.until(lambda: [shop.evict(probe["metadata"]["name"], "?dryRun=All")] and evicted.asked)
        plane.admin.do("DELETE", below(PODS, shop.name, probe["metadata"]["name"]), {"gracePeriodSeconds": 0})
        return made

    yield start
    for one in running:
        one.close()


@pytest.fixture
def webhook(controller: Controller, webhook_of: Callable[[Controller], Webhook]) -> Webhook:
    return webhook_of(controller)


@pytest.fixture
def has_kubectl() -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("NOT TO BE HAD HERE: no kubectl")
