"""ProxyLink: the stream of one proxy.

Each request frame is work of the next round. The replies of a round are one `LinkReplies`, and are
sent as a few frames when the round is committed. While the proxy does not read its replies, its
requests are not read either. `UNSENT_BYTES_MAX` and the replies of the rounds in flight, which
`UNSENT_POPS_BYTES_MAX` limits, therefore bound the memory of a link.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from itertools import islice, zip_longest
from typing import TYPE_CHECKING, final

from google.protobuf.message import DecodeError

from tidemill.broker.engine.layout.numbers import GroupId, TopicId
from tidemill.broker.engine.metadata.security_items import MODE_KEY, SECURITY_LEVEL
from tidemill.broker.server.link.commands import COMMANDS, FrameContext, ReplySource
from tidemill.broker.server.link.link_states import TRANSITIONS, ProxyLinkEvent, ProxyLinkState
from tidemill.broker.server.link.pops import POP, LinkPops
from tidemill.broker.server.link.replies import LinkReplies
from tidemill.broker.server.link.reply_frames import build_frames
from tidemill.broker.server.link.security_stream import SecurityStream
from tidemill.broker.server.round.round_log import log_frame
from tidemill.broker.server.wire.config_frames import changed_config, complete_config
from tidemill.common.feature_level import FIRST_LEVEL, read_level
from tidemill.common.log import LEVEL
from tidemill.message.client_key import NO_OWNER, ClientKey
from tidemill.security.table import Mode, SecurityTable
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb
from tidemill.transport.grpc.status import RpcCode, RpcError

if TYPE_CHECKING:
    from tidemill.broker.engine.metadata.catalog import ConfigChanges
    from tidemill.broker.metrics.traffic import Traffic
    from tidemill.broker.server.link.pops import ReplyStream
    from tidemill.broker.server.round.rounds import Rounds
    from tidemill.broker.server.round.turn import Turn

UNSENT_BYTES_MAX = 16 << 20  # replies that a proxy has not read; beyond it its requests wait
SLICE_HANDED_OVER = 256  # hand-overs noted in one slice: a millisecond if each is recorded
REPLY_FRAME_BYTES = 256 << 10  # a reply frame is closed when it passes this


@final
class ProxyLink:
    """One proxy's stream, as the rounds see it."""

    def __init__(
        self,
        rounds: Rounds,
        traffic: Traffic,
        stream: ReplyStream,
        *,
        newest: dict[bytes, ProxyLink],
    ) -> None:
        """Serve a stream; `newest` has the newest link of each process of a proxy."""
        self._rounds = rounds
        self._traffic = traffic
        self._stream = stream
        self._newest = newest
        self._state = ProxyLinkState.OPENED
        self._source = ReplySource(rounds.engine, traffic)
        self._process_id = b""  # of the process that opened the stream
        self._level = 0  # feature level of the proxy; 0: its first frame has not arrived
        self.pops = LinkPops(rounds, stream, lambda: self.replies)
        self.security = SecurityStream(stream, self._send_update)
        self.stream_number = 0  # counts the streams of that process
        self.epoch = 0  # of this master; 0 without replicas
        self.is_refused = asyncio.Event()  # the proxy is too old for the security mode

    @property
    def replies(self) -> LinkReplies:
        """The link's replies of the current round."""
        turn = self._rounds.turn
        replies = turn.effects.get(self)
        if replies is None:
            replies = turn.effects[self] = LinkReplies(self._send, turn.times)
        assert isinstance(replies, LinkReplies), "a link has no other effects"
        return replies

    # ------------------------------------------------------------ the stream

    async def read(self, requests: AsyncIterator[bytes]) -> None:
        """Submit each frame until the proxy ends its side.

        Raises RpcError(INVALID_ARGUMENT) for an invalid frame.
        """
        await self._rounds.submit(_Greeting(self))
        async for request in requests:
            frame = _parse(request)
            if self._stream.unsent_bytes >= UNSENT_BYTES_MAX:
                await self._stream.wait_drained()
            await self._rounds.submit(_FrameWork(self, frame, len(request)))

    async def flush(self) -> None:
        """Wait until everything submitted so far is answered and written."""
        await self._rounds.settle()
        await self._stream.wait_drained()

    def end(self) -> None:
        """Send nothing more: the stream has ended."""
        self._advance(ProxyLinkEvent.END)

    def _advance(self, event: ProxyLinkEvent) -> None:
        state = TRANSITIONS.get((self._state, event))
        assert state is not None, f"a link that is {self._state} cannot {event}"
        was_closed, self._state = self._state is ProxyLinkState.CLOSED, state
        if state is ProxyLinkState.CLOSED and not was_closed:
            self.pops.close()

    # ------------------------------------------------------------ in a round

    def greet(self, turn: Turn) -> None:
        """Send the complete configuration now, and each change from now on."""
        self._advance(ProxyLinkEvent.GREET)
        if self._state is ProxyLinkState.SERVED:
            config = complete_config(turn.engine)
            self.security.begin(turn.engine.catalog.security, config)
            self.replies.configs = [config]
            self._rounds.attach(self)
            if why := turn.engine.commands.why_unconfirmed:
                self.note_rejection(why)

    def add_config_changes(self, changes: ConfigChanges) -> None:
        """Add the changes to the link's replies of the current round."""
        if changes.has_config:
            self.replies.configs.append(changed_config(changes))
        if MODE_KEY in changes.security_items and self._level:
            self._check_level(self._rounds.turn)
        if changes.has_security:
            self.replies.security = changes.security_items, changes.security_version

    def note_rejection(self, why: str) -> None:
        """Report to the proxy why messages are rejected from now on."""
        if self._state is ProxyLinkState.SERVED:
            frame = pb.ReplyFrame(sends_rejected=why, epoch=self.epoch).SerializeToString()
            self._stream.write(frame)
            self.pops.note_written(len(frame), [])

    def remove(self, turn: Turn) -> None:
        """Let the rounds forget a link whose stream has ended."""
        self._advance(ProxyLinkEvent.REMOVE)
        turn.polls.forget(self.pops)
        self._rounds.detach(self)
        if self._newest.get(self._process_id) is self:
            del self._newest[self._process_id]

    def apply(self, frame: pb.RequestFrame, arrived_s: float, turn: Turn) -> Iterator[None]:
        """Call the engine for each request of `frame`, which arrived at `arrived_s`."""
        if frame.process_id:
            self._introduce(frame, turn)
            return
        if not self._level and self._state is ProxyLinkState.SERVED:
            self._level = FIRST_LEVEL
            self._check_level(turn)
        if self._state is not ProxyLinkState.SERVED:
            # Its appends, too: their outcome is unknown to the sender, which may repeat them.
            return
        replies = self.replies
        replies.answered_sequence = frame.sequence
        replies.arrived_s = min(replies.arrived_s, arrived_s)
        if frame.alive_clients:
            renewals = turn.engine.consumption.renewals
            alive = _clients(frame.alive_clients, frame.alive_owners)
            renewals.note_alive(alive, monotonic_ms=turn.monotonic_ms)
            yield
        if frame.HasField("subscribed"):
            note = turn.engine.state.index.reported_subscriptions.note
            columns = frame.subscribed.group_ids, frame.subscribed.topic_ids
            for group_id, topic_id in zip(*columns, strict=True):
                note(GroupId(group_id), TopicId(topic_id))
            yield
        requested = {field.name: requests for field, requests in frame.ListFields()}
        if LEVEL.is_debug:
            log_frame(frame, requested)
        repeated_ids = frozenset(frame.repeated_ids)
        context = FrameContext(turn, replies, self.pops, self._traffic, arrived_s, repeated_ids)
        for command in COMMANDS:
            requests = requested.get(command.request_field)
            if requests is not None:
                yield from command.apply(context, replies.of(command.name), requests)
        if frame.HasField("handed_over"):
            handed_over = zip(frame.handed_over.slots, frame.handed_over.delivery_ids, strict=True)
            while part := list(islice(handed_over, SLICE_HANDED_OVER)):
                turn.engine.consumption.renewals.confirm_handovers(part, now_ms=turn.now_ms)
                yield
        for request_id in frame.cancelled_polls:
            turn.polls.cancel(self.pops, request_id)
        if frame.disconnected_clients:
            turn.engine.commands.disconnect_clients(
                _clients(frame.disconnected_clients, frame.disconnected_owners),
                monotonic_ms=turn.monotonic_ms,
            )
        if frame.ended_clients:
            # After the last acks of such a client, which may be in the same frame.
            turn.engine.commands.end_clients(_clients(frame.ended_clients, frame.ended_owners))
        for lost in frame.revoked:
            client = ClientKey(lost.client_id, lost.owner)
            turn.engine.commands.revoke_deliveries(client, group=lost.group, topic=lost.topic)

    def _introduce(self, frame: pb.RequestFrame, turn: Turn) -> None:
        """Learn which process opened the stream, and close all its streams but the newest.

        A proxy repeats the requests of a lost stream on the next one.
        """
        if self._newest.get(self._process_id) is self:
            del self._newest[self._process_id]  # It may name another process now.
        self._process_id, self.stream_number = frame.process_id, frame.stream_number
        other = self._newest.get(frame.process_id, self)
        older, newer = sorted((other, self), key=lambda link: link.stream_number)
        self._newest[frame.process_id] = newer
        if older is not newer:
            older.replace(turn)
        self._level = read_level(frame.feature_level)
        self._check_level(turn)

    def _check_level(self, turn: Turn) -> None:
        """Refuse a proxy that checks no rights, unless the security mode is off."""
        if self._level >= SECURITY_LEVEL:
            return
        items = turn.engine.catalog.security
        table = SecurityTable(lambda kind, name: items.find((kind, name)))
        if table.recorded_mode is not Mode.OFF:
            self.refuse(turn)

    def refuse(self, turn: Turn) -> None:
        """Send nothing more: the proxy is too old."""
        self._advance(ProxyLinkEvent.REFUSE)
        turn.polls.forget(self.pops)
        self.is_refused.set()

    def refusal(self) -> RpcError:
        """Return the error for a refused proxy."""
        return RpcError(
            RpcCode.FAILED_PRECONDITION,
            f"this proxy has feature level {self._level} and checks no rights; the security mode"
            f" needs {SECURITY_LEVEL}: upgrade the proxy",
        )

    def replace(self, turn: Turn) -> None:
        """Send nothing more: the proxy has a newer stream."""
        self._advance(ProxyLinkEvent.REPLACE)
        turn.polls.forget(self.pops)

    # ------------------------------------------------------------ after a round

    def _send(self, replies: LinkReplies) -> Iterator[None]:
        """Build and send the reply frames of a committed round; yield after each."""
        results, sent_count = replies.results.get(POP, []), 0
        if replies.security is not None:
            replies.configs += self.security.render(*replies.security)
        for frame in build_frames(
            replies, self._source, epoch=self.epoch, size_max=REPLY_FRAME_BYTES
        ):
            if self._state is not ProxyLinkState.SERVED:
                self.pops.give_back(results[sent_count:])
                break
            if encoded := frame.SerializeToString():
                self._stream.write(encoded)
            pop_count = len(frame.pops)
            self.pops.note_written(len(encoded), results[sent_count : sent_count + pop_count])
            sent_count += pop_count
            yield
        self.pops.note_replies_written(replies)
        if replies.configs:
            self.security.begin_pages()

    def _send_update(self, update: pb.ConfigUpdate) -> bool:
        """Send a configuration update; return False if the link has ended."""
        if self._state is not ProxyLinkState.SERVED:
            return False
        encoded = pb.ReplyFrame(config=update, epoch=self.epoch).SerializeToString()
        self._stream.write(encoded)
        self.pops.note_written(len(encoded), [])
        return True


@final
class _FrameWork:
    """Work that applies one request frame."""

    __slots__ = ("_arrived_s", "_frame", "_link", "size_bytes")

    def __init__(self, link: ProxyLink, frame: pb.RequestFrame, size_bytes: int) -> None:
        self._link = link
        self._frame = frame
        self._arrived_s = time.monotonic()
        self.size_bytes = size_bytes

    def apply(self, turn: Turn) -> Iterator[None]:
        return self._link.apply(self._frame, self._arrived_s, turn)


@final
class _Greeting:
    """Work that greets a new link."""

    size_bytes = 0

    def __init__(self, link: ProxyLink) -> None:
        self._link = link

    def apply(self, turn: Turn) -> Iterator[None]:
        self._link.greet(turn)
        yield


@final
class LinkRemoval:
    """Work that removes an ended link: between the slices of a round, its polls may be in use."""

    size_bytes = 0

    def __init__(self, link: ProxyLink) -> None:
        self._link = link

    def apply(self, turn: Turn) -> Iterator[None]:
        """Remove the link."""
        self._link.remove(turn)
        yield


def _parse(request: bytes) -> pb.RequestFrame:
    try:
        frame = pb.RequestFrame.FromString(request)
    except DecodeError:
        raise RpcError(RpcCode.INVALID_ARGUMENT, "the message is not a RequestFrame") from None
    handed_over = frame.handed_over
    subscribed = frame.subscribed
    if (
        not _columns_agree(frame)
        or len(handed_over.slots) != len(handed_over.delivery_ids)
        or len(subscribed.group_ids) != len(subscribed.topic_ids)
    ):
        raise RpcError(RpcCode.INVALID_ARGUMENT, "the columns of a batch have different lengths")
    return frame


def _columns_agree(frame: pb.RequestFrame) -> bool:
    for command in COMMANDS:
        if command.columns is not None:
            columns = command.columns(getattr(frame, command.request_field))
            if len(set(map(len, columns))) > 1:
                return False
    reports = (
        (frame.alive_clients, frame.alive_owners),
        (frame.ended_clients, frame.ended_owners),
        (frame.disconnected_clients, frame.disconnected_owners),
    )
    return all(len(owners) in (0, len(client_ids)) for client_ids, owners in reports)


def _clients(client_ids: Iterable[str], owners: Iterable[int]) -> Iterator[ClientKey]:
    return map(ClientKey._make, zip_longest(client_ids, owners, fillvalue=NO_OWNER))
