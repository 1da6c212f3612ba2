"""Live deliveries in snapshots and STATE records: rows of one fixed form, then their gaps.

     0           4          8                 16             20             24             26
    ┌───────────┬──────────┬─────────────────┬──────────────┬──────────────┬──────────────┐
    │ count u32 │ slot u32 │ delivery_id i64 │ group_id u32 │ topic_id u32 │ queue_id u16 │
    └───────────┴──────────┴─────────────────┴──────────────┴──────────────┴──────────────┘
     26        27         28                 36                  44                 52         56
    ┌─────────┬──────────┬──────────────────┬───────────────────┬──────────────────┬──────────┐
    │ n    u8 │ flags u8 │ start_offset i64 │ visible_at_ms i64 │ popped_at_ms i64 │ live u32 │
    └─────────┴──────────┴──────────────────┴───────────────────┴──────────────────┴──────────┘
     56               60
    ┌────────────────┐
    │ superseded u32 │  count rows of 56 bytes from byte 4 on; then, for each row with flag GAPS in
    └────────────────┘  order, n x u32: queue offsets minus start_offset

Big-endian. live: messages neither acked nor revived nor replaced; superseded: messages whose
delivery was replaced by change-invisible, kept so that the old handle is refused. flags: those of
the CK, and RELEASED (16): an operator let go of it, so it blocks its ordered queue no more.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tidemill.broker.engine.layout.pop_checkpoint import FLAG_GAPS

ROW = np.dtype(
    [
        ("slot", ">u4"),
        ("delivery_id", ">i8"),
        ("group_id", ">u4"),
        ("topic_id", ">u4"),
        ("queue_id", ">u2"),
        ("count", "u1"),
        ("flags", "u1"),
        ("start_offset", ">i8"),
        ("visible_at_ms", ">i8"),
        ("popped_at_ms", ">i8"),
        ("live", ">u4"),
        ("superseded", ">u4"),
    ]
)
ROW_SIZE = 56  # bytes
assert ROW.itemsize == ROW_SIZE, "part of the disk format"
COUNT_SIZE = 4


class DeliveryRows(NamedTuple):
    """Rows of the form above, and by row number the gaps of those that have any."""

    rows: np.ndarray
    gaps: dict[int, tuple[int, ...]]


def encode(deliveries: DeliveryRows) -> bytes:
    """Encode rows and gaps."""
    rows, gaps = deliveries
    flat = [gap for number in sorted(gaps) for gap in gaps[number]]
    count = len(rows).to_bytes(COUNT_SIZE, "big")
    return count + rows.tobytes() + np.array(flat, dtype=">u4").tobytes()


def decode(data: bytes | memoryview) -> DeliveryRows:
    """Decode rows and gaps."""
    count = int.from_bytes(data[:COUNT_SIZE], "big")
    rows = np.frombuffer(data, dtype=ROW, count=count, offset=COUNT_SIZE)
    at = COUNT_SIZE + count * ROW_SIZE
    gaps: dict[int, tuple[int, ...]] = {}
    for number in np.flatnonzero(rows["flags"] & FLAG_GAPS).tolist():
        n = int(rows["count"][number])
        gaps[number] = tuple(np.frombuffer(data, dtype=">u4", count=n, offset=at).tolist())
        at += 4 * n
    return DeliveryRows(rows, gaps)


def joined(parts: list[DeliveryRows]) -> DeliveryRows:
    """Return the rows of several as one, in their order."""
    rows = np.concatenate([part.rows for part in parts])
    gaps: dict[int, tuple[int, ...]] = {}
    begin = 0
    for part in parts:
        gaps.update({begin + number: found for number, found in part.gaps.items()})
        begin += len(part.rows)
    return DeliveryRows(rows, gaps)
