"""A blob's bytes on their way: passed on, and digested. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from virtshim.domain.errors import InvalidRequest


def verified(chunks: Iterator[bytes], digest: str, size: int | None, what: str) -> Iterator[bytes]:
    """Passes `chunks` on; at their end, raises InvalidRequest unless they had this digest and, if given, this size."""
    seen, sha256 = 0, hashlib.sha256()
    for chunk in chunks:
        seen += len(chunk)
        if size is not None and seen > size:
            raise InvalidRequest(f"{what} is longer than the {size} bytes its manifest says; push the image again")
        sha256.update(chunk)
        yield chunk
    if size is not None and seen != size:
        raise InvalidRequest(f"{what} has {seen} bytes where its manifest says {size}; push the image again")
    if f"sha256:{sha256.hexdigest()}" != digest:
        raise InvalidRequest(
            f"{what} has the digest sha256:{sha256.hexdigest()}, expected {digest}; push the image again"
        )
