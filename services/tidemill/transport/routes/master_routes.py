"""Routes from the controllers: streams to two of them, and a file for the next start.

With routes, a process finds a new master at once. Without them it asks one replica after another.
While all controllers are down, the last routes stay valid. A proxy also reports to the controllers
which masters it cannot reach.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Final, final

import structlog
from google.protobuf.message import DecodeError

from tidemill.stubs.tidemill.controller.v1 import controller_pb2 as wire
from tidemill.transport.aio.connect import Connector, OpenChannel
from tidemill.transport.grpc.status import RpcError
from tidemill.transport.http2.limits import Limits
from tidemill.transport.replica_wire import from_view
from tidemill.transport.routes.masters import LATE_MAX, LATE_MAX_OF_PROXY, Masters
from tidemill.transport.routes.route_file import from_text, to_text

FOLLOWED_MAX: Final = 2  # controllers: one more than is needed
WATCH_ROUTES: Final = "/tidemill.controller.v1.Controller/WatchRoutes"
REPORT_UNREACHABLE: Final = "/tidemill.controller.v1.Controller/ReportUnreachable"
REPORT_S: Final = 1.0  # a controller uses a report for 2.5 s
REPORT_TIMEOUT_S: Final = 0.5
CONNECT_TIMEOUT_S: Final = 1.0
RECONNECT_S: Final = 0.5  # half of the silence that a replica may keep
MESSAGE_BYTES_MAX: Final = 4 << 20  # a thousand broker groups of some kilobytes
LIMITS: Final = Limits(keepalive_period_s=1.0, keepalive_timeout_s=3.0)

log = structlog.get_logger()


@final
class MasterRoutes:
    """The known masters, kept up to date by controllers; listeners are notified of elections."""

    def __init__(
        self,
        controllers: Sequence[str],
        file: Path | None = None,
        *,
        connect: Connector,
        name: str = "",
        cluster: str = "",
    ) -> None:
        """`name` is that of a proxy. Any other process has none, and reports nothing."""
        self.masters = Masters(late_max=LATE_MAX_OF_PROXY if name else LATE_MAX)
        self._controllers = list(controllers)
        self._file = file
        self._connect = connect
        self._name = name
        self._cluster = cluster
        self._elected: dict[str, Callable[[], None]] = {}  # by address of the link
        self._channels: dict[str, OpenChannel] = {}  # to the controllers that are followed
        self._lost_at_s: dict[tuple[str, str], float] = {}  # by group and master
        if file is not None:
            with contextlib.suppress(OSError, ValueError):
                self.masters.load(from_text(cluster, file.read_text("utf-8")))

    def notify_of_election(self, address: str, elected: Callable[[], None]) -> None:
        """Call `elected` whenever the broker group at `address` has elected a master."""
        self._elected[address] = elected

    def stop_notifying(self, address: str) -> None:
        """Forget `address` and the function that is called after an election."""
        self._elected.pop(address, None)
        self.masters.unbind(address)

    @contextlib.asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        """Follow controllers until the block ends."""
        # Two at random, so that the callers spread over the controllers.
        followed = random.sample(self._controllers, min(FOLLOWED_MAX, len(self._controllers)))
        async with asyncio.TaskGroup() as tasks:
            watches = [
                tasks.create_task(self._follow(each), name=f"routes of {each}") for each in followed
            ]
            if self._name:
                watches.append(
                    tasks.create_task(self._report_unreachable(), name="unreachable masters")
                )
            yield
            for watch in watches:
                watch.cancel()

    async def _follow(self, address: str) -> None:
        request = wire.WatchRoutesRequest(proxy=self._name).SerializeToString()
        while True:
            try:
                async with self._connect(
                    address,
                    LIMITS,
                    message_bytes_max=MESSAGE_BYTES_MAX,
                    timeout_s=CONNECT_TIMEOUT_S,
                ) as channel:
                    known: set[str] = set()  # broker groups of this controller, on this stream
                    apply = functools.partial(self._apply_update, known)
                    stream = channel.open(WATCH_ROUTES, apply)
                    self._channels[address] = channel
                    try:
                        stream.write(request)
                        await stream.wait_ended()
                    finally:
                        del self._channels[address]
                        stream.cancel()
            except RpcError as error:
                log.debug("controller unreachable", controller=address, reason=error.message)
            await asyncio.sleep(RECONNECT_S * random.uniform(0.75, 1.25))

    async def _report_unreachable(self) -> None:
        """Report unreachable masters to the controllers, again and again while it lasts."""
        while True:
            await asyncio.sleep(REPORT_S)
            for report in self._unreachable(time.monotonic()):
                for address, channel in list(self._channels.items()):
                    try:
                        await self._report(channel, report)
                    except (RpcError, TimeoutError) as error:
                        log.debug("report failed", controller=address, reason=error)

    def _unreachable(self, now_s: float) -> list[wire.ReportUnreachableRequest]:
        """Return the reports that are due."""
        unreachable = self.masters.unreachable()
        lost = {(name, one.master) for name, one in unreachable.items()}
        self._lost_at_s = {key: self._lost_at_s.get(key, now_s) for key in lost}
        return [
            wire.ReportUnreachableRequest(
                proxy=self._name,
                group=name,
                master=one.master,
                unreachable_ms=int((now_s - self._lost_at_s[name, one.master]) * 1_000),
                reachable=sorted(one.reachable),
            )
            for name, one in sorted(unreachable.items())
        ]

    async def _report(self, channel: OpenChannel, report: wire.ReportUnreachableRequest) -> None:
        """Send a report to one controller. Raises RpcError or TimeoutError."""
        stream = channel.open(REPORT_UNREACHABLE, lambda _done: None)
        try:
            stream.write_last(report.SerializeToString())
            async with asyncio.timeout(REPORT_TIMEOUT_S):
                await stream.wait_ended()
        finally:
            stream.cancel()

    def _apply_update(self, known: set[str], message: bytes) -> None:
        try:
            update = wire.RouteUpdate.FromString(message)
        except DecodeError:
            log.warning("invalid message from controller")
            return
        removed = known - update.groups.keys() if update.is_complete else set()
        for name in removed:
            log.info("broker group removed", group=name)
            self.masters.forget(name)
        known.difference_update(removed)
        known.update(update.groups)
        if not update.groups and not removed:
            return
        for name, view in update.groups.items():
            for address in self.masters.learn(name, from_view(view)):
                log.info("broker group has elected a master", group=name, epoch=view.epoch)
                elected = self._elected.get(address)
                if elected is not None:
                    elected()
        self._save()

    def _save(self) -> None:
        """Write the routes to the file, without a sync: an invalid file is ignored at the start."""
        if self._file is None:
            return
        written = self._file.with_suffix(".new")
        try:
            written.write_text(to_text(self._cluster, self.masters.routes), "utf-8")
            written.replace(self._file)
        except OSError as error:
            log.warning("cannot write the routes file", file=str(self._file), reason=str(error))
