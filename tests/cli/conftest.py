from tests.client.conftest import orchestrator
from tests.launcher.conftest import tiny

__all__ = ["orchestrator", "tiny"]
