"""A pod whose sandbox another runtime made, and virtshim's call that adopts it. The runtime is a network namespace alone here."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field

import grpc
from others_namespace import OthersNamespace, others_namespace

from criproto.operator_v1 import operator_pb2, operator_pb2_grpc
from criproto.runtime_v1 import api_pb2 as pb

ADDRESS = "10.90.7.7"
HANDLER = "virtshim-pod"


@dataclass(frozen=True)
class AdoptedPod:
    """`admin`: the path of virtshim's admin socket. `addresses`: the pod's."""

    admin: str
    config: pb.PodSandboxConfig
    namespace: OthersNamespace
    addresses: tuple[str, ...] = (ADDRESS,)
    id: str = field(default_factory=lambda: secrets.token_hex(32))

    def adopt(self) -> None:
        """As `virtshim proxy` does before each CreateContainer of the VM."""
        request = operator_pb2.AdoptRequest(
            sandbox_id=self.id,
            config=self.config.SerializeToString(),
            runtime_handler=HANDLER,
            netns=self.namespace.path,
            addresses=self.addresses,
        )
        with self._operator() as operator:
            operator.Adopt(request, timeout=60)

    def phase(self) -> str:
        """What virtshim knows of the sandbox; "" if nothing."""
        try:
            with self._operator() as operator:
                told = operator.Inspect(operator_pb2.InspectRequest(id=self.id), timeout=20).json
        except grpc.RpcError as exc:
            if exc.code() is not grpc.StatusCode.NOT_FOUND:
                raise
            return ""
        return str(json.loads(told)["pod"]["phase"])

    @contextlib.contextmanager
    def _operator(self) -> Iterator[operator_pb2_grpc.OperatorStub]:
        with grpc.insecure_channel(f"unix:{self.admin}") as channel:
            yield operator_pb2_grpc.OperatorStub(channel)


@contextlib.contextmanager
def others_pod(admin: str, config: pb.PodSandboxConfig, *addresses: str) -> Iterator[AdoptedPod]:
    """The other runtime's namespace exists inside the block. virtshim knows nothing of it yet. `addresses`: as CIDRs; without
    them it has ADDRESS."""
    addresses = addresses or (f"{ADDRESS}/24",)
    with others_namespace(*addresses) as namespace:
        yield AdoptedPod(admin, config, namespace, tuple(one.partition("/")[0] for one in addresses))
