"""Creates the table of jobs."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.schema import SchemaItem

revision = "0001"
down_revision = None


def columns() -> list[SchemaItem]:
    """Returns new columns, constraints and indexes of the table. Defaults are set by this program, not in SQL."""
    return [
        # SQLite generates numbers only for the type INTEGER.
        sa.Column("number", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True),
        sa.Column("uid", sa.String(32), nullable=False),
        sa.Column("pipeline", sa.String(128), nullable=False),
        sa.Column("caller", sa.String(128), nullable=False),
        sa.Column("job_id", sa.String(128), nullable=False),
        sa.Column("submitted", sa.LargeBinary, nullable=False),
        sa.Column("priority", sa.Integer, nullable=False),
        sa.Column("state", sa.Integer, nullable=False),
        sa.Column("report", sa.LargeBinary, nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False, default=0),
        sa.Column("failures", sa.Integer, nullable=False, default=0),
        sa.Column("requests", sa.Integer, nullable=False, default=0),
        sa.Column("created_s", sa.Double, nullable=False),
        sa.Column("started_s", sa.Double),
        sa.Column("ended_s", sa.Double),
        sa.Column("expires_s", sa.Double),
        sa.Column("not_before_s", sa.Double, nullable=False, default=0.0),
        sa.Column("cancel_requested", sa.Boolean, nullable=False, default=False),
        sa.Column("worker", sa.String(128)),
        sa.Column("lease", sa.String(32)),
        sa.Column("lease_until_s", sa.Double),
        sa.UniqueConstraint("pipeline", "caller", "job_id", name="jobs_of_a_caller"),
        sa.Index("jobs_by_state", "pipeline", "state", "not_before_s"),
        sa.Index("jobs_by_expiry", "pipeline", "expires_s"),
    ]


def upgrade() -> None:
    """Creates the table and its indexes."""
    op.create_table("jobs", *columns())
