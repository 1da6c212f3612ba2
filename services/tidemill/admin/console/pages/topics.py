"""Topics: the list, one topic, and their changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tidemill.admin.console.actions import PageAction, Rows
from tidemill.admin.console.forms import Field, FieldKind
from tidemill.admin.console.history_charts import history_values
from tidemill.admin.console.page import (
    NAME_ORDER,
    Page,
    PageCall,
    Values,
    order_of,
    segment,
    unknown_reasons,
    url,
)
from tidemill.admin.console.rendering import bytes_text, number_text
from tidemill.admin.http.rest_calls import Document

ROWS: Final = 50  # per page
# The orders of the list, each a `sort` of the REST API.
ORDERS: Final = {
    NAME_ORDER: "by name",
    "-messages": "by messages",
    "-bytes": "by size",
    "-inPerSecond": "by messages in",
    "-pendingTimers": "by delayed messages",
}
TYPES: Final = ("NORMAL", "FIFO", "DELAY", "TRANSACTION", "PRIORITY", "MIXED")


async def load_topics(call: PageCall) -> Values:
    """Read a page of topics by name, or the first ones by a number."""
    order = order_of(call, ORDERS, NAME_ORDER)
    is_by_name = order == NAME_ORDER
    kept = {name: call.get(name) for name in ("namespace", "prefix")}
    found = await call.api.get(
        "/topics",
        pageSize=ROWS,
        pageToken=call.get("pageToken") if is_by_name else None,
        sort=None if is_by_name else order,
        includeSystem=call.get("system") == "true",
        **kept,
    )
    token = found.get("nextPageToken")
    kept = {"system": call.get("system"), **kept}
    return {
        "topics": found["topics"],
        "unreachable": found.get("unreachable", []),
        "unknown": unknown_reasons(found["topics"]),
        "sampled_at_ms": found.get("sampledAtMs"),
        "with_system": call.get("system") == "true",
        "filter": {name: text or "" for name, text in kept.items()},
        "orders": ORDERS,
        "order": order,
        "all": url("/topics", sort=NAME_ORDER, **kept),
        "is_cut": not is_by_name and len(found["topics"]) == ROWS,
        "next": url("/topics", pageToken=token, sort=order, **kept) if token else "",
    }


async def load_topic(call: PageCall) -> Values:
    """Read a topic with its queues."""
    name = call.path["topic"]
    topic = await call.api.get(f"/topics/{name}")
    queues = topic["queueStatus"]
    return {
        "topic": topic,
        "unreachable": topic.get("unreachable", []),
        "messages": sum(queue["maxOffset"] - queue["minOffset"] for queue in queues),
        **await history_values(call, f"topic:{name}", f"/topics/{segment(name)}"),
    }


def _loss(found: Document) -> Rows:
    rows = [("Messages", number_text(found["messages"]))]
    return rows + _also_affected(found)


def _purged(found: Document) -> Rows:
    groups = found["brokerGroups"]
    rows = [
        (
            f"Messages at {group['broker']}",
            f"{number_text(group['messages'])}, {bytes_text(group['bytes'])}",
        )
        for group in groups
    ]
    return rows + _also_affected(found)


def _also_affected(found: Document) -> Rows:
    rows = [("Delayed messages", number_text(found["delayedMessages"]))]
    rows.append(("Consumer groups", ", ".join(found["groups"]) or "none"))
    if "clients" in found:
        rows.append(("Connected clients", ", ".join(found["clients"]) or "none"))
    return rows


def _purge_button(found: Document, path: Mapping[str, str]) -> str:
    count = sum(group["messages"] for group in found["brokerGroups"])
    return f"Remove {number_text(count)} messages of {path['topic']}"


def _delete_button(found: Document, path: Mapping[str, str]) -> str:
    return f"Delete {path['topic']} with {number_text(found['messages'])} messages"


def _settings(found: Document) -> Rows:
    rows = [("Type", found["messageType"]), ("Queues", number_text(found["queues"]))]
    retention = found.get("retention", {})
    if "ms" in retention:
        rows.append(("Retention in ms", number_text(retention["ms"])))
    if "bytes" in retention:
        rows.append(("Retention in bytes", number_text(retention["bytes"])))
    if "isNew" in found:
        rows.append(("New", "yes" if found["isNew"] else "no"))
    if "expiredMessages" in found:
        rows.append(("Messages that expire", number_text(found["expiredMessages"])))
    return rows


def _save_button(found: Document, path: Mapping[str, str]) -> str:
    save = f"Save {path['topic']}"
    if "expiredMessages" not in found:
        return save
    return f"{save} and remove {number_text(found['expiredMessages'])} messages"


def _settings_texts(found: Document) -> dict[str, str]:
    retention = found.get("retention", {})
    return {
        "messageType": found["messageType"],
        "queues": str(found["queues"]),
        "retention.ms": str(retention.get("ms", "")),
        "retention.bytes": str(retention.get("bytes", "")),
    }


SETTINGS: Final = (
    Field("messageType", "Type", FieldKind.CHOICE, choices=("", *TYPES)),
    Field("queues", "Queues", FieldKind.NUMBER, "1 to 1,024 per broker group."),
    Field("retention.ms", "Retention in ms", FieldKind.NUMBER, "At least 60,000; -1 for ever."),
    Field("retention.bytes", "Retention in bytes", FieldKind.NUMBER, "Per broker group."),
)
PAGES: Final = (
    Page("/topics", "topics", load_topics),
    Page("/topics/{topic}", "topic", load_topic),
)
ACTIONS: Final = (
    PageAction(
        path="/topics/{topic}/purge",
        method="POST",
        rest="/topics/{topic}:purge",
        title="Purge {topic}",
        about="Removes the messages of {topic}. Delayed messages stay and are delivered later.",
        back="/topics/{topic}",
        fields=(
            Field("all", "All messages", FieldKind.FLAG, default="true"),
            Field("beforeTimestampMs", "Or only those stored before", FieldKind.TIME),
            Field("includeRetries", "Also those in retry topics", FieldKind.FLAG),
        ),
        rows=_purged,
        button=_purge_button,
        is_loss=True,
    ),
    PageAction(
        path="/topics/{topic}/delete",
        method="DELETE",
        rest="/topics/{topic}",
        title="Delete {topic}",
        about="Deletes the topic with its messages. Requests of its clients fail.",
        back="/topics",
        rows=_loss,
        button=_delete_button,
        is_loss=True,
    ),
    PageAction(
        path="/topics/{topic}/set",
        method="PUT",
        rest="/topics/{topic}",
        title="Change {topic}",
        about="An empty field does not change. A topic that does not exist is created.",
        back="/topics/{topic}",
        fields=SETTINGS,
        current="/topics/{topic}",
        texts_of=_settings_texts,
        rows=_settings,
        button=_save_button,
    ),
)
