"""The tables. A row holds what is asked by (keys, phase) as columns and the whole record as a JSON document."""

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

# claims: what container documents say of `claims`, written in one transaction with them. The key is what keeps a device from
# two containers; a claim goes with its container.
claims = Table(
    "claims",
    metadata,
    Column("claim", Text, primary_key=True),
    Column("container_id", String(64), ForeignKey("containers.id", ondelete="CASCADE"), nullable=False, index=True),
)

# borrowed: devices that were taken from their drivers.
borrowed = Table(
    "borrowed",
    metadata,
    Column("claim", Text, primary_key=True),
    Column("document", Text, nullable=False),
)

# device_conditions: faults of PCI functions, remembered between two VMs.
device_conditions = Table(
    "device_conditions",
    metadata,
    Column("claim", Text, primary_key=True),
    Column("document", Text, nullable=False),
)

# node: facts about this node that must outlive the process (its id, the boot it last ran in).
node = Table(
    "node",
    metadata,
    Column("key", Text, primary_key=True),
    Column("value", Text, nullable=False),
)
