"""Runs migrations on the connection in the Alembic config's attribute `connection`, which is in a transaction."""

from alembic import context

# Without `transactional_ddl`, Alembic expects that SQLite commits each statement.
context.configure(connection=context.config.attributes["connection"], transactional_ddl=True)
with context.begin_transaction():
    context.run_migrations()
