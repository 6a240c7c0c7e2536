"""The tables. A row has the keys and the phase as columns, and the whole record as a JSON document."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, ForeignKey, Index, Integer, MetaData, String, Table, Text

metadata = MetaData()

sandboxes = Table(
    "sandboxes",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("namespace", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("uid", Text, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("phase", Text, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("document", Text, nullable=False),
    Index("sandboxes_by_key", "namespace", "name", "uid", "attempt", unique=True),
)

containers = Table(
    "containers",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("sandbox_id", String(64), nullable=False),
    Column("name", Text, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("phase", Text, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("document", Text, nullable=False),
    Index("containers_by_name", "sandbox_id", "name", "attempt", unique=True),
)

images = Table(
    "images",
    metadata,
    Column("id", String(71), primary_key=True),
    Column("pulled_at", BigInteger, nullable=False),
    Column("document", Text, nullable=False),
)

# The `claims` of the container documents, written in the same transaction. The primary key keeps two containers from holding the
# same device. A claim is deleted with its container.
claims = Table(
    "claims",
    metadata,
    Column("claim", Text, primary_key=True),
    Column("container_id", String(64), ForeignKey("containers.id", ondelete="CASCADE"), nullable=False, index=True),
)

# Devices that were taken from their drivers.
borrowed = Table(
    "borrowed",
    metadata,
    Column("claim", Text, primary_key=True),
    Column("document", Text, nullable=False),
)

# Faults of PCI functions, remembered from one VM to the next.
device_conditions = Table(
    "device_conditions",
    metadata,
    Column("claim", Text, primary_key=True),
    Column("document", Text, nullable=False),
)

# Facts about this node that must outlive the process: its id, and the boot it last ran in.
node = Table(
    "node",
    metadata,
    Column("key", Text, primary_key=True),
    Column("value", Text, nullable=False),
)
