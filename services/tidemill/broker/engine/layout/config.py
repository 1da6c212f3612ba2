"""The body of a CONFIG record: one change of the configuration, as a JSON object.

    {"op": "broker", "name": ..., "handleSecret": hex}     the broker group itself
    {"op": "nextId", "nextId": n}                          ids below n are used
    {"op": "broughtBack", "before": log offset}            handles of deliveries before this offset
                                                           may contain a deadline that is too late
    {"op": "endHandles", "group": n, "before": log offset} handles of the group's deliveries before
                                                           this offset are rejected, unless the
                                                           delivery is in the table
    {"op": "clockBack", "at": [log offset, ...]}           starts with a clock behind the times of
                                                           stored records; also as `broughtBack`
                                                           with the last of these offsets
    {"op": "featureLevel", "level": n}                     the log may have records of this level
                                                           from here on (level 2)
    {"op": "topic", "topic": {...}}                        new state of a topic
    {"op": "group", "group": {...}}                        new state of a consumer group
    {"op": "deleteTopic", "id": n, "atMs": time}   {"op": "deleteGroup", "id": n, "atMs": time}
    {"op": "gone", "topics": [[id, name, log offset, time], ...] or "groups": [...]}
                                                           names of deleted items, with the offset
                                                           and the time of the deletion in ms; in
                                                           STATE and snapshots
    {"op": "home", "home": {...} or null}                  the owner of topics and groups
    {"op": "brokerGroup", "group": {...}}                  a member of the cluster, at its home
    {"op": "deleteBrokerGroup", "name": ...}
    {"op": "pullOffset", "group": n, "topic": n, "queue": n, "offset": n}
                                                           reported pull offset of a group;
                                                           2**63 - 1 deletes it
    {"op": "reset", "group_id": n, "offsets": [[topic_id, queue_id, offset], ...]}
    {"op": "user", "name": ..., "version": n, "user": {...}}
                                                           new state of a user (level 3, as all
                                                           below); the same form for `role`,
                                                           `token`, `quota` and `ban`. In CONFIG,
                                                           n is the version of the whole table
                                                           after this item
    {"op": "security", "version": n, "security": {...} or null}
                                                           the security mode; null deletes it
    {"op": "deleteUser", "name": ..., "version": n}        the same form for `deleteRole`,
                                                           `deleteToken`, `deleteQuota` and
                                                           `deleteBan`
    {"op": "securityVersion", "version": n}                the version of the whole table; in STATE
                                                           and snapshots, and at a follower

UTF-8, keys sorted, no spaces. `metadata.catalog` defines the fields of topics and groups,
`metadata.membership` those of the home and of broker groups. The content of security items is
defined outside of the broker (`tidemill.security`).
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple


class ConfigItem(NamedTuple):
    """A CONFIG record: one item of a form above."""

    item: dict[str, Any]


def encode_item(item: dict[str, Any]) -> bytes:
    """Encode a configuration item."""
    return json.dumps(item, separators=(",", ":"), sort_keys=True).encode()


def decode_item(data: bytes | memoryview) -> dict[str, Any]:
    """Decode a configuration item."""
    item = json.loads(bytes(data))
    assert isinstance(item, dict), "a configuration item is an object"
    return item
