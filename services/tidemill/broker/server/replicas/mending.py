"""Mending of a damaged log: intact bytes come from another replica (ADR 0047).

    round loop  ── damage ─────▶  DamagedRanges  ◀── requests, outcomes ──  Mender
    Mender      ── FetchRange ─▶  other replicas: whole records, checked and confirmed
                ── mend ───────▶  the log, in place; the background sync process syncs it

The mender sends one request at a time: damage is rare, and only readers of the damaged records
wait.
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
from tidemill.broker.engine.store.segment import LogDamaged
from tidemill.broker.server.replicas.frames import wrong_group
from tidemill.stubs.tidemill.replication.v1 import replication_pb2 as pb
from tidemill.transport.grpc.status import RpcCode, RpcError
from tidemill.transport.http2.limits import Limits

if TYPE_CHECKING:
    from tidemill.broker.engine.replica.replica_engine import ReplicaEngine
    from tidemill.broker.server.replicas.ports import LocalReplica
    from tidemill.broker.server.round.durability import Syncs
    from tidemill.common.clock import Clock
    from tidemill.transport.aio.call import RpcCall
    from tidemill.transport.aio.connect import Connector

log = structlog.get_logger()

FETCH_RANGE: Final = "/tidemill.replication.v1.Replication/FetchRange"
LOOK_S: Final = 0.1  # period of the look for new damage
FETCH_TIMEOUT_S: Final = 5.0  # for one answer: 1 MiB, or one record of at most 64 MiB
CONNECT_TIMEOUT_S: Final = 1.0
# Bytes of one answer, which may end with one more record. A large range takes several requests.
FETCH_BYTES_MAX: Final = 1 << 20
RECORD_BYTES_MAX: Final = 64 << 20  # the largest record of a broker, with its header
LIMITS: Final = Limits(
    stream_window_bytes=4 << 20,
    frame_bytes=1 << 20,
    large_messages_bytes=72 << 20,
    held_bytes_max=256 << 20,
)


class RangeMissing(Exception):
    """A replica does not have the requested bytes intact and confirmed."""


async def serve_range(group: str, replica_engine: ReplicaEngine, call: RpcCall) -> None:
    """Send whole records to another replica, and an empty range as the end."""
    async for encoded in call:
        try:
            request = pb.FetchRangeRequest.FromString(encoded)
        except DecodeError as error:
            raise RpcError(RpcCode.INVALID_ARGUMENT, str(error)) from None
        if request.group != group:
            raise wrong_group(group, request.group)
        at = request.begin
        for data in served_pieces(replica_engine, request.begin, request.end):
            call.write(pb.Range(offset=at, data=data, crc=crc32(data)).SerializeToString())
            at += len(data)
            await call.wait_drained()
        call.write(pb.Range(offset=at).SerializeToString())
        return


def served_pieces(replica_engine: ReplicaEngine, begin: int, end: int) -> Iterator[bytes]:
    """Yield the whole records of one answer, from `begin` on.

    The answer reaches the end of a page, because an unreadable page is mended as a whole. Raises
    RpcError while the directory of the pack is derived: the records may be intact.
    """
    damage = replica_engine.engine.log.damage
    at, stop = begin, min(max(end, begin + 1), begin + FETCH_BYTES_MAX)
    while at < stop:
        data = bytes(
            replica_engine.frames.read_confirmed(
                at, stop - at, confirm_offset=replica_engine.confirm_offset
            )
        )
        if not data and at == begin and damage.awaits_directory(at):
            raise RpcError(RpcCode.UNAVAILABLE, "the directory of the pack is being derived")
        if not data:
            return
        yield data
        at += len(data)
        stop = -(-max(stop, at) // PAGE_BYTES) * PAGE_BYTES


def served(replica_engine: ReplicaEngine, begin: int, end: int) -> bytes:
    """Return the bytes of one answer."""
    return b"".join(served_pieces(replica_engine, begin, end))


async def fetch_range(connect: Connector, address: str, group: str, begin: int, end: int) -> bytes:
    """Return a replica's records from `begin` on. Raises RangeMissing, RpcError, TimeoutError."""
    fetched = bytearray()
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def receive(encoded: bytes) -> None:
        if done.done():
            return
        try:
            part = pb.Range.FromString(encoded)
        except DecodeError as error:
            done.set_exception(RpcError(RpcCode.INTERNAL, str(error)))
            return
        is_next = part.offset == begin + len(fetched) and crc32(part.data) == part.crc
        if not part.data or not is_next:
            done.set_result(None)
            return
        fetched.extend(part.data)

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
        ended = asyncio.create_task(stream.wait_ended())
        try:
            await asyncio.wait({done, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not done.done():
                ended.result()  # Raises the error of the stream.
        finally:
            ended.cancel()
            stream.cancel()
            await asyncio.gather(ended, return_exceptions=True)
    if done.done():
        done.result()
    if not fetched:
        raise RangeMissing(f"no intact, confirmed record at log offset {begin}")
    return bytes(fetched)


@final
class Mender:
    """The task that fetches damaged records from other replicas and mends them."""

    def __init__(
        self,
        group: str,
        replica_engine: ReplicaEngine,
        replica: LocalReplica,
        *,
        connect: Connector,
        syncs: Syncs,
        clock: Clock,
        wake: Callable[[], None],
    ) -> None:
        """Call `wake` when the round loop can use the outcome."""
        self._group = group
        self._log = replica_engine.engine.log
        self._disk = replica_engine.engine.disk
        self._replica = replica
        self._connect = connect
        self._syncs = syncs
        self._clock = clock
        self._wake = wake
        self._log.damage.has_replicas = True

    async def run(self) -> None:
        """Mend damaged ranges until cancelled. Raises DiskFailed, which is final."""
        damage = self._log.damage
        while True:
            others = self._others()
            names = None if others is None else others.keys()
            damage.forget_before(self._log.min_offset)
            request = damage.next_request(names, self._clock.monotonic_ms())
            if damage.has_ended:
                self._wake()
            if request is None or others is None:
                await asyncio.sleep(LOOK_S)
                continue
            outcome = await self._fetch(request, others)
            damage.handle_outcome(request, outcome, self._clock.monotonic_ms())

    def _others(self) -> Mapping[int, str] | None:
        """Return the addresses of the other replicas; None before the first view."""
        view = self._replica.view
        if view is None:
            return None
        me = self._replica.me.replica_id
        return {number: address for number, address in view.addresses if number != me}

    async def _fetch(self, request: MendRequest, others: Mapping[int, str]) -> MendOutcome:
        range_log = log.bind(replica=request.replica_id, log_offset=request.begin, end=request.end)
        try:
            data = await fetch_range(
                self._connect, others[request.replica_id], self._group, request.begin, request.end
            )
            written = await self._mend(request, data)
        except (RpcError, TimeoutError) as error:
            range_log.debug("replica unreachable for mending", reason=str(error))
            return MendOutcome.SILENT
        except (RangeMissing, ForeignBytes, UnknownRecord) as error:
            range_log.warning("replica does not have the damaged records", reason=str(error))
            return MendOutcome.NOTHING
        except LogDamaged:
            return MendOutcome.SILENT  # The directory of the pack is derived first.
        except LookupError:
            return MendOutcome.SOUND  # Retention has deleted it.
        if not written:
            return MendOutcome.SOUND
        range_log.warning("log mended from a replica")
        return MendOutcome.MENDED

    async def _mend(self, request: MendRequest, data: bytes) -> bool:
        """Write the bytes of a replica; return False if the log already had them."""
        is_written = False
        steps = mend(self._log, self._disk, request.begin, data)
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
