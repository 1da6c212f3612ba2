"""The body of a CK record: one pop checkpoint, a batch of one queue delivered to a group.

     0          4              8              12             14         15      16
    ┌──────────┬──────────────┬──────────────┬──────────────┬──────────┬───────┬───────────────┐
    │ slot u32 │ group_id u32 │ topic_id u32 │ queue_id u16 │ count u8 │ flags │ revive_queue  │
    │          │              │              │              │          │ u8    │ u8            │
    └──────────┴──────────────┴──────────────┴──────────────┴──────────┴───────┴───────────────┘
     17                 25                   33                41
    ┌──────────────────┬────────────────────┬─────────────────┬─────────────────────────────────┐
    │ start_offset i64 │ visible_at_ms  i64 │ next_offset i64 │ optional parts, in this order   │
    └──────────────────┴────────────────────┴─────────────────┴─────────────────────────────────┘

    GAPS         count x u32: each message's queue offset minus start_offset; else contiguous
    SUPERSEDES   slot u32, delivery_id i64, index u8 of the delivery that this one replaces
    ORDERED      count x u16: attempt of each message; then u8 size and the attempt id
    HOLDER       bits u8 (1 RENEWS: the broker renews it; 2 OWNER), u8 size, then the id of the
                 client; with OWNER, which is of feature level 3, u32 owner id

Field names of the reference's PopCheckPoint: startOffset, popTime (the record's stored_at_ms),
invisibleTime (visible_at_ms - popTime), num (count), queueId, topic, cid (group), queueOffsetDiff
(GAPS). The id of the delivery is the log offset of this record. The revive queue is hash(topic,
group, queue) mod 8.

A CK that supersedes may have the flag GIVEN_BACK in its record header. Either the message returns
earlier than announced, or its client chose a time for a delivery that the broker renews. Only
readers of the log use this flag.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from tidemill.broker.engine.layout.numbers import DeliverySlot, GroupId, QueueId, TopicId
from tidemill.broker.engine.layout.record import UnknownRecord
from tidemill.message.client_key import NO_OWNER, ClientKey

GIVEN_BACK = 1  # flag of the record header
FLAG_GAPS = 1
FLAG_SUPERSEDES = 2
FLAG_ORDERED = 4
FLAG_SUSPEND = 8  # this delivery does not count as an attempt
# Not in a CK: flag of a row of a delivery that an operator has released (`delivery_rows`).
FLAG_RELEASED = 16
# Not in a CK: after a start it is unknown whether the client has the delivery, so the broker does
# not renew it.
FLAG_UNPROVEN = 32
# Not in a CK: the broker gave the delivery back, maybe before its handles ended, because its client
# ended or was silent.
FLAG_RETURNED = 64
FLAG_HOLDER = 128
FLAGS_KNOWN = FLAG_GAPS | FLAG_SUPERSEDES | FLAG_ORDERED | FLAG_SUSPEND | FLAG_HOLDER
# In rows and in the table, which store the holder elsewhere.
FLAG_RENEWS = 128
HOLDER_RENEWS = 1  # bits of HOLDER
HOLDER_OWNER = 2
HOLDER_KNOWN = HOLDER_RENEWS | HOLDER_OWNER
OWNER = struct.Struct(">I")
HOLDER_BYTES_MAX = 255  # its size is one byte
HOLDERS_KEPT = 1_024  # encoded holders in the cache, since a client pops often
BODY = struct.Struct(">IIIHBBBqqq")
BODY_SIZE = 41
SUPERSEDED = struct.Struct(">IqB")
assert BODY.size == BODY_SIZE, "part of the disk format"
REVIVE_QUEUES = 8
ATTEMPT_ID_BYTES_MAX = 255  # its size is one byte
MESSAGES_MAX = 32  # messages of one checkpoint: its bits fit one u32
GAPS = [struct.Struct(f">{n}I") for n in range(MESSAGES_MAX + 1)]
_NO_PARTS = (None, None, None, "", "", False, NO_OWNER)
# Make a named tuple without a call of Python code: a start decodes millions of records.
_tuple = tuple.__new__
ATTEMPTS = [struct.Struct(f">{n}H") for n in range(MESSAGES_MAX + 1)]


class PopCheckpoint(NamedTuple):
    """A CK record's body, decoded."""

    slot: DeliverySlot
    group_id: GroupId
    topic_id: TopicId
    queue_id: QueueId
    num: int
    flags: int
    revive_queue: int
    start_offset: int
    visible_at_ms: int
    next_offset: int
    gaps: tuple[int, ...] | None
    superseded: tuple[int, int, int] | None
    attempts: tuple[int, ...] | None
    attempt_id: str
    client_id: str = ""  # of the holder; empty without HOLDER
    renews: bool = False
    owner: int = NO_OWNER  # of the holder

    @property
    def offsets(self) -> Sequence[int]:
        """Queue offset of each message."""
        if self.gaps is None:
            return range(self.start_offset, self.start_offset + self.num)
        return [self.start_offset + gap for gap in self.gaps]


def revive_queue_of(topic_id: TopicId, group_id: GroupId, queue_id: QueueId) -> int:
    """Return the revive queue of a (topic, group, queue). It never changes."""
    return (topic_id * 31 + group_id * 17 + queue_id) % REVIVE_QUEUES


def is_counted(flags: int) -> bool:
    """Return whether an ordered delivery counts as an attempt when it begins.

    This is a delivery by which a client replaces another one. A batch counts when it ends.
    """
    return flags & (FLAG_SUPERSEDES | FLAG_SUSPEND) == FLAG_SUPERSEDES


def encode(ck: PopCheckpoint) -> bytes:
    """Encode the body of a CK record. `flags` select the optional parts."""
    body = BODY.pack(*ck[:10])
    if not ck.flags:
        return body
    if ck.gaps is not None:
        body += GAPS[ck.num].pack(*ck.gaps)
    if ck.superseded is not None:
        body += SUPERSEDED.pack(*ck.superseded)
    if ck.attempts is not None:
        attempt_id = ck.attempt_id.encode()
        assert len(attempt_id) <= ATTEMPT_ID_BYTES_MAX, "the engine refuses longer ones"
        body += ATTEMPTS[ck.num].pack(*ck.attempts) + bytes([len(attempt_id)]) + attempt_id
    if ck.flags & FLAG_HOLDER:
        body += _holder(ck.client_id, ck.renews, ck.owner)
    return body


@lru_cache(HOLDERS_KEPT)
def _holder(client_id: str, renews: bool, owner: int) -> bytes:
    encoded = client_id.encode()
    assert len(encoded) <= HOLDER_BYTES_MAX, "the engine cuts longer ones"
    bits = HOLDER_RENEWS if renews else 0
    if owner == NO_OWNER:
        return bytes([bits, len(encoded)]) + encoded
    return bytes([bits | HOLDER_OWNER, len(encoded)]) + encoded + OWNER.pack(owner)


def cut_client(client: ClientKey) -> ClientKey:
    """Cut the id of a client to the size limit of a CK, in whole characters."""
    encoded = client.client_id.encode(errors="replace")
    if len(encoded) <= HOLDER_BYTES_MAX:
        return client
    return client._replace(client_id=str(encoded[:HOLDER_BYTES_MAX], "utf-8", "ignore"))


def decode(body: bytes | memoryview) -> PopCheckpoint:
    """Decode a CK record's body. Raises UnknownRecord."""
    fixed = BODY.unpack_from(body)
    count, flags = fixed[4], fixed[5]
    if not flags:
        return _tuple(PopCheckpoint, fixed + _NO_PARTS)
    if flags & ~FLAGS_KNOWN:
        raise UnknownRecord(f"CK record with flags {flags}")
    at = BODY_SIZE
    gaps = superseded = attempts = None
    attempt_id = client_id = ""
    renews, owner = False, NO_OWNER
    if flags & FLAG_GAPS:
        gaps = GAPS[count].unpack_from(body, at)
        at += 4 * count
    if flags & FLAG_SUPERSEDES:
        superseded = SUPERSEDED.unpack_from(body, at)
        at += SUPERSEDED.size
    if flags & FLAG_ORDERED:
        attempts = ATTEMPTS[count].unpack_from(body, at)
        at += 2 * count
        end = at + 1 + body[at]
        attempt_id = str(body[at + 1 : end], "utf-8", "replace")
        at = end
    if flags & FLAG_HOLDER:
        bits, end = body[at], at + 2 + body[at + 1]
        if bits & ~HOLDER_KNOWN:
            raise UnknownRecord(f"CK record with holder bits {bits}")
        renews = bool(bits & HOLDER_RENEWS)
        client_id = str(body[at + 2 : end], "utf-8", "replace")
        if bits & HOLDER_OWNER:
            (owner,) = OWNER.unpack_from(body, end)
    return _tuple(
        PopCheckpoint, (*fixed, gaps, superseded, attempts, attempt_id, client_id, renews, owner)
    )
