"""The body of a CONFIG record: one change of what is configured, as a JSON object.

    {"op": "broker", "name": ..., "handleSecret": hex}     the broker group itself
    {"op": "nextId", "nextId": n}                          ids below n were given out
    {"op": "broughtBack", "before": log offset}            of what was popped before it a handle
                                                           may name too late a deadline
    {"op": "clockBack", "at": [log offset, ...]}           where starts began whose clocks were
                                                           behind what was stored before
    {"op": "topic", "topic": {...}}                        a topic as it is from here on
    {"op": "group", "group": {...}}                        a consumer group as it is from here on
    {"op": "deleteTopic", "id": n}   {"op": "deleteGroup", "id": n}
    {"op": "gone", "topics": [[id, name, log offset], ...] or "groups": [...]}
                                                           what was deleted there, and what it was
                                                           called; in STATE and in snapshots alone
    {"op": "home", "home": {...} or null}                  whose topics and groups these are
    {"op": "brokerGroup", "group": {...}}                  a member of the cluster, at its home
    {"op": "deleteBrokerGroup", "name": ...}
    {"op": "pullOffset", "group": n, "topic": n, "queue": n, "offset": n}
                                                           how far a group has pulled, as it says;
                                                           2**63 - 1: it says so no more
    {"op": "reset", "group_id": n, "offsets": [[topic_id, queue_id, offset], ...]}

UTF-8, keys sorted, no spaces. The fields of topics and groups are those of `metadata.catalog`,
those of the home and of broker groups those of `metadata.membership`.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple


class ConfigItem(NamedTuple):
    """A CONFIG record: one item of the forms above."""

    item: dict[str, Any]


def encode_item(item: dict[str, Any]) -> bytes:
    """Encode a configuration item."""
    return json.dumps(item, separators=(",", ":"), sort_keys=True).encode()


def decode_item(data: bytes | memoryview) -> dict[str, Any]:
    """Decode a configuration item."""
    item = json.loads(bytes(data))
    assert isinstance(item, dict), "a configuration item is an object"
    return item
