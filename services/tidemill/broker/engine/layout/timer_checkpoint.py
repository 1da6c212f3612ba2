"""The timer checkpoint: the replay position of the timer files, in two alternating copies.

   0   "TMRCKPT1"
   8   generation                i64   the intact copy with the highest one is valid
  16   lastReadTimeMs            i64   the hand: every timer linked up to it is settled, or linked
                                       again later
  24   lastTimerLogFlushPos      i64   timer log position that is durable and in the durable wheel
  32   lastTimerQueueOffset      i64   lower timer ids are in the timer log before that position
  40   masterTimerQueueOffset    i64   the same as of the last FRONTIER record; for information
  48   replay_pos                i64   commit log offset at which the replay begins
  56   state version             i64   epoch at the write
  64   timestamp                 i64   ms
  72   counter                   i64   checkpoints written in this epoch
  80   pending count             i64
  88   oldest pinned log offset  i64   -1: none
  96   flags                     u32   bit 0: written by a clean stop
 100   store uuid                16 bytes
 116   slots in use              u32   of the wheel; a file with fewer is damaged
 120   count of live files       u32   table files with pending timers; 0xFFFFFFFF: not listed
 124   numbers of these files    u32 each
       zeros
4092   CRC-32 over the bytes before   u32      big-endian, 4,096 bytes
"""

from __future__ import annotations

import struct
from typing import NamedTuple
from zlib import crc32

from tidemill.broker.engine.layout.numbers import QueueOffset

SIZE = 4096  # bytes: one page, and one sector of most disks
MAGIC = b"TMRCKPT1"
UUID_SIZE = 16  # bytes
FLAG_CLEAN = 1
_FIELDS = struct.Struct(">8s11qI16s")
FIELDS_SIZE = 116
_USE = struct.Struct(">II")
_NUMBER = struct.Struct(">I")
LIVE_FILES_MAX = 990
_UNLISTED = 0xFFFFFFFF
assert _FIELDS.size == FIELDS_SIZE, "the timer checkpoint is part of the disk format"


class TimerCheckpoint(NamedTuple):
    """A checkpoint, decoded."""

    generation: int
    hand_ms: int
    timer_log_position: int
    queue_offset: QueueOffset
    master_queue_offset: QueueOffset
    replay_from: int
    epoch: int
    written_at_ms: int
    counter: int
    pending_count: int
    oldest_pinned_offset: int
    flags: int
    store_uuid: bytes
    slots_used: int
    live_files: tuple[int, ...] | None  # None: too many to list


def encode(checkpoint: TimerCheckpoint) -> bytes:
    """Encode a checkpoint."""
    *fields, slots_used, live_files = checkpoint
    count = _UNLISTED if live_files is None else len(live_files)
    assert live_files is None or count <= LIVE_FILES_MAX, "the list has no more room"
    parts = [_FIELDS.pack(MAGIC, *fields), _USE.pack(slots_used, count)]
    parts += [_NUMBER.pack(number) for number in live_files or ()]
    page = b"".join(parts).ljust(SIZE - 4, b"\0")
    return page + crc32(page).to_bytes(4, "big")


def find(data: bytes | None) -> TimerCheckpoint | None:
    """Decode a checkpoint; return None if it is missing or damaged.

    Then the other copy is valid.
    """
    if data is None or len(data) != SIZE:
        return None
    if crc32(data[:-4]) != int.from_bytes(data[-4:], "big") or not data.startswith(MAGIC):
        return None
    slots_used, count = _USE.unpack_from(data, FIELDS_SIZE)
    live_files = None
    if count <= LIVE_FILES_MAX:
        begin = FIELDS_SIZE + _USE.size
        numbers = _NUMBER.iter_unpack(data[begin : begin + count * _NUMBER.size])
        live_files = tuple(number for (number,) in numbers)
    return TimerCheckpoint._make((*_FIELDS.unpack_from(data)[1:], slots_used, live_files))
