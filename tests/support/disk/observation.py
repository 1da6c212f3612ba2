"""The complete observable state of an engine.

It omits state that the engine keeps only in memory and may forget: retired messages and expired
deliveries.
"""

from __future__ import annotations

from typing import Any

from tidemill.broker.engine.engine import Engine
from tidemill.broker.engine.layout.pop_checkpoint import FLAG_RENEWS
from tidemill.broker.engine.pop.queue_queries import consumer_offset
from tidemill.broker.engine.pop.renewals import MINUTE_MS, START_GRACE_MS

Lows = dict[tuple[int, int], int]  # (topic id, queue id) -> offset


def lows_of(*engines: Engine) -> Lows:
    """Return the first offset of each queue that all `engines` have.

    After an interrupted retirement, the next start still finds messages of the retired range.
    """
    lows: Lows = {}
    for engine in engines:
        for key, queue in engine.catalog.queues.items():
            lows[key] = max(lows.get(key, 0), queue.min_offset)
    return lows


def observe(
    engine: Engine, now_ms: int, lows: Lows | None = None, *, as_started: bool = False
) -> dict[str, Any]:
    """Return all state that a client or an operator can observe, from the offsets `lows` on.

    `as_started`: return the expected state after a start at this time. A start extends deliveries
    that wait for their first renewal.
    """
    lows = lows or lows_of(engine)
    catalog, state = engine.catalog, engine.state
    table = state.table
    seen: dict[str, Any] = {
        "topics": sorted(catalog.topics.values(), key=lambda topic: topic.id),
        "groups": sorted(catalog.groups.values(), key=lambda group: group.id),
        "next id": catalog.next_id,
        "queues": sorted(
            (*key, lows[key], queue.max_offset, tuple(queue.walk(lows[key])))
            for key, queue in catalog.queues.items()
        ),
    }
    for key, progress in state.progress.items():
        if state.is_deleted(progress):
            continue
        low = lows[key[1:]]
        at: dict[str, Any] = {"pop": max(progress.pop_offset, low)}
        if low == 0:
            # Otherwise it depends on when the engine visits deliveries of retired messages.
            at["consumer"] = consumer_offset(state, progress)
        if progress.ordered is not None:
            pending = progress.ordered.pending.items()
            at["pending"] = sorted(one for one in pending if one[0] >= low)
            at["attempt id"] = progress.ordered.attempt_id
        if at["pop"] > low or progress.void_before or at.get("attempt id"):
            seen[f"progress {key}"] = at
    for slot in table.in_use(0, len(table.ids)).tolist():
        progress = state.owners[table.owners[slot]]
        key = progress.group_id, progress.topic_id, progress.queue.queue_id
        is_void = state.is_void(progress, table.ids[slot])
        if is_void or state.progress.get(key) is not progress:
            continue
        low = lows[key[1:]]
        live, replaced = (
            [
                table.offset_of(slot, index)
                for index in table.indexes_of(bits)
                if table.offset_of(slot, index) >= low
            ]
            for bits in (table.live[slot], table.superseded[slot])
        )
        visible_at_ms = table.visible_at_ms[slot]
        is_first = visible_at_ms - table.popped_at_ms[slot] <= MINUTE_MS
        if as_started and is_first and table.live[slot] and table.flags[slot] & FLAG_RENEWS:
            visible_at_ms = now_ms + START_GRACE_MS
        if visible_at_ms <= now_ms:
            replaced = []
        if live or replaced:
            seen[f"delivery {table.ids[slot]}"] = (
                *key,
                slot,
                visible_at_ms,
                live,
                replaced,
                table.client_of(slot),
            )
    return seen
