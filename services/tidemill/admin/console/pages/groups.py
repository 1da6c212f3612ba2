"""Consumer groups: the list, one group with its consumers and deliveries, and their changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tidemill.admin.console.actions import PageAction, Rows
from tidemill.admin.console.forms import Field, FieldKind
from tidemill.admin.console.history_charts import history_values, lag_sparklines
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
from tidemill.admin.console.rendering import number_text, time_text
from tidemill.admin.http.rest_calls import Document

ROWS: Final = 50  # per page
# The orders of the list, each a `sort` of the REST API.
ORDERS: Final = {
    "-lag": "by lag",
    "oldestUnackedAtMs": "by oldest message",
    "-deadLetters": "by dead letters",
    "-inPerSecond": "by messages in",
    NAME_ORDER: "by name",
}
CONSUMERS_MAX: Final = 100  # on the page of a group


async def load_groups(call: PageCall) -> Values:
    """Read consumer groups: those with the largest lag, or a page by name."""
    order = order_of(call, ORDERS, "-lag")
    is_by_name = order == NAME_ORDER
    kept = {name: call.get(name) for name in ("namespace", "prefix")}
    found = await call.api.get(
        "/groups",
        pageSize=ROWS,
        pageToken=call.get("pageToken") if is_by_name else None,
        sort=None if is_by_name else order,
        **kept,
    )
    token = found.get("nextPageToken")
    return {
        "groups": found["groups"],
        "sparklines": await lag_sparklines(call, found["groups"]),
        "unreachable": found.get("unreachable", []),
        "unknown": unknown_reasons(found["groups"]),
        "sampled_at_ms": found.get("sampledAtMs"),
        "filter": {name: text or "" for name, text in kept.items()},
        "orders": ORDERS,
        "order": order,
        "all": url("/groups", sort=NAME_ORDER, **kept),
        "is_cut": not is_by_name and len(found["groups"]) == ROWS,
        "next": url("/groups", pageToken=token, sort=order, **kept) if token else "",
    }


async def load_group(call: PageCall) -> Values:
    """Read a consumer group with its backlog, locks and consumers."""
    name = call.path["group"]
    group = await call.api.get(f"/groups/{name}")
    progress = await call.api.get(f"/groups/{name}/progress")
    clients = await call.api.get("/clients", group=name, pageSize=CONSUMERS_MAX)
    diagnosis = await call.api.get(f"/groups/{name}/diagnosis")
    lacking = [each.get("unreachable", []) for each in (group, progress, clients)]
    return {
        "group": group,
        "findings": diagnosis["findings"],
        "total": progress["total"],
        "topics": progress["topics"],
        "locks": progress["locks"],
        "consumers": clients["clients"],
        "has_more_consumers": "nextPageToken" in clients,
        "unreachable": sorted({broker for brokers in lacking for broker in brokers}),
        **await history_values(call, f"group:{name}", f"/groups/{segment(name)}"),
    }


async def load_deliveries(call: PageCall) -> Values:
    """Read a page of the deliveries in flight."""
    name = call.path["group"]
    kept = {each: call.get(each) for each in ("topic", "clientId", "messageId")}
    found = await call.api.get(
        f"/groups/{name}/deliveries", pageSize=ROWS, pageToken=call.get("pageToken"), **kept
    )
    token = found.get("nextPageToken")
    path = f"/groups/{name}/deliveries"
    return {
        "group": name,
        "deliveries": found["deliveries"],
        "filter": {each: text or "" for each, text in kept.items()},
        "unreachable": found.get("unreachable", []),
        "next": url(path, pageToken=token, **kept) if token else "",
    }


def _deletion(found: Document) -> Rows:
    return [
        ("Unacknowledged messages", number_text(found["lag"])),
        ("Topics", ", ".join(found["topics"]) or "none"),
        ("Connected clients", ", ".join(found["clients"]) or "none"),
    ]


def _reset(found: Document) -> Rows:
    return [
        (
            f"{queue['topic']}, queue {queue['queueId']} at {queue['broker']}",
            f"{number_text(queue.get('fromOffset'))} to {number_text(queue['toOffset'])}",
        )
        for queue in found["queues"]
    ]


def _released(found: Document) -> Rows:
    rows = [("Deliveries", number_text(found["messages"]))]
    rows += [(each["broker"], number_text(each["messages"])) for each in found["brokers"]]
    return [*rows, ("More remain", "yes" if found["more"] else "no")]


def _lock(found: Document) -> Rows:
    lock = found["released"]
    return [
        ("Queue", f"{lock['queue']} of {lock['topic']} at {lock['broker']}"),
        ("Held by", lock.get("clientId", "unknown")),
        ("Messages released", number_text(lock["messages"])),
        ("Messages behind them", number_text(lock["waiting"])),
    ]


def _pause_end(found: Document) -> str:
    return time_text(found["paused"]["untilMs"] if "paused" in found else None)


def _paused(found: Document) -> Rows:
    if "paused" not in found:
        return [("Paused", "no")]
    pause = found["paused"]
    return [("Paused until", time_text(pause["untilMs"])), ("Reason", pause.get("reason", ""))]


def _reset_button(found: Document, path: Mapping[str, str]) -> str:
    return f"Reset {path['group']} in {number_text(len(found['queues']))} queues"


PAGES: Final = (
    Page("/groups", "groups", load_groups),
    Page("/groups/{group}", "group", load_group),
    Page("/groups/{group}/deliveries", "deliveries", load_deliveries),
)
ACTIONS: Final = (
    PageAction(
        path="/groups/{group}/pause",
        method="POST",
        rest="/groups/{group}:pause",
        title="Pause {group}",
        about="Its consumers receive nothing until the end. Messages wait, and count in the lag.",
        back="/groups/{group}",
        fields=(
            Field("untilMs", "Until", FieldKind.TIME, "Empty: for a day. At most 30 days."),
            Field("reason", "Reason", help="For other operators."),
        ),
        rows=_paused,
        button=lambda found, path: f"Pause {path['group']} until {_pause_end(found)}",
    ),
    PageAction(
        path="/groups/{group}/resume",
        method="POST",
        rest="/groups/{group}:resume",
        title="Resume {group}",
        about="Its consumers receive messages again, at once.",
        back="/groups/{group}",
        rows=_paused,
        button=lambda _found, path: f"Resume {path['group']}",
    ),
    PageAction(
        path="/groups/{group}/reset",
        method="POST",
        rest="/groups/{group}:resetOffset",
        title="Reset {group}",
        about="Moves the group within topics. Messages in between come again, or are skipped.",
        back="/groups/{group}",
        fields=(
            Field("topics", "Topics", FieldKind.LIST, "One per line.", is_required=True),
            Field("to", "To", FieldKind.CHOICE, choices=("", "earliest", "latest")),
            Field("timestampMs", "Or to the first message stored at or after", FieldKind.TIME),
        ),
        rows=_reset,
        button=_reset_button,
        is_loss=True,
    ),
    PageAction(
        path="/groups/{group}/release",
        method="POST",
        rest="/groups/{group}/deliveries:release",
        title="Release deliveries of {group}",
        about="Makes messages ready again that a consumer holds. Name a client, a message, or all.",
        back="/groups/{group}",
        fields=(
            Field("clientId", "Client id"),
            Field("messageId", "Message id"),
            Field("topic", "Topic"),
            Field("all", "All deliveries", FieldKind.FLAG),
        ),
        rows=_released,
        button=lambda found, path: (
            f"Release {number_text(found['messages'])} deliveries of {path['group']}"
        ),
    ),
    PageAction(
        path="/groups/{group}/unlock",
        method="POST",
        rest="/groups/{group}:releaseLock",
        title="Unlock a queue of {group}",
        about="Makes the held messages of a locked queue ready again. A consumer that still works"
        " on them has them twice.",
        back="/groups/{group}",
        fields=(
            Field("topic", "Topic", is_required=True),
            Field("queue", "Queue", FieldKind.NUMBER, is_required=True),
            Field("broker", "Broker group"),
        ),
        rows=_lock,
        button=lambda found, path: (
            f"Unlock {number_text(found['released']['messages'])} messages for {path['group']}"
        ),
    ),
    PageAction(
        path="/groups/{group}/delete",
        method="DELETE",
        rest="/groups/{group}",
        title="Delete {group}",
        about="Deletes the group with its position, retries and dead letters.",
        back="/groups",
        rows=_deletion,
        button=lambda found, path: (
            f"Delete {path['group']} with {number_text(found['lag'])} unacknowledged messages"
        ),
        is_loss=True,
    ),
)
