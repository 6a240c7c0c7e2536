"""The sections of `make bench`: each measures some promises beside their bare counterparts, on one shared node."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from bare import BareLibvirt
from boot import boot_round
from drains import drain_rounds
from exec_true import exec_rounds
from exit_events import exit_round
from figures import Figures
from fleet import fleet_round
from imageserver import serve_directory
from many_pods import pods_rounds
from moves import move_rounds
from net import net_rounds
from node import Node
from outlive import outlive_round
from parallel_pull import parallel_pull_rounds
from peer_stream import peer_stream_rounds
from pod_start import one_round, vmwrapper_round
from podclient import PodClient
from pods_with_containers import pods_with_containers_rounds
from proxy import proxy_figures
from pull import pull_rounds
from recover import recover_rounds
from registry_pull import registry_pull_rounds
from sandboxes import sandbox_rounds
from scale import scale_round
from shares import share_rounds
from warm import warm_rounds


@dataclass(frozen=True, slots=True)
class Place:
    """The node and directory of a measurement."""

    directory: str
    node: Node
    cri: PodClient
    null: Path
    """The image of a guest that writes a byte and stops."""
    guest: Path
    """The image of the small guest."""
    url: str
    """Where the two are served."""

    def image(self, path: Path) -> str:
        return f"{self.url.removeprefix('http://')}/{path.name}"


Section = Callable[[Place, int, Figures], None]


def starts(place: Place, rounds: int, figures: Figures) -> None:
    node, image = place.node, place.image(place.null)
    with BareLibvirt(place.directory, node) as bare:
        one_round(place.cri, node, bare, image, Figures(), 0)  # caches: libvirt's QEMU capabilities, pages
        for number in range(1, rounds + 1):
            one_round(place.cri, node, bare, image, figures, number)
            vmwrapper_round(node, figures)
            exit_round(place.cri, node, image, figures, number)


def pods(place: Place, rounds: int, figures: Figures) -> None:
    pods_rounds(place.node, place.image(place.null), place.directory, rounds, figures)


def sandboxes(place: Place, rounds: int, figures: Figures) -> None:
    sandbox_rounds(place.node, place.directory, rounds, figures)


def pull(place: Place, rounds: int, figures: Figures) -> None:
    with tempfile.TemporaryDirectory(dir=place.directory) as big, serve_directory(Path(big)) as server:
        pull_rounds(place.cri, Path(big), server.removeprefix("http://"), rounds, figures)
    with tempfile.TemporaryDirectory(dir=place.directory) as big:
        registry_pull_rounds(Path(big), rounds, figures, place.cri.pull, place.cri.remove_image)


def parallel_pull(place: Place, rounds: int, figures: Figures) -> None:
    with tempfile.TemporaryDirectory(dir=place.directory) as registry:
        parallel_pull_rounds(Path(registry), rounds, figures)


def scale(place: Place, rounds: int, figures: Figures) -> None:
    del rounds  # it makes hundreds of calls anyway
    scale_round(place.node, figures)


def recover(place: Place, rounds: int, figures: Figures) -> None:
    del place, rounds
    recover_rounds(5, figures)


def proxy(place: Place, rounds: int, figures: Figures) -> None:
    """Measures the proxy in a fresh client, because this process's accumulated state makes each call slower."""
    del place
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as apart:
        figures.take(apart.submit(proxy_figures, 40 * rounds).result())


def boot(place: Place, rounds: int, figures: Figures) -> None:
    guest = place.image(place.guest)
    for number in range(1, rounds + 1):
        boot_round(place.cri, place.node, guest, place.guest, figures, number)
        exec_rounds(place.cri, place.node, guest, place.guest, 4, figures)


def shares(place: Place, rounds: int, figures: Figures) -> None:
    share_rounds(place.cri, place.node, place.image(place.guest), place.guest, rounds, figures)


def outlive(place: Place, rounds: int, figures: Figures) -> None:
    with BareLibvirt(place.directory, place.node) as bare:
        for number in range(1, rounds + 1):
            outlive_round(place.cri, place.node, bare, place.image(place.guest), figures, number)


def fleet(place: Place, rounds: int, figures: Figures) -> None:
    del rounds  # it asks hundreds of times anyway
    fleet_round(place.node.socket, figures)


def drains(place: Place, rounds: int, figures: Figures) -> None:
    drain_rounds(place.image(place.guest), rounds, figures)


def moves(place: Place, rounds: int, figures: Figures) -> None:
    move_rounds(place.directory, place.cri, place.node, place.image(place.guest), rounds, figures)


def warm(place: Place, rounds: int, figures: Figures) -> None:
    warm_rounds(place.image(place.guest), rounds, figures)


def peer_stream(place: Place, rounds: int, figures: Figures) -> None:
    del place  # no VM takes part
    peer_stream_rounds(rounds, figures)


def net(place: Place, rounds: int, figures: Figures) -> None:
    # Its rounds differ by a tenth, and take half a minute each.
    net_rounds(place.cri, place.node, place.image(place.guest), place.guest, 3 * rounds, figures)


def pods_with_containers(place: Place, rounds: int, figures: Figures) -> None:
    null, guest = place.image(place.null), place.image(place.guest)
    pods_with_containers_rounds(place.cri, place.node, null, guest, place.guest, rounds, figures)


SECTIONS: dict[str, Section] = {
    one.__name__: one
    for one in (
        starts,
        pods,
        sandboxes,
        pull,
        parallel_pull,
        scale,
        recover,
        proxy,
        boot,
        outlive,
        moves,
        fleet,
        drains,
        warm,
        peer_stream,
        shares,
        net,
        pods_with_containers,
    )
}
