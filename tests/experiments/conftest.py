"""Fixtures that tests of scripts share."""

import pytest
from distributed_pool import two_ranks


@pytest.fixture(scope="session")
def processes_that_meet() -> None:
    """Skip in a sandbox without a loopback device, where two processes never meet."""
    two_ranks("cpu").close()
