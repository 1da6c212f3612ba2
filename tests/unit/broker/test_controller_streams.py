"""What the supervisor of a replica logs of controllers that it cannot reach."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from tidemill.broker.controller_link import streams
from tidemill.broker.controller_link.sessions import ControllerSessions
from tidemill.broker.controller_link.streams import ControllerStreams
from tidemill.common.clock import SystemClock
from tidemill.transport.grpc.status import RpcCode, RpcError

WAIT_S = 30.0
ATTEMPTS = 3


async def warnings_of_failures() -> list[str]:
    """Return the warnings of a few failed attempts to connect."""
    has_failed = asyncio.Event()
    attempts = 0

    class RefusedConnection(contextlib.AbstractAsyncContextManager[None]):
        """A connection that is refused."""

        async def __aenter__(self) -> None:
            nonlocal attempts
            attempts += 1
            if attempts > ATTEMPTS:
                has_failed.set()
            raise RpcError(RpcCode.UNAVAILABLE, "connection refused")

        async def __aexit__(self, *_: object) -> None:
            """Do nothing: it was never entered."""

    kept = ControllerStreams(
        ControllerSessions("broker-0"),
        ["127.0.0.1:1"],
        connect=cast("Any", lambda *_, **__: RefusedConnection()),
        clock=SystemClock(),
        send_to_broker=lambda _: None,
        stop_broker=lambda _: None,
    )
    with capture_logs() as logs:
        running = asyncio.create_task(kept.run())
        async with asyncio.timeout(WAIT_S):
            await has_failed.wait()
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
    return [each["event"] for each in logs if each["log_level"] == "warning"]


@pytest.mark.parametrize(("warn_first_s", "count"), [(3600.0, 0), (0.0, 1)])
def test_the_first_seconds_of_a_start_warn_of_no_controller(
    monkeypatch: pytest.MonkeyPatch, warn_first_s: float, count: int
) -> None:
    monkeypatch.setattr(streams, "WARN_FIRST_S", warn_first_s)
    assert asyncio.run(warnings_of_failures()) == ["controller unreachable"] * count
