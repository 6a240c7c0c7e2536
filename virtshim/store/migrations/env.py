"""Alembic's entry point: runs the migrations on the connection that `virtshim.store.migrate` passes."""

from alembic import context

from virtshim.store.schema import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata, render_as_batch=True)
context.run_migrations()
