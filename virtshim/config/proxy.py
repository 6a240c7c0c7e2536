"""The settings of `virtshim proxy`: one CRI socket for several runtimes."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from virtshim.config.texts import PathText, RuntimeName, Section, setting


class PrimaryRuntime(Section):
    """[proxy.primary]: runs every pod that asks for no other runtime."""

    name: RuntimeName = setting(
        "containerd",
        "its name, for annotations, conditions and messages",
        allowed="letters, digits, and between them - _ .",
        why="what most nodes have",
    )
    socket: PathText = setting("/run/containerd/containerd.sock", "its CRI socket", why="containerd's own path")
    handlers: tuple[str, ...] = setting(
        (),
        "RuntimeClass handlers that it has; with none listed it judges unknown ones itself",
        allowed="names",
        why="it knows them best",
    )


class OtherRuntime(Section):
    """[[proxy.others]]: runs the pods that ask for it."""

    name: RuntimeName = setting(
        "virtlet.cloud",
        "what pods name in the annotation",
        allowed="letters, digits, and between them - _ .",
        why="pods that were written for Virtlet run as they are",
    )
    socket: str = setting(
        "",
        "its CRI socket; empty: that of this node's virtshim",
        allowed="absolute path, or empty",
        pattern="^(/|$)",
        why="follows `cri.socket`",
    )
    handlers: tuple[str, ...] = setting(
        ("virtshim",),
        "RuntimeClass handlers whose pods are its own",
        allowed="names",
        why="that of `deploy/runtimeclass.yaml`",
    )
    image_prefixes: tuple[str, ...] = setting(
        ("virtlet.cloud/",), "beginnings of names of images that are its own", allowed="texts", why="as with Virtlet"
    )
    when_down: Literal["fail", "degraded"] = setting(
        "degraded",
        "lists while it is down: go on with its last known pods, or fail",
        why="failing lists make the node NotReady, and all its pods, containers too, are evicted after some minutes",
    )


class Proxy(Section):
    """[proxy]: `virtshim proxy`, one CRI socket for several runtimes; see [proxy.md](proxy.md)."""

    socket: str = setting(
        "",
        "socket of `virtshim proxy`; default RUN_DIR/proxy.sock",
        allowed="absolute path, or empty",
        pattern="^(/|$)",
        why="follows paths.run_dir",
    )
    annotation: str = setting(
        "kubernetes.io/target-runtime",
        "annotation by which a pod names its runtime",
        allowed="a name",
        min_length=1,
        why="criproxy's, which pods for Virtlet have",
    )
    annotation_alone: Literal["route", "refuse"] = setting(
        "route",
        "a pod that the annotation alone sends to another runtime than the primary: sent there, or refused, so that it takes a "
        "RuntimeClass",
        why="pods for Virtlet have no RuntimeClass; nor have they an overhead, without which `vm.require_overhead` refuses them",
    )
    primary: PrimaryRuntime = setting(
        PrimaryRuntime(), "the runtime of pods that ask for no other", allowed="a table, below", why="containerd"
    )
    others: tuple[OtherRuntime, ...] = setting(
        (OtherRuntime(),), "the other runtimes", allowed="tables, below", why="virtshim on this node"
    )
    answer_timeout: float = setting(
        10.0,
        "time without an answer to a list after which a runtime counts as down",
        unit="s",
        gt=0,
        le=600,
        why="kubelet's own limit for a list is two minutes, and it asks each second",
    )
    max_calls: int = setting(
        2048,
        "calls under way at once, streams of events among them",
        unit="calls",
        ge=64,
        le=65536,
        why="twice what virtshim serves: there is another runtime",
    )

    @model_validator(mode="after")
    def _each_once(self) -> Self:
        runtimes: tuple[PrimaryRuntime | OtherRuntime, ...] = (self.primary, *self.others)
        values: dict[str, list[str]] = {
            "the name": [one.name for one in runtimes],
            "the socket": [one.socket or "of this node's virtshim" for one in runtimes],
            "the handler": [handler for one in runtimes for handler in one.handlers],
            "the image prefix": [prefix for one in self.others for prefix in one.image_prefixes],
        }
        for what, found in values.items():
            twice = sorted({value for value in found if found.count(value) > 1})
            if twice:
                raise ValueError(f"two runtimes have {what} {', '.join(twice)}; give each its own")
        if self.socket and self.socket in [one.socket for one in runtimes]:
            raise ValueError(f"the proxy cannot serve {self.socket}, which is a runtime's socket; choose another")
        return self
