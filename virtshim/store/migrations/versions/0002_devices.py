"""Devices of the host: which container holds a device, and which driver to return it to."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "claims",
        sa.Column("claim", sa.Text, primary_key=True),
        sa.Column(
            "container_id",
            sa.String(64),
            sa.ForeignKey("containers.id", ondelete="CASCADE"),
            nullable=False,
            index=True,
        ),
    )
    op.create_table(
        "borrowed",
        sa.Column("claim", sa.Text, primary_key=True),
        sa.Column("document", sa.Text, nullable=False),
    )
