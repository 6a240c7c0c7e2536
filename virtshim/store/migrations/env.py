"""Alembic's entry: runs the steps on the connection that `virtshim.store.migrate` hands over."""

from alembic import context

from virtshim.store.schema import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata, render_as_batch=True)
context.run_migrations()
