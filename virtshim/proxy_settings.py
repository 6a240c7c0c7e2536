"""The settings of `virtshim proxy`: one CRI socket for several runtimes."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from virtshim.setting_texts import PathText, RuntimeName, Section


class PrimaryRuntime(Section):
    """[proxy.primary]: runs every pod that asks for no other runtime."""

    name: RuntimeName = Field("containerd", description="its name, for annotations, conditions and messages")
    socket: PathText = Field("/run/containerd/containerd.sock", description="its CRI socket")
    handlers: tuple[str, ...] = Field(
        (), description="RuntimeClass handlers that it has; with none listed it judges unknown ones itself"
    )


class OtherRuntime(Section):
    """[[proxy.others]]: runs the pods that ask for it."""

    name: RuntimeName = Field("virtlet.cloud", description="what pods name in the annotation")
    socket: str = Field("", pattern="^(/|$)", description="its CRI socket; empty: that of this node's virtshim")
    handlers: tuple[str, ...] = Field(("virtshim",), description="RuntimeClass handlers whose pods are its own")
    image_prefixes: tuple[str, ...] = Field(
        ("virtlet.cloud/",), description="beginnings of names of images that are its own"
    )
    when_down: Literal["fail", "degraded"] = Field(
        "fail",
        description="lists while it is down: fail, or go on with its last known pods as NOTREADY, UNKNOWN",
    )


class Proxy(Section):
    """[proxy]: `virtshim proxy`, one CRI socket for several runtimes."""

    socket: str = Field("", pattern="^(/|$)", description="socket of `virtshim proxy`; default RUN_DIR/proxy.sock")
    annotation: str = Field(
        "kubernetes.io/target-runtime", min_length=1, description="annotation by which a pod names its runtime"
    )
    primary: PrimaryRuntime = Field(PrimaryRuntime(), description="the runtime of pods that ask for no other")
    others: tuple[OtherRuntime, ...] = Field((OtherRuntime(),), description="the other runtimes")
    answer_timeout: float = Field(
        10.0, gt=0, le=600, description="seconds without an answer to a list after which a runtime counts as down"
    )
    max_calls: int = Field(2048, ge=64, le=65536, description="calls under way at once, streams of events among them")

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
