from tests.client.conftest import orchestrator, other
from tests.launcher.conftest import tiny

__all__ = ["orchestrator", "other", "tiny"]
