"""The messages between replicas: values of the engine and frames on the wire."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, assert_never

from tidemill.broker.engine.replication.epoch_journal import (
    CommonPrefix,
    Divergence,
    EpochEntry,
    FullCopy,
    LogExtent,
)
from tidemill.broker.engine.replication.messages import (
    Ack,
    Data,
    Digest,
    ForwardedView,
    Hello,
    MasterHeartbeat,
    Refusal,
    Welcome,
)
from tidemill.common.feature_level import read_level
from tidemill.stubs.tidemill.replication.v1 import replication_pb2 as pb
from tidemill.transport.grpc.status import RpcCode, RpcError
from tidemill.transport.replica_wire import from_member, from_view, to_member, to_view

if TYPE_CHECKING:
    from tidemill.broker.engine.replication.messages import ToMaster, ToReplica


class LogFloor(NamedTuple):
    """The begin of the master's log, before which replicas drop segments, and its state floor."""

    log_min: int
    confirm: int  # a replica drops segments only after it has applied the log up to here
    state_floor: int


class InvalidReplicaFrame(Exception):
    """A frame that this version does not know."""


def encode_to_replica(message: ToReplica | LogFloor) -> bytes:
    """Encode a message of a master."""
    match message:
        case Data():
            frame = pb.ToReplica(
                data=pb.Data(
                    epoch=message.epoch,
                    offset=message.offset,
                    data=bytes(message.data),
                    crc=message.crc,
                    confirm=message.confirm,
                    segment_start=message.segment_start,
                    segment_bytes=message.segment_bytes,
                    log_bytes=message.log_bytes,
                )
            )
        case LogFloor():
            frame = pb.ToReplica(floor=pb.Floor(**message._asdict()))
        case MasterHeartbeat(epoch, confirm):
            frame = pb.ToReplica(beat=pb.MasterHeartbeat(epoch=epoch, confirm=confirm))
        case ForwardedView(view):
            frame = pb.ToReplica(news=to_view(view))
        case Refusal(why, view):
            refusal = pb.Refusal(why=why, view=None if view is None else to_view(view))
            frame = pb.ToReplica(refusal=refusal)
        case Welcome():
            frame = pb.ToReplica(welcome=_to_welcome(message))
        case _:
            assert_never(message)
    return frame.SerializeToString()


def decode_to_replica(encoded: bytes) -> ToReplica | LogFloor:
    """Decode a message of a master. Raises SenselessFrame, DecodeError."""
    frame = pb.ToReplica.FromString(encoded)
    match frame.WhichOneof("message"):
        case "data":
            data = frame.data
            return Data(
                data.epoch,
                data.offset,
                data.data,
                data.crc,
                data.confirm,
                data.segment_start,
                data.segment_bytes,
                data.log_bytes,
            )
        case "beat":
            return MasterHeartbeat(frame.beat.epoch, frame.beat.confirm)
        case "floor":
            return LogFloor(frame.floor.log_min, frame.floor.confirm, frame.floor.state_floor)
        case "news":
            return ForwardedView(from_view(frame.news))
        case "refusal":
            refusal = frame.refusal
            return Refusal(
                refusal.why, from_view(refusal.view) if refusal.HasField("view") else None
            )
        case "welcome":
            return _from_welcome(frame.welcome)
        case _:
            raise InvalidReplicaFrame("unknown message from the master; is its version newer?")


def encode_to_master(message: ToMaster) -> bytes:
    """Encode a message of a replica."""
    match message:
        case Ack():
            frame = pb.ToMaster(
                ack=pb.Ack(
                    epoch=message.epoch,
                    member=to_member(message.member),
                    received_end=message.received_end,
                    durable_end=message.durable_end,
                    applied_end=message.applied_end,
                    is_slow=message.is_slow,
                )
            )
        case Hello():
            frame = pb.ToMaster(
                hello=pb.Hello(
                    group=message.group,
                    member=to_member(message.member),
                    store_uuid=message.store_uuid,
                    epoch_seen=message.epoch_seen,
                    version_seen=message.version_seen,
                    extent=_to_extent(message.extent),
                    durable_end=message.durable_end,
                    feature_level=message.feature_level,
                    is_full=message.is_full,
                )
            )
        case _:
            assert_never(message)
    return frame.SerializeToString()


def decode_to_master(encoded: bytes) -> ToMaster:
    """Decode a message of a replica. Raises SenselessFrame, DecodeError."""
    frame = pb.ToMaster.FromString(encoded)
    match frame.WhichOneof("message"):
        case "ack":
            ack = frame.ack
            return Ack(
                ack.epoch,
                from_member(ack.member),
                ack.received_end,
                ack.durable_end,
                ack.applied_end,
                ack.is_slow,
            )
        case "hello":
            hello = frame.hello
            return Hello(
                hello.group,
                from_member(hello.member),
                hello.store_uuid,
                hello.epoch_seen,
                hello.version_seen,
                _from_extent(hello.extent),
                hello.durable_end,
                hello.is_full,
                read_level(hello.feature_level),
            )
        case _:
            raise InvalidReplicaFrame("unknown message from a replica; is its version newer?")


def wrong_group(own: str, requested: str) -> RpcError:
    """Return the error for a request that names another broker group."""
    reason = f"this is a replica of {own}, not of {requested}; check the replica addresses"
    return RpcError(RpcCode.FAILED_PRECONDITION, reason)


def _to_welcome(message: Welcome) -> pb.Welcome:
    agreement = message.agreement
    welcome = pb.Welcome(
        epoch=message.epoch,
        master=to_member(message.master),
        digest=pb.Digest(
            begin=message.digest.begin, end=message.digest.end, crc=message.digest.crc
        ),
        extent=_to_extent(message.extent),
        confirm=message.confirm,
    )
    match agreement:
        case CommonPrefix(offset):
            welcome.cut = offset
        case FullCopy(log_min):
            welcome.copy_all_from = log_min
        case Divergence():
            raise AssertionError("a diverged replica is rejected")
        case _:
            assert_never(agreement)
    return welcome


def _from_welcome(found: pb.Welcome) -> Welcome:
    is_cut = found.WhichOneof("agreement") == "cut"
    return Welcome(
        found.epoch,
        from_member(found.master),
        CommonPrefix(found.cut) if is_cut else FullCopy(found.copy_all_from),
        Digest(found.digest.begin, found.digest.end, found.digest.crc),
        _from_extent(found.extent),
        found.confirm,
    )


def _to_extent(extent: LogExtent) -> pb.LogExtent:
    journal = [pb.EpochEntry(epoch=epoch, start=start) for epoch, start in extent.journal]
    return pb.LogExtent(
        journal=journal,
        log_min=extent.log_min,
        log_end=extent.log_end,
        state_floor=extent.state_floor,
    )


def _from_extent(found: pb.LogExtent) -> LogExtent:
    journal = tuple(EpochEntry(entry.epoch, entry.start) for entry in found.journal)
    return LogExtent(journal, found.log_min, found.log_end, found.state_floor)
