import pytest

from tests.orchestrator.admission.driver import AdmissionDriver


@pytest.fixture
def driver() -> AdmissionDriver:
    """An admission that runs one request at a time."""
    return AdmissionDriver()
