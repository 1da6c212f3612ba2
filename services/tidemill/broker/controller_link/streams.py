"""The supervisor's connections to controllers: one stream each, reopened when it ends."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, final

import structlog
from google.protobuf.message import DecodeError

from tidemill.broker.controller_link.sessions import (
    ControllerSessions,
    StopBroker,
    ToBroker,
    ToController,
)
from tidemill.stubs.tidemill.controller.v1 import controller_pb2 as wire
from tidemill.transport.grpc.status import RpcCode, RpcError
from tidemill.transport.http2.limits import Limits

if TYPE_CHECKING:
    from tidemill.common.clock import Clock
    from tidemill.transport.aio.connect import Connector, OpenStream

SESSION: Final = "/tidemill.controller.v1.Controller/Session"
TICK_S: Final = 0.05  # a quarter of the time between two heartbeats
CONNECT_TIMEOUT_S: Final = 1.0  # the default session_timeout_ms
WARN_FIRST_S: Final = 5.0  # a standalone starts its controller at the same time
RECONNECT_FIRST_S: Final = 0.1
RECONNECT_LONGEST_S: Final = 1.0  # all replicas reach a restarted controller within this time
MESSAGE_BYTES_MAX: Final = 1 << 20
UNREACHABLE: Final = "controller unreachable"
REJECTED: Final = "controller rejects the session"
LIMITS: Final = Limits(keepalive_period_s=1.0, keepalive_timeout_s=2.0)

log = structlog.get_logger()


@final
class ControllerStreams:
    """The streams that carry out the actions of `ControllerSessions`."""

    def __init__(
        self,
        sessions: ControllerSessions,
        addresses: Sequence[str],
        *,
        connect: Connector,
        clock: Clock,
        send_to_broker: Callable[[wire.SessionDown], None],
        stop_broker: Callable[[str], None],
    ) -> None:
        self._sessions = sessions
        self._addresses = addresses
        self._connect = connect
        self._clock = clock
        self._send_to_broker = send_to_broker
        self._stop_broker = stop_broker
        self._open: dict[int, OpenStream] = {}

    async def run(self) -> None:
        """Keep a stream to each controller, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for controller, address in enumerate(self._addresses):
                tasks.create_task(self._keep(controller, address), name=f"controller {address}")
            while True:
                self.do(self._sessions.tick)
                await asyncio.sleep(TICK_S)

    def do(self, event: Callable[[int], None]) -> None:
        """Pass an event to the sessions, and carry out their actions."""
        event(self._clock.monotonic_ms())
        for action in self._sessions.take_actions():
            match action:
                case ToController(controller, message):
                    stream = self._open.get(controller)
                    if stream is not None:
                        stream.write(message.SerializeToString())
                case ToBroker(message):
                    self._send_to_broker(message)
                case StopBroker(why):
                    self._stop_broker(why)

    async def _keep(self, controller: int, address: str) -> None:
        wait_s = RECONNECT_FIRST_S
        # Log only the first of several failures, and none while both processes start.
        is_logged, warn_at_s = False, time.monotonic() + WARN_FIRST_S
        is_open = is_accepted = False

        def receive(message: bytes) -> None:
            nonlocal is_logged, warn_at_s, is_accepted
            if not is_accepted:
                log.info("controller connected", controller=address)
                is_accepted, is_logged, warn_at_s = True, False, 0.0
            self._receive(controller, message)

        while True:
            # A controller ends the session of a broker group that is not founded yet.
            is_open = is_accepted = False
            try:
                async with self._connect(
                    address,
                    LIMITS,
                    message_bytes_max=MESSAGE_BYTES_MAX,
                    timeout_s=CONNECT_TIMEOUT_S,
                ) as channel:
                    stream = self._open[controller] = channel.open(SESSION, receive)
                    is_open, wait_s = True, RECONNECT_FIRST_S
                    self.do(lambda _: self._sessions.note_connection(controller))
                    try:
                        await stream.wait_ended()
                        # The controller drains. A standalone then stops this replica, and on
                        # Kubernetes another pod replaces the controller.
                        warn_at_s = time.monotonic() + WARN_FIRST_S
                    finally:
                        stream.cancel()
            except RpcError as error:
                if not is_logged and time.monotonic() >= warn_at_s:
                    is_rejected = is_open and not is_accepted
                    event = REJECTED if is_rejected else UNREACHABLE
                    log.warning(event, controller=address, reason=error.message)
                    is_logged = True
            finally:
                self._open.pop(controller, None)
                self.do(lambda _: self._sessions.note_disconnection(controller))
            await asyncio.sleep(wait_s * random.uniform(0.75, 1.25))
            wait_s = min(2 * wait_s, RECONNECT_LONGEST_S)

    def _receive(self, controller: int, message: bytes) -> None:
        try:
            down = wire.SessionDown.FromString(message)
        except DecodeError:
            stream = self._open.get(controller)
            if stream is not None:
                stream.fail(RpcError(RpcCode.INTERNAL, "a controller says what makes no sense"))
            return
        self.do(lambda now_ms: self._sessions.receive_from_controller(controller, down, now_ms))
