"""The one table from kinds of errors to gRPC codes."""

from __future__ import annotations

from collections.abc import Mapping

import grpc

from virtshim.domain.errors import Kind

GRPC_CODES: Mapping[Kind, grpc.StatusCode] = {
    Kind.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    Kind.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Kind.ALREADY_EXISTS: grpc.StatusCode.ALREADY_EXISTS,
    Kind.FAILED_PRECONDITION: grpc.StatusCode.FAILED_PRECONDITION,
    Kind.DEADLINE: grpc.StatusCode.DEADLINE_EXCEEDED,
    Kind.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    Kind.EXHAUSTED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Kind.PERMISSION: grpc.StatusCode.PERMISSION_DENIED,
    Kind.UNIMPLEMENTED: grpc.StatusCode.UNIMPLEMENTED,
    Kind.ABORTED: grpc.StatusCode.ABORTED,
    Kind.INTERNAL: grpc.StatusCode.INTERNAL,
}
