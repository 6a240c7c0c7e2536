"""Faults of PCI functions, remembered from one VM to the next."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "device_conditions",
        sa.Column("claim", sa.Text, primary_key=True),
        sa.Column("document", sa.Text, nullable=False),
    )
