"""The health endpoints of a broker that reads its log."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request

import pytest

from tidemill.broker.startup_health import reporting_startup
from tidemill.common.lifecycle import StartError
from tidemill.common.metrics import Registry
from tidemill.common.scrape_access import ScrapeAccess

ANSWER_S = 30.0  # of a loaded machine; it takes a millisecond


def registry() -> Registry:
    return Registry(cluster="c", node_type="broker", node_id="b")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
    return port


def get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=ANSWER_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_probes_are_answered_while_this_thread_is_busy() -> None:
    port = free_port()
    with reporting_startup(registry(), "127.0.0.1", port, ScrapeAccess()):
        assert get(port, "/livez") == (200, "ok\n")
        assert get(port, "/readyz") == (503, "not ready: starting\n")
        assert "rocketmq_ready" in get(port, "/metrics")[1]
    # The server of the next life takes the port at once.
    with reporting_startup(registry(), "127.0.0.1", port, ScrapeAccess()):
        assert get(port, "/livez") == (200, "ok\n")


def test_a_port_in_use_is_reported_before_the_store_is_read() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with (
            pytest.raises(StartError, match=str(port)),
            reporting_startup(registry(), "127.0.0.1", port, ScrapeAccess()),
        ):
            pytest.fail("the block began")


def test_the_endpoints_end_if_the_store_cannot_be_opened() -> None:
    port = free_port()
    with (
        pytest.raises(ValueError, match="damaged"),
        reporting_startup(registry(), "127.0.0.1", port, ScrapeAccess()),
    ):
        raise ValueError("damaged")
    with pytest.raises(urllib.error.URLError):
        get(port, "/livez")
