"""The settings of a topic as text, for `tidemill topic`."""

from __future__ import annotations

from typing import Final

from tidemill.cli.dedup_keys import describe_dedup
from tidemill.common.rest_client import Json
from tidemill.common.times import span

FIRST_USE: Final = "FIRST_USE"  # in place of the user


def change_text(before: Json, topic: Json) -> str:
    """Return the settings of a topic after a change, with the former ones."""
    kind, queues = topic["messageType"], f"{topic['queues']} queues"
    spread_ms = topic.get("deliverySpreadMs", 0)
    spread = f", deliveries spread over {spread_ms} ms" if spread_ms else ""
    kept = f", messages kept {retention_text(topic)}" if "retention" in topic else ""
    checked = f", half messages checked {checks_text(topic)}" if "transaction" in topic else ""
    deduplicated = f", deduplicated {describe_dedup(topic)}" if "dedup" in topic else ""
    if before is None:
        return f"{kind}, {queues}{spread}{kept}{checked}{deduplicated}"
    if before["messageType"] != kind:
        kind = f"{before['messageType']} -> {kind}"
    if before["queues"] != topic["queues"]:
        queues = f"{before['queues']} -> {queues}"
    spread_before_ms = before.get("deliverySpreadMs", 0)
    if spread_before_ms != spread_ms:
        spread = f", deliveries spread over {spread_before_ms} -> {spread_ms} ms"
    if retention_text(before) != retention_text(topic):
        kept = f", messages kept {retention_text(before)} -> {retention_text(topic)}"
    if checks_text(before) != checks_text(topic):
        checked = f", half messages checked {checks_text(before)} -> {checks_text(topic)}"
    if before.get("dedup") != topic.get("dedup"):
        deduplicated = f", deduplication {describe_dedup(before)} -> {describe_dedup(topic)}"
    parts = f"{kind}, {queues}{spread}{kept}{checked}{deduplicated}"
    return f"{'changed' if '->' in parts else 'is there, unchanged'}: {parts}"


def checks_text(topic: Json) -> str:
    """Return when half messages of a topic are checked, as text."""
    policy = topic.get("transaction")
    if policy is None:
        return "by the defaults"
    times = f"after {span(policy['firstCheckMs'])}, then every {span(policy['periodMs'])}"
    return f"{times}, {policy['attempts']} times"


def is_kept_less(before: Json, topic: Json) -> bool:
    """Whether a change of the retention may remove messages."""
    if is_kept_shorter(before, topic):
        return True
    old, new = before.get("retention", {}), topic.get("retention", {})
    old_bytes, new_bytes = old.get("bytes"), new.get("bytes")  # None: no limit
    if new_bytes is not None and (old_bytes is None or new_bytes < old_bytes):
        return True
    return "acked" in new and "acked" not in old


def is_kept_shorter(before: Json, topic: Json) -> bool:
    """Whether a change of the retention time may remove messages.

    The default time of a broker is unknown here. It may be shorter than any other.
    """
    old_ms = before.get("retention", {}).get("ms")
    new_ms = topic.get("retention", {}).get("ms")
    return new_ms not in {old_ms, -1} and (None in {old_ms, new_ms} or not 0 < old_ms < new_ms)


def retention_text(topic: Json) -> str:
    """Return when the messages of a topic are removed, as text."""
    kept = topic.get("retention", {})
    parts = []
    if "ms" in kept:
        parts.append("for ever" if kept["ms"] == -1 else f"for {span(kept['ms'])}")
    if "bytes" in kept:
        parts.append(f"up to {kept['bytes'] / (1 << 20):.1f} MiB per broker group")
    if kept.get("acked") == "free":
        parts.append("until all consumer groups have settled them")
    return ", ".join(parts) or "by the defaults of the broker"


def creator_text(topic: Json) -> str:
    """Return who created a topic, as a sentence."""
    if "createdBy" not in topic:
        return f"Its creator is unknown: {topic.get('createdByUnknown', 'the admin API is older')}."
    if topic["createdBy"] == FIRST_USE:
        return "The first use by a client created it."
    return f"The user {topic['createdBy']} created it."
