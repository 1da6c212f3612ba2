"""The connection of the home to the master of one member of its cluster.

A new connection sends the member the whole configuration, and then each change. A change is sent
when its round is committed: no member may have what the home may still lose. One frame is in flight
to a member at a time, and later changes go into the next frame. A member that falls far behind gets
the whole configuration again. If a controller reports another master of the member, the connection
moves there at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias, final

import structlog

from tidemill.broker.engine.metadata.security_items import SECURITY_LEVEL
from tidemill.broker.server.wire import config_frames
from tidemill.broker.server.wire.security_frames import SecurityPages
from tidemill.common.errors import BY_NAME, BrokerUnreachable, NotMaster, ServiceError, from_wire
from tidemill.common.feature_level import read_level
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb
from tidemill.transport.grpc.status import RpcCode, RpcError
from tidemill.transport.http2.limits import Limits
from tidemill.transport.routes.masters import UNKNOWN

if TYPE_CHECKING:
    from tidemill.broker.engine.engine import Engine
    from tidemill.broker.engine.metadata.membership import BrokerGroup
    from tidemill.broker.server.round.rounds import Rounds
    from tidemill.broker.server.round.turn import Turn
    from tidemill.transport.aio.connect import Connector, OpenStream
    from tidemill.transport.routes.master_routes import MasterRoutes

log = structlog.get_logger()

FOLLOW: Final = "/tidemill.broker.v1.BrokerHome/Follow"
# Rounds whose changes wait for a member. Beyond it the member gets the whole configuration, which
# the limits of topics and groups bound.
UPDATES_MAX: Final = 256
UPDATES_BYTES_MAX: Final = 8 << 20  # of them; also the limit of the frame that has them
# A restarted member is back within half a second, and should not be stale for a second. During a
# failover, the replicas are dialled in turn.
RECONNECT_MAX_S: Final = 0.25
REFUSED_S: Final = 2.0  # pause after a rejection, which an operator has to resolve
# Period of frames that ask for the feature level and which groups have begun to read. A member that
# joins within this time does not know it, and a group that starts at the latest message may miss
# messages there.
REPORT_PERIOD_S: Final = 1.0
CONNECT_TIMEOUT_S: Final = 2.0
# A reply has a few numbers or an error, and up to 1,000 stocks of quotas with names of 255 bytes.
REPLY_BYTES_MAX: Final = 512 << 10
LIMITS: Final = Limits(keepalive_period_s=1.0, keepalive_timeout_s=5.0)


# Takes the stocks of quotas of a broker group, and the ms since it was asked for them.
StockListener: TypeAlias = Callable[[str, Sequence[pb.QuotaStock], int], None]


class HomeLife(NamedTuple):
    """The identity of the home's process in its frames to members."""

    life: str
    sequences: Iterator[int]
    is_elected: bool  # it has replicas, so that controllers gave it its epoch


@final
class MemberConnection:
    """The connection to the master of one member, and the updates that wait for it."""

    def __init__(
        self,
        group: BrokerGroup,
        rounds: Rounds,
        connect: Connector,
        routes: MasterRoutes,
        home_life: HomeLife,
        on_left: Callable[[str], None],
        on_stocks: StockListener,
    ) -> None:
        self.group = group
        self.dialled = group.address  # a replica of the member
        self.reason = "not connected yet"  # of a missing connection; empty if connected
        self.last_backlog = pb.Backlog()
        self.last_backlog_at_ms = 0  # 0: unknown
        self._home_life = home_life
        self._on_left = on_left
        self._on_stocks = on_stocks
        self._stocks_due_s = 0.0  # when the next frame asks for the stocks of quotas
        # The newer life of this home that the member knows, if its log was ahead of ours.
        self._instead_of: pb.HomeProcess | None = None
        self._rounds = rounds
        self._connect = connect
        self._routes = routes
        self._elected = asyncio.Event()
        # Since when the member has not answered: without a connection, or with a frame in flight.
        self._unanswered_since_s: float | None = asyncio.get_running_loop().time()
        routes.masters.bind(group.address, group.name)
        routes.notify_of_election(group.address, self._elected.set)
        self._updates: list[tuple[int, pb.ConfigUpdate]] = []  # each with its round
        self._updates_bytes = 0
        self._is_behind = False
        self._changed = asyncio.Event()
        self._exchanging = asyncio.Lock()
        self._stream: OpenStream | None = None
        self._reply: asyncio.Future[pb.FollowReply] | None = None
        self._sequence = 0  # of the frame that waits for its reply
        self._membership = pb.Membership()
        self._level = 0  # feature level of the member, as of its last reply; 0: unknown

    @property
    def is_connected(self) -> bool:
        """Whether the member has the whole configuration on the current connection."""
        return not self.reason

    def unreachable_s(self) -> float:
        """Return the time for which the member has not answered; 0 while it answers."""
        since_s = self._unanswered_since_s
        return 0.0 if since_s is None else asyncio.get_running_loop().time() - since_s

    def forget_route(self) -> None:
        """Stop following the master of the member."""
        self._routes.stop_notifying(self.group.address)

    def queue_update(self, round_number: int, update: pb.ConfigUpdate) -> None:
        """Queue the changes of a round."""
        if update.HasField("membership"):
            self._membership.CopyFrom(update.membership)
        self._updates_bytes += update.ByteSize()
        if len(self._updates) == UPDATES_MAX or self._updates_bytes > UPDATES_BYTES_MAX:
            self._updates.clear()
            self._updates_bytes = update.ByteSize()
            self._is_behind = True
        self._updates.append((round_number, update))
        self._changed.set()

    async def run(self) -> None:
        """Keep the member up to date until cancelled."""
        while True:
            self._elected.clear()
            try:
                wait_s = await self._follow_master()
            except Exception as error:
                # An unexpected error with one member must not end the home.
                log.exception("update of a member failed", broker_group=self.group.name)
                self.reason = f"update failed: {error!r}"
                wait_s = REFUSED_S
            finally:
                self._rounds.engine.broker_groups.connected.discard(self.group.name)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(random.uniform(wait_s / 2, wait_s)):
                    await self._elected.wait()

    async def exchange(self, frame: pb.FollowFrame) -> pb.FollowReply:
        """Send one frame and return the reply. Raises the error of the member."""
        async with self._exchanging:
            if self._stream is None:
                raise BrokerUnreachable(f"{self.group.name} is not connected: {self.reason}")
            frame.membership.CopyFrom(self._membership)
            frame.member.CopyFrom(config_frames.member(self.group))
            frame.epoch = self._rounds.engine.log.epoch
            frame.life = self._home_life.life
            frame.is_elected = self._home_life.is_elected
            if self._instead_of is not None:
                frame.instead_of.CopyFrom(self._instead_of)
            frame.sequence = self._sequence = next(self._home_life.sequences)
            self._reply = asyncio.get_running_loop().create_future()
            self._stream.write(frame.SerializeToString())
            self._note_unanswered()
            try:
                reply = await self._reply
            finally:
                self._reply = None
        if reply.has_left:
            self._on_left(self.group.name)
        if reply.HasField("heard"):
            self._note_older(reply.heard)
        if reply.error:
            known = reply.error if reply.error in BY_NAME else "BrokerUnreachable"
            raise from_wire(known, reply.message)
        self._instead_of = None
        self._note_level(read_level(reply.feature_level))
        if reply.begun:
            await self._note_begun(reply)
        if reply.ended_spreads:
            await self._note_ended_spreads(reply)
        return reply

    def _note_level(self, level: int) -> None:
        """Note the feature level of the member's log."""
        self._rounds.engine.broker_groups.feature_levels[self.group.name] = level
        if 0 < self._level < level:
            # It has left out what its log could not have.
            self._is_behind = True
            self._changed.set()
        self._level = level

    async def _note_begun(self, reply: pb.FollowReply) -> None:
        """Record since when groups read topics there; that reports it to all members, too."""
        begun = [(each.group_id, config_frames.read_begun(each.begun)) for each in reply.begun]

        def note(engine: Engine, turn: Turn) -> Generator[None, None, None]:
            yield from engine.following.note_begun(begun, turn.now_ms)

        await self._rounds.call_slices(note)

    async def _note_ended_spreads(self, reply: pb.FollowReply) -> None:
        """Close the spreads of dedup keys whose older keys are over at all old owners."""
        ended = [(each.topic_id, each.version) for each in reply.ended_spreads]
        await self._rounds.call(
            lambda engine, turn: engine.key_spreads.note_ended(self.group.name, ended, turn.now_ms)
        )

    def _note_older(self, heard: pb.HomeProcess) -> None:
        """Note that our log is older than the log that the member has followed."""
        log.error(
            "this home was restored from a backup, the member forgets its newer configuration",
            broker_group=self.group.name,
            heard_epoch=heard.epoch,
            epoch=self._rounds.engine.log.epoch,
        )
        self._instead_of = heard

    async def count_backlog(self) -> pb.Backlog:
        """Return the backlog of the member. Raises the error of the member."""
        reply = await self.exchange(
            pb.FollowFrame(count_backlog=True, readers=await self._readers())
        )
        self.last_backlog = reply.backlog
        self.last_backlog_at_ms = self._rounds.now_ms
        return reply.backlog

    async def request_leave(self) -> None:
        """Let the member leave the cluster. Raises the error of the member."""
        frame = pb.FollowFrame(leave=True, readers=await self._readers())
        try:
            await self.exchange(frame)
        finally:
            # The member may have left even if its reply is lost. If it is added again, it needs
            # the whole configuration.
            self._is_behind = True

    async def _readers(self) -> list[pb.GroupTopics]:
        """Return which groups read which topics here: the member may not know them all."""

        def read(engine: Engine, _turn: Turn) -> Generator[None, None, list[pb.GroupTopics]]:
            readers = []
            for reader in config_frames.readers_frame(engine):
                readers.append(reader)
                yield
            return readers

        return await self._rounds.call_slices(read)

    # ------------------------------------------------------------ the connection

    async def _follow_master(self) -> float:
        """Serve one connection until it ends or the master moves; return the pause after it."""
        self.dialled = self._routes.masters.dial(self.group.address)
        serving = asyncio.create_task(self._serve_connection(), name=f"serve {self.group.name}")
        electing = f"election of {self.group.name}"
        elected = asyncio.create_task(self._elected.wait(), name=electing)
        masters = self._routes.masters
        try:
            while True:
                await asyncio.wait((serving, elected), return_when=asyncio.FIRST_COMPLETED)
                if serving.done():
                    return serving.result()
                if masters.master_of(self.group.address) != self.dialled:
                    break
                # The replica that is dialled already was elected.
                self._elected.clear()
                elected = asyncio.create_task(self._elected.wait(), name=electing)
        finally:
            elected.cancel()
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
        if self.is_connected:
            self._log_failure("another replica is the master", was_connected=True)
        return 0.0

    async def _serve_connection(self) -> float:
        """Serve one connection; return the pause before the next one."""
        was_connected = False
        masters = self._routes.masters
        try:
            async with self._connect(
                self.dialled, LIMITS, message_bytes_max=REPLY_BYTES_MAX, timeout_s=CONNECT_TIMEOUT_S
            ) as channel:
                stream = channel.open(FOLLOW, self._receive)
                self._stream = stream
                self._level = 0
                updating = asyncio.create_task(
                    self._send_updates(), name=f"update {self.group.name}"
                )
                ending = asyncio.create_task(stream.wait_ended(), name=f"end of {self.group.name}")
                try:
                    await asyncio.wait((updating, ending), return_when=asyncio.FIRST_COMPLETED)
                    was_connected = self.is_connected
                    if updating.done():
                        updating.result()
                    else:
                        ending.result()
                        raise RpcError(
                            RpcCode.UNAVAILABLE, "the member ended the stream; see its log"
                        )
                finally:
                    await self._close(stream, updating, ending)
        except RpcError as error:
            if not was_connected:
                masters.note_failure(self.group.address, self.dialled)
            self._log_failure(str(error), was_connected=was_connected)
        except NotMaster:
            masters.note_rejection(self.group.address, self.dialled, version=UNKNOWN, master="")
            reason = f"{self.dialled} is not the master; waiting for the next one"
            self._log_failure(reason, was_connected=was_connected)
        except ServiceError as error:
            self._log_failure(error.message, was_connected=was_connected)
            return REFUSED_S if self._instead_of is None else RECONNECT_MAX_S
        return RECONNECT_MAX_S

    async def _close(self, stream: OpenStream, *tasks: asyncio.Task[None]) -> None:
        self._stream = None
        stream.cancel()
        for task in tasks:
            task.cancel()
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(
                BrokerUnreachable(f"the connection to {self.group.name} was lost")
            )
        await asyncio.gather(*tasks, return_exceptions=True)

    def _log_failure(self, reason: str, *, was_connected: bool) -> None:
        if was_connected or reason != self.reason:
            log.warning(
                "member not connected",
                broker_group=self.group.name,
                address=self.dialled,
                reason=reason,
            )
        self.reason = reason
        self._note_unanswered()

    def _note_unanswered(self) -> None:
        if self._unanswered_since_s is None:
            self._unanswered_since_s = asyncio.get_running_loop().time()

    async def _send_updates(self) -> None:
        """Send the whole configuration and then each change, until the connection is lost."""
        is_behind = True
        while True:
            if is_behind:
                await self._send_all()
            self._changed.clear()
            if not self._updates and not self._is_behind:
                # Replies report which topics groups read there, so an empty frame is due.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(REPORT_PERIOD_S):
                        await self._changed.wait()
            is_behind, self._is_behind = self._is_behind, False
            if not is_behind:
                updates, self._updates = self._updates, []
                self._updates_bytes = 0
                frame = pb.FollowFrame(configs=[update for _, update in updates])
                await self._exchange_stocks(frame)

    async def _exchange_stocks(self, frame: pb.FollowFrame) -> None:
        """Send a frame, which asks for the stocks of quotas once per period."""
        began_s = asyncio.get_running_loop().time()
        frame.count_stocks = began_s >= self._stocks_due_s
        reply = await self.exchange(frame)
        if frame.count_stocks:
            self._stocks_due_s = began_s + REPORT_PERIOD_S
            took_ms = round((asyncio.get_running_loop().time() - began_s) * 1_000)
            self._on_stocks(self.group.name, reply.stocks, took_ms)

    async def _send_all(self) -> None:
        def read(
            engine: Engine, turn: Turn
        ) -> Generator[None, None, tuple[int, pb.ConfigUpdate, SecurityPages]]:
            yield
            if self._instead_of is not None and self._home_life.is_elected:
                # A former master must not pass for a restored home: no replica confirms its record.
                engine.broker_groups.record_home_again(turn.now_ms)
            pages = SecurityPages(engine.catalog.security)
            return self._rounds.count, config_frames.complete_config(engine), pages

        self._is_behind = False
        round_number, config, pages = await self._rounds.call_slices(read)
        # The key of receipt handles belongs to this broker group alone.
        config.ClearField("handle_secret")
        self._membership.CopyFrom(config.membership)
        self._updates = [each for each in self._updates if each[0] >= round_number]
        self._updates_bytes = sum(update.ByteSize() for _, update in self._updates)
        has_more = pages.announce(config)
        await self.exchange(pb.FollowFrame(configs=[config]))
        # A log below their feature level may not have them. When it rises, all is sent again.
        while has_more and self._level >= SECURITY_LEVEL:
            page = pages.next_page()
            has_more = not page.is_security_complete
            await self.exchange(pb.FollowFrame(configs=[page]))
        self._rounds.engine.broker_groups.connected.add(self.group.name)
        self._routes.masters.accept_master(self.group.address, self.dialled)
        if self.reason:
            log.info("member connected", broker_group=self.group.name, address=self.dialled)
        self.reason = ""
        self._unanswered_since_s = None

    def _receive(self, encoded: bytes) -> None:
        reply = pb.FollowReply.FromString(encoded)
        if self.is_connected and reply.sequence == self._sequence:
            self._unanswered_since_s = None
        # The reply to an earlier frame may come after its caller was cancelled.
        if self._reply is not None and not self._reply.done() and reply.sequence == self._sequence:
            self._reply.set_result(reply)
