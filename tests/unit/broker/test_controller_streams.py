"""What the supervisor of a replica logs of controllers that it cannot reach."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import pytest
from structlog.testing import capture_logs

from tidemill.broker.controller_link import streams
from tidemill.broker.controller_link.sessions import ControllerSessions
from tidemill.broker.controller_link.streams import ControllerStreams
from tidemill.common.clock import SystemClock
from tidemill.transport.grpc.status import RpcCode, RpcError

WAIT_S = 30.0
ATTEMPTS = 3


class EndedSession:
    """A stream that the controller ends, with an error if it is not `orderly`.

    The controller sends a message first if it `answers`.
    """

    part_heard_at_s = 0.0  # messages arrive whole

    def __init__(
        self, receive: Callable[[bytes], None], *, answers: bool, orderly: bool = False
    ) -> None:
        self._receive = receive
        self._answers = answers
        self._orderly = orderly

    async def wait_ended(self) -> None:
        await asyncio.sleep(0)
        if self._answers:
            self._receive(b"")
        if self._orderly:
            return
        raise RpcError(RpcCode.NOT_FOUND, "broker group 'broker-0' does not exist")

    def write(self, _message: bytes) -> None:
        """Ignore it."""

    def cancel(self) -> None:
        """Do nothing: it has ended."""


class EndingChannel(NamedTuple):
    answers: bool
    orderly: bool = False

    def open(self, _method: str, receive: Callable[[bytes], None]) -> EndedSession:
        return EndedSession(receive, answers=self.answers, orderly=self.orderly)


async def warnings_of_failures(
    channel: EndingChannel | None = None, *, connections_max: int = ATTEMPTS + 1
) -> list[str]:
    """Return the warnings of a few failed attempts to connect.

    The first `connections_max` have the channel, and the later ones are refused.
    """
    has_failed = asyncio.Event()
    attempts = 0

    class FailedConnection(contextlib.AbstractAsyncContextManager[EndingChannel]):
        """A connection that is refused, or has only rejected sessions."""

        async def __aenter__(self) -> EndingChannel:
            nonlocal attempts
            attempts += 1
            if attempts > ATTEMPTS:
                has_failed.set()
            if channel is None or attempts > connections_max:
                raise RpcError(RpcCode.UNAVAILABLE, "connection refused")
            return channel

        async def __aexit__(self, *_: object) -> None:
            """Do nothing."""

    kept = ControllerStreams(
        ControllerSessions("broker-0"),
        ["127.0.0.1:1"],
        connect=cast("Any", lambda *_, **__: FailedConnection()),
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


@pytest.mark.parametrize(
    ("warn_first_s", "events"), [(3600.0, []), (0.0, ["controller rejects the session"])]
)
def test_a_rejected_session_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, warn_first_s: float, events: list[str]
) -> None:
    """A replica that starts before its broker group exists repeats the session until it does."""
    monkeypatch.setattr(streams, "WARN_FIRST_S", warn_first_s)
    assert asyncio.run(warnings_of_failures(EndingChannel(answers=False))) == events


def test_each_end_of_a_working_session_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "WARN_FIRST_S", 3600.0)
    found = asyncio.run(warnings_of_failures(EndingChannel(answers=True)))
    assert found[:ATTEMPTS] == ["controller unreachable"] * ATTEMPTS


def test_a_controller_that_drains_is_not_logged_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A standalone stops its controller before its brokers."""
    monkeypatch.setattr(streams, "WARN_FIRST_S", 3600.0)
    channel = EndingChannel(answers=True, orderly=True)
    assert asyncio.run(warnings_of_failures(channel, connections_max=1)) == []
