"""Finds the runtime for a pod or an image, by handler, annotation or the image's name. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from virtshim.model.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Runtime:
    """One runtime behind the proxy."""

    name: str
    socket: str
    handlers: tuple[str, ...] = ()
    """The runtime's RuntimeClass handlers. The primary has none here: it decides itself which handlers it knows."""
    pod_handlers: tuple[str, ...] = ()
    """RuntimeClass handlers whose pods the primary makes, while this runtime runs their VM."""
    image_prefixes: tuple[str, ...] = ()
    degraded: bool = False
    """While it is down, lists have its last known pods; otherwise lists fail."""


@dataclass(frozen=True, slots=True)
class Routes:
    primary: Runtime
    others: tuple[Runtime, ...]
    annotation: str
    annotation_alone: bool = True
    """Whether a pod may choose another runtime than the primary by its annotation alone, without a RuntimeClass."""

    @property
    def runtimes(self) -> tuple[Runtime, ...]:
        """The primary first."""
        return (self.primary, *self.others)

    @property
    def vms(self) -> Runtime | None:
        """The runtime that runs the VMs of the primary's pods; None if there is none."""
        return next((one for one in self.others if one.pod_handlers), None)

    def vms_of(self, handler: str) -> Runtime | None:
        """The runtime of the VM in a pod with this handler, which the primary makes; None for all other handlers."""
        return self.vms if self.vms and handler in self.vms.pod_handlers else None

    def for_pod(self, handler: str, annotations: Mapping[str, str]) -> Runtime:
        """Raises InvalidRequest for an unknown name, a contradiction, or an annotation that needs a RuntimeClass."""
        by_handler = self.by_handler(handler)
        by_annotation = self.by_annotation(annotations)
        if by_handler and by_annotation and by_handler is not by_annotation:
            raise InvalidRequest(
                f"the pod's RuntimeClass handler {handler!r} belongs to the runtime {by_handler.name}, but its annotation "
                f"{self.annotation} asks for {by_annotation.name}; remove one of them"
            )
        if by_annotation and by_annotation is not self.primary and not by_handler and not self.annotation_alone:
            handlers = " or ".join(by_annotation.handlers)
            raise InvalidRequest(
                f"on this node, the annotation {self.annotation} alone does not choose the runtime {by_annotation.name} "
                f"(proxy.annotation_alone); give the pod a runtimeClassName with the handler {handlers}, whose overhead kubelet "
                "counts"
            )
        return by_handler or by_annotation or self.primary

    def for_image(self, name: str, handler: str, annotations: Mapping[str, str]) -> Runtime | None:
        """None if nothing determines it. Raises InvalidRequest as `for_pod` does."""
        if vms := self.vms_of(handler):
            return self.for_image_of(vms, name)
        by_name = self._by_prefix(name)
        by_pod = self.by_handler(handler) or self.by_annotation(annotations)
        if by_name and by_pod:
            self.refuse_other(name, by_name, by_pod)
        return by_name or by_pod

    def for_image_of(self, vms: Runtime, name: str) -> Runtime:
        """The runtime of an image in a pod of the primary whose VM `vms` runs: that of the name's prefix, otherwise the primary.
        Raises InvalidRequest if the name belongs to a third runtime."""
        by_name = self._by_prefix(name) or self.primary
        if by_name is not vms:
            self.refuse_other(name, by_name, self.primary)
        return by_name

    def refuse_other(self, image: str, by_name: Runtime, by_pod: Runtime) -> None:
        """Raises InvalidRequest if an image and its pod belong to different runtimes."""
        if by_name is not by_pod:
            raise InvalidRequest(
                f"the image {image} belongs to the runtime {by_name.name} by its name, but the pod runs on {by_pod.name}; "
                f"give the pod the annotation {self.annotation}={by_name.name} or its RuntimeClass, or name another image"
            )

    def by_handler(self, handler: str) -> Runtime | None:
        if not handler:
            return None
        for runtime in self.others:
            if handler in runtime.handlers:
                return runtime
        if self.vms_of(handler):
            return self.primary
        if self.primary.handlers and handler not in self.primary.handlers:
            known = ", ".join(name for one in self.runtimes for name in (*one.handlers, *one.pod_handlers))
            raise InvalidRequest(f"no runtime of this node has the RuntimeClass handler {handler!r}; known are {known}")
        return self.primary

    def by_annotation(self, annotations: Mapping[str, str]) -> Runtime | None:
        wanted = annotations.get(self.annotation)
        if wanted is None:
            return None
        for runtime in self.runtimes:
            if wanted == runtime.name:
                return runtime
        known = ", ".join(runtime.name for runtime in self.runtimes)
        raise InvalidRequest(
            f"annotation {self.annotation}: no runtime of this node is called {wanted!r}; known are {known}"
        )

    def _by_prefix(self, name: str) -> Runtime | None:
        return next((one for one in self.runtimes if any(map(name.startswith, one.image_prefixes))), None)
