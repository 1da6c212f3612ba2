"""Operations: the list, the progress of one, and its cancel."""

from __future__ import annotations

from typing import Any, Final

from tidemill.admin.console.actions import PageAction, Rows
from tidemill.admin.console.page import Page, PageCall, Values, segment, url
from tidemill.admin.console.rendering import number_text
from tidemill.admin.http.rest_calls import Document
from tidemill.admin.http.route_templates import PREFIX

ROWS: Final = 50  # per page
PERIOD_S: Final = 2.0  # Each rendering lists the operations of all broker groups.
# Missing for an operation of an admin process that has ended.
_UNKNOWN: Final[Document] = {"by": None, "total": None, "done": None, "failed": None}
# Operations of the admin process itself.
_OWN: Final = frozenset({"APPLY_DEFINITIONS", "SUPPORT_BUNDLE"})
_KINDS: Final = {
    "REPLAY_DEAD_LETTERS": "Replay dead letters",
    "DISCARD_DEAD_LETTERS": "Discard dead letters",
    "CANCEL_TIMERS": "Cancel timers",
    "RESCHEDULE_TIMERS": "Move timers",
    "FIRE_TIMERS": "Deliver timers",
    "APPLY_DEFINITIONS": "Apply definitions",
    "SUPPORT_BUNDLE": "Support bundle",
}


def _shown(operation: Document) -> dict[str, Any]:
    """Return an operation with its words."""
    return {
        **_UNKNOWN,
        **operation,
        "words": _KINDS.get(operation["kind"], operation["kind"]),
        "subject": _subject(operation),
        "download": _download(operation),
        "percent": _percent(operation),
    }


def _percent(operation: Document) -> int | None:
    """Return the share of items that it has looked at; None: unknown."""
    if "total" not in operation:
        return None
    total, looked = operation["total"], operation["done"] + operation["failed"]
    return min(looked * 100 // total, 100) if total else 100


def _subject(operation: Document) -> str:
    if operation["kind"] in _OWN:
        return "the cluster"
    return str(operation.get("group") or operation.get("topic") or "all topics")


def _download(operation: Document) -> str:
    """Return the URL of a finished support bundle; "" for another operation."""
    is_bundle = operation["kind"] == "SUPPORT_BUNDLE" and operation["state"] == "DONE"
    return f"{PREFIX}/support-bundles/{segment(operation['id'])}" if is_bundle else ""


async def load_operations(call: PageCall) -> Values:
    """Read a page of operations."""
    found = await call.api.get("/operations", pageSize=ROWS, pageToken=call.get("pageToken"))
    token = found.get("nextPageToken")
    return {
        "operations": [_shown(one) for one in found["operations"]],
        "unreachable": found.get("unreachable", []),
        "next": url("/operations", pageToken=token) if token else "",
    }


async def load_operation(call: PageCall) -> Values:
    """Read one operation."""
    found = await call.api.get(f"/operations/{call.path['operation_id']}")
    return {"operation": _shown(found), "unreachable": found.get("unreachable", [])}


def _progress(found: Document) -> Rows:
    one = found["operation"]
    rows = [
        ("State", one["state"].lower()),
        ("Error", one["error"])
        if "total" not in one
        else ("Done", f"{number_text(one['done'])} of {number_text(one['total'])}"),
    ]
    return rows + [("Warning", warning) for warning in found.get("warnings", [])]


_ONE: Final = "/operations/{operation_id}"
PAGES: Final = (
    Page("/operations", "operations", load_operations, period_s=PERIOD_S),
    Page(_ONE, "operation", load_operation, period_s=PERIOD_S),
)
ACTIONS: Final = (
    PageAction(
        path=f"{_ONE}/cancel",
        method="POST",
        rest="/operations/{operation_id}:cancel",
        title="Cancel operation {operation_id}",
        about="Items that are done stay as they are. The others are not changed.",
        back=_ONE,
        rows=_progress,
        button=lambda _found, path: f"Cancel operation {path['operation_id']}",
        is_loss=True,
    ),
)
