"""The migrations of the database, by Alembic."""
