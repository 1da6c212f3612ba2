"""Live deliveries in snapshots and STATE records: fixed-size rows, then their gaps.

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

    and, if any delivery has a holder:
    ┌─────────────┬────────────────────────────────────┬──────────────────────────────────────────┐
    │ clients u32 │ clients x (u8 size, then the id)   │ count x u32: number of the client from 1;│
    │             │                                    │ 0 means no holder                        │
    └─────────────┴────────────────────────────────────┴──────────────────────────────────────────┘
    and, from feature level 3 on, if any owner is known:
    ┌────────────────────┐
    │ clients x u32      │  owner ids; 0 means no owner
    └────────────────────┘

Big-endian. live: messages that are not acked, revived or replaced. superseded: messages of a
delivery that change-invisible replaced, or that were copied before their handles ended; the row
stays, so that the old handles are rejected.

flags: those of the CK, and four more. RELEASED (16): an operator released the delivery, so it does
not block its ordered queue. UNPROVEN (32): after a start it is unknown whether the client has the
delivery, so the broker does not renew it. RETURNED (64): the broker gave the delivery back, because
its client ended or was silent. RENEWS (128, in place of HOLDER): the broker renews the
delivery.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tidemill.broker.engine.layout.pop_checkpoint import FLAG_GAPS
from tidemill.message.client_key import UNKNOWN_CLIENT, ClientKey

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
    """Delivery rows, their gaps by row number, and their holders."""

    rows: np.ndarray
    gaps: dict[int, tuple[int, ...]]
    clients: Sequence[ClientKey] = ()  # the holders, each once
    holders: np.ndarray | None = None  # per row: 1 + index in `clients`, or 0; None: all 0

    @property
    def holder_numbers(self) -> np.ndarray:
        """Per row: 1 + the index of its holder, or 0."""
        if self.holders is None:
            return np.zeros(len(self.rows), dtype=np.uint32)
        return self.holders


def encode(deliveries: DeliveryRows) -> bytes:
    """Encode rows, gaps and holders."""
    rows, gaps, clients, holders = deliveries
    flat = [gap for number in sorted(gaps) for gap in gaps[number]]
    count = len(rows).to_bytes(COUNT_SIZE, "big")
    encoded = count + rows.tobytes() + np.array(flat, dtype=">u4").tobytes()
    if not clients or holders is None:
        return encoded
    ids = [client.client_id.encode() for client in clients]
    trailer = b"".join([bytes([len(one)]) + one for one in ids])
    owners = np.array([client.owner for client in clients], dtype=">u4")
    return b"".join(
        [
            encoded,
            len(ids).to_bytes(COUNT_SIZE, "big"),
            trailer,
            holders.astype(">u4").tobytes(),
            owners.tobytes() if owners.any() else b"",
        ]
    )


def decode(data: bytes | memoryview) -> DeliveryRows:
    """Decode rows, gaps and holders."""
    count = int.from_bytes(data[:COUNT_SIZE], "big")
    rows = np.frombuffer(data, dtype=ROW, count=count, offset=COUNT_SIZE)
    at = COUNT_SIZE + count * ROW_SIZE
    gaps: dict[int, tuple[int, ...]] = {}
    for number in np.flatnonzero(rows["flags"] & FLAG_GAPS).tolist():
        n = int(rows["count"][number])
        gaps[number] = tuple(np.frombuffer(data, dtype=">u4", count=n, offset=at).tolist())
        at += 4 * n
    if at == len(data):
        return DeliveryRows(rows, gaps)
    ids = []
    client_count = int.from_bytes(data[at : at + COUNT_SIZE], "big")
    at += COUNT_SIZE
    for _ in range(client_count):
        end = at + 1 + data[at]
        ids.append(str(data[at + 1 : end], "utf-8", "replace"))
        at = end
    holders = np.frombuffer(data, dtype=">u4", count=count, offset=at).astype(np.uint32)
    at += 4 * count
    clients = list(map(ClientKey, ids))
    if at < len(data):
        owners = np.frombuffer(data, dtype=">u4", count=client_count, offset=at)
        clients = list(map(ClientKey, ids, owners.tolist()))
    return DeliveryRows(rows, gaps, clients, holders)


def joined(parts: list[DeliveryRows]) -> DeliveryRows:
    """Concatenate the rows of several parts, in order."""
    rows = np.concatenate([part.rows for part in parts])
    gaps: dict[int, tuple[int, ...]] = {}
    numbers: dict[ClientKey, int] = {}
    holders = np.zeros(len(rows), dtype=np.uint32)
    begin = 0
    for part in parts:
        gaps.update({begin + number: found for number, found in part.gaps.items()})
        end = begin + len(part.rows)
        if part.clients:
            known = [0, *[numbers.setdefault(one, len(numbers) + 1) for one in part.clients]]
            holders[begin:end] = np.array(known, dtype=np.uint32)[part.holder_numbers]
        begin = end
    return DeliveryRows(rows, gaps, list(numbers), holders if numbers else None)


def part_of(deliveries: DeliveryRows, begin: int, end: int) -> DeliveryRows:
    """Return a range of the rows, with only the holders that these rows name."""
    gaps = {n - begin: deliveries.gaps[n] for n in range(begin, end) if n in deliveries.gaps}
    rows = deliveries.rows[begin:end]
    if deliveries.holders is None:
        return DeliveryRows(rows, gaps)
    known = (UNKNOWN_CLIENT, *deliveries.clients)
    return named_once(rows, gaps, deliveries.holders[begin:end], known)


def named_once(
    rows: np.ndarray,
    gaps: dict[int, tuple[int, ...]],
    numbers: np.ndarray,
    clients: Sequence[ClientKey],
) -> DeliveryRows:
    """Return rows with holders given as numbers into `clients`; 0 means no holder."""
    used = sorted(set(numbers.tolist()) - {0})
    if not used:
        return DeliveryRows(rows, gaps)
    # 0 sorts first, so it keeps its number.
    holders = np.searchsorted([0, *used], numbers).astype(np.uint32)
    return DeliveryRows(rows, gaps, [clients[number] for number in used], holders)
