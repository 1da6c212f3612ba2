"""Error texts for addresses without a proxy."""

from __future__ import annotations

import http.server
import socket
import threading
from collections.abc import Iterator

import pytest

from tidemill_pipeline.client import ClusterClient
from tidemill_pipeline.errors import NoAnswer
from tidemill_pipeline.options import parse_source


class QuietHandler(http.server.BaseHTTPRequestHandler):
    default_request_version = "HTTP/1.1"  # In the answer to an unknown request.

    def log_message(self, *_: object) -> None:
        """Do not log gRPC's requests."""


@pytest.fixture
def web_server() -> Iterator[str]:
    server = http.server.HTTPServer(("127.0.0.1", 0), QuietHandler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def nobody() -> Iterator[str]:
    """A reserved address without a server."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"


def asked(endpoint: str) -> str:
    """Return the error of a request to a cluster."""
    options = parse_source(
        {"endpoints": endpoint, "topic": "orders", "maxRetries": "1", "retryBackoffMs": "1"},
        is_stream=False,
    )
    client = ClusterClient(options.connection)
    try:
        with pytest.raises(NoAnswer) as failure:
            client.cluster(options.topics)
    finally:
        client.close()
    return str(failure.value)


def test_the_port_of_the_admin_api_is_known_by_its_protocol(web_server: str) -> None:
    assert asked(web_server).endswith("proxies use port 8081")


def test_an_unreachable_address_names_the_endpoints_option(nobody: str) -> None:
    assert "check that --endpoints (TIDEMILL_ENDPOINTS) is a running proxy" in asked(nobody)
