"""The product's errors. Each has a kind and a message for users, and contains nothing of the library that failed.

    ShimError                    kind
      InvalidRequest             INVALID              a field is missing or wrong; the message names it and the remedy
      NotFound                   NOT_FOUND            no such sandbox, container or image
      AlreadyExists              ALREADY_EXISTS       the name is taken by something different
      WrongState                 FAILED_PRECONDITION  the object is there but cannot do this now
      DeadlineExceeded           DEADLINE             the caller's time, or an outside step's own limit, is over
      Unavailable                UNAVAILABLE          libvirt, tapmanager or a registry cannot be reached; try again
        RegistryUnavailable      REGISTRY             a pull's registry cannot be reached; kubelet has a reason for this case
      ResourceExhausted          EXHAUSTED            no disk, memory, address or place left
      PermissionRefused          PERMISSION           credentials refused, or what the node's operator does not allow
        SignatureRefused         SIGNATURE            an image lacks a required signature; kubelet has a reason for this case
      Unimplemented              UNIMPLEMENTED        the product does not do this (yet)
      Aborted                    ABORTED              another call on the same object won; repeat
      InternalError              INTERNAL             an external program failed in a way that a retry does not fix

`virtshim.cri.error_codes` alone turns kinds into gRPC codes.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final


class Kind(enum.Enum):
    INVALID = "invalid"
    NOT_FOUND = "not-found"
    ALREADY_EXISTS = "already-exists"
    FAILED_PRECONDITION = "failed-precondition"
    DEADLINE = "deadline"
    UNAVAILABLE = "unavailable"
    REGISTRY = "registry"
    EXHAUSTED = "exhausted"
    PERMISSION = "permission"
    SIGNATURE = "signature"
    UNIMPLEMENTED = "unimplemented"
    ABORTED = "aborted"
    INTERNAL = "internal"


class ShimError(Exception):
    """The base of all errors that a caller may see. `str()` tells a person what is wrong, why, and what to do."""

    kind = Kind.INTERNAL


class InvalidRequest(ShimError):
    kind = Kind.INVALID


class NotFound(ShimError):
    kind = Kind.NOT_FOUND


class AlreadyExists(ShimError):
    kind = Kind.ALREADY_EXISTS


class WrongState(ShimError):
    kind = Kind.FAILED_PRECONDITION


class DeadlineExceeded(ShimError):
    kind = Kind.DEADLINE


class Unavailable(ShimError):
    kind = Kind.UNAVAILABLE


class RegistryUnavailable(Unavailable):
    kind = Kind.REGISTRY


class ResourceExhausted(ShimError):
    kind = Kind.EXHAUSTED


class PermissionRefused(ShimError):
    kind = Kind.PERMISSION


class SignatureRefused(PermissionRefused):
    kind = Kind.SIGNATURE


class Unimplemented(ShimError):
    kind = Kind.UNIMPLEMENTED


class Aborted(ShimError):
    kind = Kind.ABORTED


class InternalError(ShimError):
    kind = Kind.INTERNAL


BY_KIND: Final[Mapping[Kind, type[ShimError]]] = {
    error.kind: error
    for error in globals().values()
    if isinstance(error, type) and issubclass(error, ShimError) and error is not ShimError
}
