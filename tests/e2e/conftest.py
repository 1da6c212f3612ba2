"""What tests of real processes share."""

from __future__ import annotations

import pytest

from tests.support.processes import GRPC_SERVERS


@pytest.fixture(scope="module", params=GRPC_SERVERS)
def grpc_server(request: pytest.FixtureRequest) -> str:
    """Return the flag for a gRPC server; tests that use it run once for each."""
    return f"--grpc-server={request.param}"
