"""Messages: a search by id or key, one message with its journey, and the form to send one."""

from __future__ import annotations

from typing import Final

from tidemill.admin.console.actions import PageAction, Rows
from tidemill.admin.console.forms import Field, FieldKind
from tidemill.admin.console.page import Page, PageCall, Values
from tidemill.admin.http.rest_calls import Document

FOUND_MAX: Final = 50
BODY_CHARS_MAX: Final = 100_000  # of a text on a page


async def load_messages(call: PageCall) -> Values:
    """Search messages of a topic by id or key."""
    topic, key, message_id = call.get("topic"), call.get("key"), call.get("id")
    found: Document = {"messages": []}
    if topic and message_id:
        found = await call.api.get(f"/topics/{topic}/messages/{message_id}")
    elif topic and key:
        found = await call.api.get(f"/topics/{topic}/messages", key=key, limit=FOUND_MAX)
    return {
        "messages": found["messages"],
        "is_search": bool(topic and (key or message_id)),
        "filter": {"topic": topic or "", "key": key or "", "id": message_id or ""},
        "unreachable": found.get("unreachable", []),
    }


async def load_message(call: PageCall) -> Values:
    """Read a message with its journey."""
    topic, message_id = call.path["topic"], call.path["message_id"]
    found = await call.api.get(f"/topics/{topic}/messages/{message_id}")
    journey = await call.api.get(f"/messages/{message_id}/trace")
    lacking = {*found.get("unreachable", []), *journey.get("unreachable", [])}
    return {
        "message_id": message_id,
        "messages": found["messages"],
        "body_chars_max": BODY_CHARS_MAX,
        "events": journey["events"],
        "is_cut": journey["leftBytes"] > 0,
        "unreachable": sorted(lacking),
    }


def _sent(found: Document) -> Rows:
    return [(name, str(value)) for name, value in found.items()]


PAGES: Final = (
    Page("/messages", "messages", load_messages, is_live=False),
    Page("/topics/{topic}/messages/{message_id}", "message", load_message, is_live=False),
)
ACTIONS: Final = (
    PageAction(
        path="/topics/{topic}/send",
        method="POST",
        rest="/topics/{topic}/messages",
        title="Send to {topic}",
        about="Stores one message. All consumer groups of the topic receive it.",
        back="/topics/{topic}",
        fields=(
            Field("body", "Body", FieldKind.LONG_TEXT),
            Field("tag", "Tag"),
            Field("messageGroup", "Message group", help="Required by a FIFO topic."),
            Field("deliverAtMs", "Deliver at", FieldKind.TIME),
            Field("delayMs", "Or after, in ms", FieldKind.NUMBER),
            Field("priority", "Priority", FieldKind.NUMBER),
            Field("create", "Create the topic if it is missing", FieldKind.FLAG, is_query=True),
        ),
        rows=_sent,
        button=lambda _found, path: f"Send to {path['topic']}",
        has_dry_run=False,
    ),
)
