"""The settings of `virtshim proxy`: one CRI socket for several runtimes."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from virtshim.config.texts import PathText, RuntimeName, Section, setting


class PrimaryRuntime(Section):
    """[proxy.primary]: the runtime for all pods that do not ask for another one."""

    name: RuntimeName = setting(
        "containerd",
        "the runtime's name in annotations, conditions and messages",
        allowed="letters, digits, and between them - _ .",
        why="most nodes run containerd",
    )
    socket: PathText = setting("/run/containerd/containerd.sock", "the runtime's CRI socket", why="containerd's path")
    handlers: tuple[str, ...] = setting(
        (),
        "RuntimeClass handlers of the runtime; empty: the proxy passes unknown handlers to it",
        allowed="names",
        why="the runtime itself knows its handlers best",
    )


class OtherRuntime(Section):
    """[[proxy.others]]: a runtime for the pods that ask for it."""

    name: RuntimeName = setting(
        "virtlet.cloud",
        "the runtime's name in pods' annotation",
        allowed="letters, digits, and between them - _ .",
        why="pods that were written for Virtlet run unchanged",
    )
    socket: str = setting(
        "",
        "the runtime's CRI socket; empty: the socket of this node's virtshim",
        allowed="absolute path, or empty",
        pattern="^(/|$)",
        why="follows `cri.socket`",
    )
    handlers: tuple[str, ...] = setting(
        ("virtshim",),
        "RuntimeClass handlers whose pods go to this runtime",
        allowed="names",
        why="the handler in `deploy/kustomize/base/runtimeclass.yaml`",
    )
    pod_handlers: tuple[str, ...] = setting(
        ("virtshim-pod",),
        "RuntimeClass handlers whose pods the primary runtime makes, with their ordinary containers; this runtime runs their VM. "
        "Only for this node's virtshim (`socket` is empty)",
        allowed="names",
        why="the handler in `deploy/kustomize/base/runtimeclass.yaml`",
    )
    image_prefixes: tuple[str, ...] = setting(
        ("virtlet.cloud/",), "beginnings of the names of this runtime's images", allowed="texts", why="Virtlet's prefix"
    )
    when_down: Literal["fail", "degraded"] = setting(
        "degraded",
        "while the runtime is down, lists contain its last known pods (degraded), or fail (fail)",
        why="failing lists make the node NotReady, and after some minutes all its pods are evicted, containers too",
    )

    @property
    def handlers_of_pods(self) -> tuple[str, ...]:
        """`pod_handlers`, as far as they apply."""
        return () if self.socket else self.pod_handlers

    @model_validator(mode="after")
    def _adopts(self) -> Self:
        if self.socket and self.pod_handlers and "pod_handlers" in self.model_fields_set:
            raise ValueError(
                "pod_handlers are only for this node's virtshim, whose socket is empty; remove them, or leave socket out"
            )
        return self


class Proxy(Section):
    """[proxy]: `virtshim proxy`, which serves one CRI socket for several runtimes; see [proxy.md](proxy.md)."""

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
        why="criproxy's annotation, which pods for Virtlet have",
    )
    annotation_alone: Literal["route", "refuse"] = setting(
        "route",
        "a pod that has the annotation but no RuntimeClass: route sends the pod to the runtime that the annotation names, refuse "
        "refuses the pod, so pods must use a RuntimeClass",
        why="pods for Virtlet have no RuntimeClass, and so no overhead; `vm.require_overhead` refuses them nevertheless",
    )
    primary: PrimaryRuntime = setting(
        PrimaryRuntime(),
        "the runtime of pods that do not ask for another one",
        allowed="a table, below",
        why="containerd",
    )
    others: tuple[OtherRuntime, ...] = setting(
        (OtherRuntime(),), "the other runtimes", allowed="tables, below", why="virtshim on this node"
    )
    answer_timeout: float = setting(
        10.0,
        "if a runtime does not answer a list call within this time, it counts as down",
        unit="s",
        gt=0,
        le=600,
        why="kubelet waits two minutes for a list, and asks every second",
    )
    max_calls: int = setting(
        2048,
        "maximum number of concurrent calls, event streams included",
        unit="calls",
        ge=64,
        le=65536,
        why="twice as many as virtshim serves, because there is another runtime",
    )

    @property
    def pod_handlers(self) -> frozenset[str]:
        """Of the pods whose VMs this node's virtshim runs."""
        return frozenset(handler for one in self.others for handler in one.handlers_of_pods)

    @model_validator(mode="after")
    def _each_once(self) -> Self:
        runtimes: tuple[PrimaryRuntime | OtherRuntime, ...] = (self.primary, *self.others)
        shared = [handler for one in self.others for handler in one.handlers_of_pods]
        values: dict[str, list[str]] = {
            "the name": [one.name for one in runtimes],
            "the socket": [one.socket or "of this node's virtshim" for one in runtimes],
            # The primary may name the pod handlers, because it has them, too.
            "the handler": [
                *(handler for one in self.others for handler in one.handlers),
                *(handler for handler in self.primary.handlers if handler not in shared),
                *shared,
            ],
            "the image prefix": [prefix for one in self.others for prefix in one.image_prefixes],
        }
        for what, found in values.items():
            twice = sorted({value for value in found if found.count(value) > 1})
            if twice:
                raise ValueError(f"two runtimes have {what} {', '.join(twice)}; give each runtime its own")
        if self.socket and self.socket in [one.socket for one in runtimes]:
            raise ValueError(f"the proxy cannot serve {self.socket}, which is a runtime's socket; choose another path")
        return self
