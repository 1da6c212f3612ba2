"""The home's side of its cluster: a connection to each member, over which it tells what it decides.

A member is told everything when it is connected, and from then on what changes: of a round when
that is committed, since what the home may still lose nobody else may have. One frame is under way
to a member at a time, and what changes meanwhile goes into the next one. A member that falls far
behind is told everything again.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from itertools import count
from typing import TYPE_CHECKING, Final, NamedTuple, final

import structlog
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from tidemill.broker.server.wire import config_frames, config_log
from tidemill.common.errors import BY_NAME, BrokerUnreachable, ServiceError, from_wire
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb
from tidemill.transport.grpc.status import RpcCode, RpcError
from tidemill.transport.http2.limits import Limits

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from tidemill.broker.engine.engine import Engine
    from tidemill.broker.engine.metadata.catalog import ConfigChanges
    from tidemill.broker.engine.metadata.membership import BrokerGroup
    from tidemill.broker.server.round.rounds import Rounds
    from tidemill.broker.server.round.turn import Turn
    from tidemill.transport.aio.connect import Connector, OpenStream

log = structlog.get_logger()

FOLLOW: Final = "/tidemill.broker.v1.BrokerHome/Follow"
# Rounds with changes that wait for a member; beyond it everything is told again, which is bounded
# by the limits of topics and groups.
UPDATES_MAX: Final = 256
# A member that was restarted is back within half a second, and should not be stale for a second.
RECONNECT_MAX_S: Final = 0.25
REFUSED_S: Final = 2.0  # until a member that refuses is asked again: somebody has to act
# Where a group at the latest begins is known to a member that is added so long after: the time in
# which messages may pass that group by, against a frame so often.
BEGUN_LOOK_S: Final = 1.0
CONNECT_TIMEOUT_S: Final = 2.0
REPLY_BYTES_MAX: Final = 64 << 10  # a reply is a few numbers, or an error
LIMITS: Final = Limits(keepalive_period_s=1.0, keepalive_timeout_s=5.0)


@final
class Follower:
    """The connection to one member."""

    def __init__(
        self,
        group: BrokerGroup,
        rounds: Rounds,
        connect: Connector,
        voice: Voice,
        on_left: Callable[[str], None],
    ) -> None:
        self.group = group
        self.reason = "no connection was tried yet"  # why it is not connected; "" means it is
        # What it said last of what is left there, and when; 0: it has said nothing yet.
        self.last_left = pb.Left()
        self.last_left_at_ms = 0
        self._voice = voice
        self._on_left = on_left
        self._instead_of: pb.Heard | None = None  # whom it has heard, of a log ahead of ours
        self._rounds = rounds
        self._connect = connect
        self._updates: list[tuple[int, pb.ConfigUpdate]] = []  # each with its round
        self._is_behind = False
        self._changed = asyncio.Event()
        self._asking = asyncio.Lock()
        self._stream: OpenStream | None = None
        self._reply: asyncio.Future[pb.FollowReply] | None = None
        self._asked = 0  # the sequence of the frame that it answers
        self._membership = pb.Membership()

    @property
    def is_connected(self) -> bool:
        """Whether it was told everything on the connection that there is."""
        return not self.reason

    def tell(self, round_number: int, update: pb.ConfigUpdate) -> None:
        """Tell what changed in a round."""
        if update.HasField("membership"):
            self._membership.CopyFrom(update.membership)
        if len(self._updates) == UPDATES_MAX:
            self._updates.clear()
            self._is_behind = True
        self._updates.append((round_number, update))
        self._changed.set()

    async def run(self) -> None:
        """Keep the member told until cancelled."""
        while True:
            try:
                wait_s = await self._keep_told()
            except Exception as error:
                # One member that nobody foresaw must not take the home down, and all with it.
                log.exception("telling a member failed", broker_group=self.group.name)
                self.reason = f"telling it failed: {error!r}"
                wait_s = REFUSED_S
            finally:
                self._rounds.engine.broker_groups.connected.discard(self.group.name)
            await asyncio.sleep(random.uniform(wait_s / 2, wait_s))

    async def ask(self, frame: pb.FollowFrame) -> pb.FollowReply:
        """Send one frame and return the reply; raises what the member refuses it with."""
        async with self._asking:
            if self._stream is None:
                raise BrokerUnreachable(f"{self.group.name} is not connected: {self.reason}")
            frame.membership.CopyFrom(self._membership)
            frame.member.CopyFrom(config_frames.member(self.group))
            frame.epoch = self._rounds.engine.log.epoch
            frame.life = self._voice.life
            if self._instead_of is not None:
                frame.instead_of.CopyFrom(self._instead_of)
            frame.sequence = self._asked = next(self._voice.sequences)
            self._reply = asyncio.get_running_loop().create_future()
            self._stream.write(frame.SerializeToString())
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
        if reply.begun:
            await self._note_begun(reply)
        return reply

    async def _note_begun(self, reply: pb.FollowReply) -> None:
        """Record what groups at the latest have begun there; all members are told by that."""
        begun = [(each.group_id, config_frames.read_begun(each.begun)) for each in reply.begun]

        def note(engine: Engine, turn: Turn) -> Generator[None, None, None]:
            yield from engine.following.note_begun(begun, turn.now_ms)

        await self._rounds.call_slices(note)

    def _note_older(self, heard: pb.Heard) -> None:
        """Take note that our store is older than what the member has heard of us."""
        log.error(
            "this home was restored from a backup: the member has heard more of it than it knows,"
            " and is told to forget that",
            broker_group=self.group.name,
            heard_epoch=heard.epoch,
            epoch=self._rounds.engine.log.epoch,
        )
        self._instead_of = heard

    async def count_left(self) -> pb.Left:
        """Return what is left there; raises what it refuses that with."""
        reply = await self.ask(pb.FollowFrame(count_left=True, readers=await self._readers()))
        self.last_left = reply.left
        self.last_left_at_ms = self._rounds.now_ms
        return reply.left

    async def leave(self) -> None:
        """Let the member forget what it was told; raises what it refuses that with."""
        frame = pb.FollowFrame(leave=True, readers=await self._readers())
        try:
            await self.ask(frame)
        finally:
            # It may have, also where its answer is lost. If it is taken back, that is told with
            # all the rest, and not before: until then it has left.
            self._is_behind = True

    async def _readers(self) -> list[pb.Reader]:
        """Return who reads what here: elsewhere that may not have been polled yet."""

        def read(engine: Engine, _turn: Turn) -> Generator[None, None, list[pb.Reader]]:
            readers = []
            for reader in config_frames.readers_frame(engine):
                readers.append(reader)
                yield
            return readers

        return await self._rounds.call_slices(read)

    # ------------------------------------------------------------ the connection

    async def _keep_told(self) -> float:
        """Serve one connection; return how long to wait before the next."""
        was_connected = False
        try:
            async with self._connect(
                self.group.address,
                LIMITS,
                message_bytes_max=REPLY_BYTES_MAX,
                timeout_s=CONNECT_TIMEOUT_S,
            ) as channel:
                stream = channel.open(FOLLOW, self._receive)
                self._stream = stream
                telling = asyncio.create_task(self._tell_all(), name=f"tell {self.group.name}")
                ending = asyncio.create_task(stream.ended(), name=f"end of {self.group.name}")
                try:
                    await asyncio.wait((telling, ending), return_when=asyncio.FIRST_COMPLETED)
                    was_connected = self.is_connected
                    if telling.done():
                        telling.result()
                    else:
                        ending.result()
                        raise RpcError(RpcCode.UNAVAILABLE, "the member ended the stream")
                finally:
                    await self._close(stream, telling, ending)
        except RpcError as error:
            self._note(str(error), was_connected=was_connected)
        except ServiceError as error:
            self._note(error.message, was_connected=was_connected)
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

    def _note(self, reason: str, *, was_connected: bool) -> None:
        if was_connected or reason != self.reason:
            log.warning(
                "member not connected",
                broker_group=self.group.name,
                address=self.group.address,
                reason=reason,
            )
        self.reason = reason

    async def _tell_all(self) -> None:
        """Tell everything, and then what changes, until the connection is lost."""
        is_behind = True
        while True:
            if is_behind:
                await self._tell_everything()
            self._changed.clear()
            if not self._updates and not self._is_behind:
                # What has begun there comes with a reply, so one is asked for now and then.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._look_period_s()):
                        await self._changed.wait()
            is_behind, self._is_behind = self._is_behind, False
            if not is_behind:
                updates, self._updates = self._updates, []
                await self.ask(pb.FollowFrame(configs=[update for _, update in updates]))

    def _look_period_s(self) -> float | None:
        groups = self._rounds.engine.catalog.groups.values()
        return BEGUN_LOOK_S if any(group.start_from_latest for group in groups) else None

    async def _tell_everything(self) -> None:
        def read(engine: Engine, turn: Turn) -> Generator[None, None, tuple[int, pb.ConfigUpdate]]:
            yield from engine.following.note_earlier(turn.now_ms)
            return self._rounds.count, config_frames.complete_config(engine, auto_create=False)

        self._is_behind = False
        round_number, config = await self._rounds.call_slices(read)
        # The key of receipt handles is nobody else's.
        config.ClearField("handle_secret")
        self._membership.CopyFrom(config.membership)
        self._updates = [each for each in self._updates if each[0] >= round_number]
        await self.ask(pb.FollowFrame(configs=[config]))
        self._rounds.engine.broker_groups.connected.add(self.group.name)
        if self.reason:
            log.info("member connected", broker_group=self.group.name, address=self.group.address)
        self.reason = ""

    def _receive(self, encoded: bytes) -> None:
        reply = pb.FollowReply.FromString(encoded)
        # Whoever asked for an earlier one may have given up waiting.
        if self._reply is not None and not self._reply.done() and reply.sequence == self._asked:
            self._reply.set_result(reply)


class Voice(NamedTuple):
    """Who speaks: what members tell the frames of this process from others by."""

    life: str
    sequences: Iterator[int]


@final
class Members:
    """All members but the home itself; none where this broker is no home."""

    def __init__(self, rounds: Rounds, connect: Connector, *, life: str) -> None:
        """Speak as `life`, a name that no other process of this broker has had."""
        self.followers: dict[str, Follower] = {}
        self._rounds = rounds
        self._connect = connect
        self._voice = Voice(life, count(1))
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ending: dict[str, asyncio.Task[None]] = {}
        self._group: asyncio.TaskGroup | None = None

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep all members told until the block ends."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            self._rounds.attach(self)
            waiting = None
            if self._rounds.is_master:
                self._look()
            else:
                waiting = group.create_task(self._look_as_master(), name="look for members")
            try:
                yield
            finally:
                if waiting is not None:
                    waiting.cancel()
                self._rounds.detach(self)
                self._group = None
                for task in (*self._tasks.values(), *self._ending.values()):
                    task.cancel()

    async def _look_as_master(self) -> None:
        await self._rounds.wait_until_master()
        self._look()

    def collect(self) -> Iterator[Metric]:
        """Yield which members have been told all there is to tell; none where this is no home."""
        connected = GaugeMetricFamily(
            "rocketmq_member_connected",
            "1 while this home has told the broker group all topics and groups, at this moment.",
            labels=("broker_group", "address"),
        )
        for name, follower in self.followers.items():
            connected.add_metric((name, follower.group.address), int(follower.is_connected))
        yield connected
        restores = CounterMetricFamily(
            "rocketmq_home_restores",
            "Times that the home came back with an older store; what it did not know was deleted.",
        )
        restores.add_metric((), self._rounds.engine.following.restored_count)
        yield restores

    def _look(self) -> None:
        """Begin with members that are new, and end with those that are gone."""
        if self._group is None:
            return
        engine = self._rounds.engine
        groups: dict[str, BrokerGroup] = {}
        if engine.broker_groups.is_home:
            groups = dict(engine.catalog.membership.groups)
            groups.pop(engine.catalog.broker_name, None)
        for name, follower in list(self.followers.items()):
            group = groups.get(name)
            if group is None or group.address != follower.group.address:
                self._tasks.pop(name).cancel()
                del self.followers[name]
            else:
                follower.group = group
        for name, group in groups.items():
            if name not in self.followers:
                follower = self.followers[name] = Follower(
                    group, self._rounds, self._connect, self._voice, self._has_left
                )
                self._tasks[name] = self._group.create_task(follower.run(), name=f"member {name}")

    def _has_left(self, name: str) -> None:
        """End the removal of a member that has done its part, and of which the home missed that."""
        if self._group is not None and name not in self._ending:
            self._ending[name] = self._group.create_task(
                self._end_removal(name), name=f"end {name}"
            )

    async def _end_removal(self, name: str) -> None:
        def remove(engine: Engine, turn: Turn) -> Generator[None, None, None]:
            engine.broker_groups.find_removable(name)
            yield from engine.broker_groups.remove(name, turn.now_ms)
            config_log.broker_group_removed(name, by="what the member has recorded of its removal")

        try:
            await self._rounds.call_slices(remove)
        except ServiceError as error:
            # It was taken back, or removed meanwhile; or the next frame asks for this again.
            log.info("no removal was ended", broker_group=name, reason=error.message)
        finally:
            del self._ending[name]

    def add_config_changes(self, changes: ConfigChanges) -> None:
        """Keep the changes of the round under way until it is committed."""
        if not self.followers and changes.membership is None:
            return
        effects = self._rounds.turn.effects
        effects[self] = _Committed(self, self._rounds.count, config_frames.changed_config(changes))

    def spread(self, round_number: int, update: pb.ConfigUpdate) -> None:
        """Tell every member of the changes of a round that is committed."""
        if update.HasField("membership"):
            self._look()
        for follower in self.followers.values():
            follower.tell(round_number, update)


class _Committed:
    """What the members are told of a round when it is committed."""

    def __init__(self, members: Members, round_number: int, update: pb.ConfigUpdate) -> None:
        self._members = members
        self._round_number = round_number
        self._update = update

    def release(self) -> Iterator[None]:
        self._members.spread(self._round_number, self._update)
        yield
