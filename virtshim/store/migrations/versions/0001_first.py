"""First schema: sandboxes, containers, images, node."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "sandboxes",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("namespace", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("uid", sa.Text, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("phase", sa.Text, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("document", sa.Text, nullable=False),
    )
    op.create_index("sandboxes_by_key", "sandboxes", ["namespace", "name", "uid", "attempt"], unique=True)
    op.create_table(
        "containers",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("sandbox_id", sa.String(64), nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("phase", sa.Text, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("document", sa.Text, nullable=False),
    )
    op.create_index("containers_by_name", "containers", ["sandbox_id", "name", "attempt"], unique=True)
    op.create_table(
        "images",
        sa.Column("digest", sa.String(71), primary_key=True),
        sa.Column("pulled_at", sa.BigInteger, nullable=False),
        sa.Column("document", sa.Text, nullable=False),
    )
    op.create_table("node", sa.Column("key", sa.Text, primary_key=True), sa.Column("value", sa.Text, nullable=False))
