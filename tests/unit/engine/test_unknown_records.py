"""Records of a later program stop a start and a replica: to skip their news would lose them."""

from __future__ import annotations

import struct
from random import Random
from typing import NamedTuple
from zlib import crc32

import pytest

from tests.support.disk.faulty_disk import FaultyDisk
from tests.support.worlds.engine_world import SMALL, World, blob
from tidemill.broker.engine.layout import message, pop_checkpoint, renewal, timer_control
from tidemill.broker.engine.layout.numbers import QueueId, QueueOffset, TopicId
from tidemill.broker.engine.layout.record import RecordKind, UnknownRecord
from tidemill.broker.engine.layout.renewal import Renewal, RenewalReason
from tidemill.broker.engine.layout.timer_control import TimerControl, TimerOperation
from tidemill.broker.engine.store.segment import CorruptStore

PLACE = message.PLACE.pack(TopicId(1), QueueId(0), 0, QueueOffset(0))
CK_BODY = pop_checkpoint.BODY.pack(0, 1, 1, 0, 1, 0, 0, 0, 0, 1)
FLAGS_AT = 15  # of a CK


def ck(flags: int) -> bytes:
    body = bytearray(CK_BODY)
    body[FLAGS_AT] = flags
    return bytes(body) + bytes(64)


def timer(operation: int) -> bytes:
    return timer_control.encode(TimerControl(operation, 0, 0, 0))  # type: ignore[arg-type]  # any


def renewed(why: int) -> bytes:
    return struct.pack(">qBB", 0, why, 0)


class Unknown(NamedTuple):
    """A record that this program must not apply, and a part of the error."""

    kind: RecordKind
    body: bytes
    flags: int
    error: str


UNKNOWN = {
    **{
        f"message flag {bit}": Unknown(
            RecordKind.MESSAGE, PLACE + bytes(64), bit, f"MESSAGE record with flags {bit}"
        )
        for bit in (128, 512, 1 << 14)
    },
    "message with flags that exclude each other": Unknown(
        RecordKind.MESSAGE, PLACE + bytes(64), 16 | 4, "MESSAGE record with flags 20"
    ),
    "message with a known and an unknown flag": Unknown(
        RecordKind.MESSAGE, PLACE + bytes(64), 64 | 4, "MESSAGE record with flags 68"
    ),
    **{
        f"checkpoint flag {bit}": Unknown(RecordKind.CK, ck(bit), 0, f"CK record with flags {bit}")
        for bit in (16, 32, 64)
    },
    "checkpoint header": Unknown(RecordKind.CK, ck(0), 2, "CK record with flags 2 in its header"),
    "ack header": Unknown(RecordKind.ACK, b"", 4, "ACK record with flags 4 in its header"),
    "config header": Unknown(RecordKind.CONFIG, b"{}", 1, "CONFIG record with flags 1"),
    "timer size": Unknown(RecordKind.TIMER, timer(1) + b"0", 0, "TIMER record with 26 bytes"),
    "timer operation": Unknown(RecordKind.TIMER, timer(3), 0, "TIMER record with operation 3"),
    "renewal reason": Unknown(RecordKind.RENEW, renewed(7), 0, "RENEW record with reason 7"),
}


@pytest.mark.parametrize("unknown", UNKNOWN.values(), ids=UNKNOWN)
def test_a_record_with_unknown_news_stops_the_start(unknown: Unknown) -> None:
    world = World(FaultyDisk(Random(0)), config=SMALL)
    data = blob("m") if unknown.kind == RecordKind.MESSAGE else b""
    world.engine.log.append(unknown.kind, unknown.body, 0, unknown.flags, data, crc32(data))
    world.commit()
    with pytest.raises(CorruptStore, match=f"{unknown.error}.*later"):
        world.restart()


@pytest.mark.parametrize("unknown", UNKNOWN.values(), ids=UNKNOWN)
def test_a_replica_does_not_apply_a_record_with_unknown_news(unknown: Unknown) -> None:
    world = World(FaultyDisk(Random(0)), config=SMALL)
    log = world.engine.log
    data = blob("m") if unknown.kind == RecordKind.MESSAGE else b""
    at = log.append(unknown.kind, unknown.body, 0, unknown.flags, data, crc32(data))
    world.commit()
    with pytest.raises(UnknownRecord, match=unknown.error):
        world.engine.fold.apply(log.record_at(at))


def test_all_flags_and_operations_of_this_program_are_known() -> None:
    for flag in (1, 2, 4, 8, 128):
        assert pop_checkpoint.decode(ck(flag)).flags == flag
    for operation in TimerOperation:
        assert timer_control.decode(timer(operation)).operation == operation
    for why in RenewalReason:
        assert renewal.decode(renewed(why)) == Renewal(0, why, "", [])
