"""Images by their own ids, because several images may share a disk."""

import sqlalchemy as sa
from alembic import op

from virtshim.store.migrate import split_by_config

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    before = op.get_bind().execute(sa.text("select digest, pulled_at, document from images")).all()
    op.drop_table("images")
    images = op.create_table(
        "images",
        sa.Column("id", sa.String(71), primary_key=True),
        sa.Column("pulled_at", sa.BigInteger, nullable=False),
        sa.Column("document", sa.Text, nullable=False),
    )
    rows = [
        {"id": image, "pulled_at": pulled_at, "document": text}
        for digest, pulled_at, document in before
        # An unreadable document stays as it is: as long as it exists, no image file is deleted.
        for image, text in (split_by_config(document) or {digest: document}).items()
    ]
    if rows:
        op.bulk_insert(images, rows)
