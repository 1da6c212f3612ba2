"""What is damaged in the log of one replica, from another that has it (ADR 0047).

    round loop  ── notes damage ──▶  DamagedRanges  ◀── questions, answers ──  Mender
    Mender      ── FetchRange ────▶  other replicas: whole records, checked, and confirmed
                ── mend ──────────▶  the log, in place; synced by the helper for background work

One question at a time: damage is rare, and what waits for it waits alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Final, final
from zlib import crc32

import structlog
from google.protobuf.message import DecodeError

from tidemill.broker.engine.layout.record import UnknownRecord
from tidemill.broker.engine.store.damaged_ranges import MendOutcome, MendRequest
from tidemill.broker.engine.store.mappings import PAGE_BYTES
from tidemill.broker.engine.store.mending import ForeignBytes, mend
from tidemill.stubs.tidemill.replication.v1 import replication_pb2 as pb
from tidemill.transport.grpc.status import RpcCode, RpcError
from tidemill.transport.http2.limits import Limits

if TYPE_CHECKING:
    from tidemill.broker.engine.replica.group_log import GroupLog
    from tidemill.broker.server.replicas.ports import LocalReplica
    from tidemill.broker.server.round.durability import Syncs
    from tidemill.common.clock import Clock
    from tidemill.transport.aio.call import RpcCall
    from tidemill.transport.aio.connect import Connector

log = structlog.get_logger()

FETCH_RANGE: Final = "/tidemill.replication.v1.Replication/FetchRange"
LOOK_S: Final = 0.1  # until it is looked whether damage was noted: a pop is not held by that
FETCH_TIMEOUT_S: Final = 5.0  # for one answer: a megabyte, or one record of at most 64
CONNECT_TIMEOUT_S: Final = 1.0
# Sent for one question, and a record more: a stretch of a large segment takes several.
FETCH_BYTES_MAX: Final = 1 << 20
RECORD_BYTES_MAX: Final = 64 << 20  # the largest that a broker takes, with what frames it
LIMITS: Final = Limits(
    stream_window_bytes=4 << 20,
    frame_bytes=1 << 20,
    large_messages_bytes=72 << 20,
    held_bytes_max=256 << 20,
)


class NothingThere(Exception):
    """A replica has no intact bytes of what it was asked for, or knows them not to be confirmed."""


async def serve_range(group: str, group_log: GroupLog, call: RpcCall) -> None:
    """Answer another replica: whole records, and at the end a range without bytes."""
    async for encoded in call:
        try:
            request = pb.FetchRangeRequest.FromString(encoded)
        except DecodeError as error:
            raise RpcError(RpcCode.INVALID_ARGUMENT, str(error)) from None
        if request.group != group:
            raise RpcError(RpcCode.FAILED_PRECONDITION, f"this is a replica of {group}")
        at = request.begin
        for data in served_pieces(group_log, request.begin, request.end):
            call.write(pb.Range(offset=at, data=data, crc=crc32(data)).SerializeToString())
            at += len(data)
            await call.drained()
        call.write(pb.Range(offset=at).SerializeToString())
        return


def served_pieces(group_log: GroupLog, begin: int, end: int) -> Iterator[bytes]:
    """Yield whole records from `begin` on, as many as are sent at most for one question.

    Up to the end of a page, since one that cannot be read is written whole.
    """
    at, stop = begin, min(max(end, begin + 1), begin + FETCH_BYTES_MAX)
    while at < stop:
        data = bytes(group_log.confirmed_frame_at(at, stop - at))
        if not data:
            return
        yield data
        at += len(data)
        stop = -(-max(stop, at) // PAGE_BYTES) * PAGE_BYTES


def served(group_log: GroupLog, begin: int, end: int) -> bytes:
    """Return all that is sent for one question."""
    return b"".join(served_pieces(group_log, begin, end))


async def fetch_range(connect: Connector, address: str, group: str, begin: int, end: int) -> bytes:
    """Return what a replica has from `begin` on. Raises NothingThere, RpcError, TimeoutError."""
    found = bytearray()
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def receive(encoded: bytes) -> None:
        if done.done():
            return
        try:
            part = pb.Range.FromString(encoded)
        except DecodeError as error:
            done.set_exception(RpcError(RpcCode.INTERNAL, str(error)))
            return
        is_next = part.offset == begin + len(found) and crc32(part.data) == part.crc
        if not part.data or not is_next:
            done.set_result(None)
            return
        found.extend(part.data)

    async with (
        asyncio.timeout(FETCH_TIMEOUT_S),
        connect(
            address,
            LIMITS,
            message_bytes_max=RECORD_BYTES_MAX + FETCH_BYTES_MAX,
            timeout_s=CONNECT_TIMEOUT_S,
        ) as channel,
    ):
        stream = channel.open(FETCH_RANGE, receive)
        request = pb.FetchRangeRequest(group=group, begin=begin, end=end)
        stream.write(request.SerializeToString())
        ended = asyncio.create_task(stream.ended())
        try:
            await asyncio.wait({done, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not done.done():
                ended.result()  # Raises what it has ended with.
        finally:
            ended.cancel()
            stream.cancel()
            await asyncio.gather(ended, return_exceptions=True)
    if done.done():
        done.result()
    if not found:
        raise NothingThere(f"nothing from log offset {begin} on")
    return bytes(found)


@final
class Mender:
    """Asks for what was noted, until it is cancelled."""

    def __init__(
        self,
        group: str,
        group_log: GroupLog,
        replica: LocalReplica,
        *,
        connect: Connector,
        syncs: Syncs,
        clock: Clock,
        wake: Callable[[], None],
    ) -> None:
        """`wake` lets the round loop look at what came of it."""
        self._group = group
        self._log = group_log.engine.log
        self._disk = group_log.engine.disk
        self._replica = replica
        self._connect = connect
        self._syncs = syncs
        self._clock = clock
        self._wake = wake
        self._log.damage.has_replicas = True

    async def run(self) -> None:
        """Mend what can be mended. Raises DiskFailed, which is final."""
        damage = self._log.damage
        while True:
            others = self._others()
            names = None if others is None else others.keys()
            damage.forget_before(self._log.min_offset)
            question = damage.next_request(names, self._clock.monotonic_ms())
            if damage.has_ended:
                self._wake()
            if question is None or others is None:
                await asyncio.sleep(LOOK_S)
                continue
            answer = await self._ask(question, others)
            damage.handle_outcome(question, answer, self._clock.monotonic_ms())

    def _others(self) -> Mapping[int, str] | None:
        """Return where the other replicas are; None: nobody has said so yet."""
        view = self._replica.view
        if view is None:
            return None
        me = self._replica.me.replica_id
        return {number: address for number, address in view.addresses if number != me}

    async def _ask(self, question: MendRequest, others: Mapping[int, str]) -> MendOutcome:
        tell = log.bind(replica=question.replica_id, log_offset=question.begin, end=question.end)
        try:
            data = await fetch_range(
                self._connect,
                others[question.replica_id],
                self._group,
                question.begin,
                question.end,
            )
            written = await self._mend(question, data)
        except (RpcError, TimeoutError) as error:
            tell.debug("a replica cannot be asked for what is damaged here", reason=str(error))
            return MendOutcome.SILENT
        except (NothingThere, ForeignBytes, UnknownRecord) as error:
            tell.warning("a replica has not what is damaged here", reason=str(error))
            return MendOutcome.NOTHING
        except LookupError:
            return MendOutcome.SOUND  # Retention took it meanwhile.
        if not written:
            return MendOutcome.SOUND
        tell.warning("the log was damaged, and is mended from a replica")
        return MendOutcome.MENDED

    async def _mend(self, question: MendRequest, data: bytes) -> bool:
        """Write what a replica has sent; whether anything differed."""
        is_written = False
        steps = mend(self._log, self._disk, question.begin, data)
        try:
            for files in steps:
                if files:
                    await self._syncs.sync(files)
                    is_written = True
                else:
                    await asyncio.sleep(0)
        finally:
            steps.close()
        return is_written
