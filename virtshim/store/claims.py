"""Which container holds which device of the host, under a unique key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sqlalchemy import Connection, Engine, delete, insert, select

from virtshim.domain.errors import WrongState
from virtshim.store import schema


def write_claims(connection: Connection, container: str, claims: Sequence[str]) -> None:
    """The container holds these and no others. WrongState if another one holds one of them; then the transaction must not be
    committed."""
    table = schema.claims
    query = select(table.c.claim, table.c.container_id).where(table.c.claim.in_(claims))
    there = {claim: holder for claim, holder in connection.execute(query)}  # noqa: C416 (rows are no pairs to a type checker)
    for claim, holder in there.items():
        if holder != container:
            raise WrongState(f"device {claim} is held by container {holder}")
    connection.execute(delete(table).where(table.c.container_id == container, table.c.claim.not_in(claims)))
    if new := [claim for claim in dict.fromkeys(claims) if claim not in there]:
        connection.execute(insert(table), [{"claim": claim, "container_id": container} for claim in new])


def held(engine: Engine) -> Mapping[str, tuple[str, ...]]:
    """Container -> its claims."""
    table = schema.claims
    found: dict[str, tuple[str, ...]] = {}
    with engine.connect() as connection:
        for claim, holder in connection.execute(select(table.c.claim, table.c.container_id).order_by(table.c.claim)):
            found[holder] = (*found.get(holder, ()), claim)
    return found


def delete_orphaned_claims(engine: Engine) -> None:
    """Claims without a container, which only an edit of the database by hand can leave."""
    known = select(schema.containers.c.id)
    with engine.begin() as connection:
        connection.execute(delete(schema.claims).where(schema.claims.c.container_id.not_in(known)))
