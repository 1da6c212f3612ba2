"""The audit log."""

from __future__ import annotations

from typing import Final

from tidemill.admin.console.forms import Field, FieldKind, InvalidField
from tidemill.admin.console.page import Page, PageCall, Values, url

ROWS: Final = 50  # per page
FILTERS: Final = ("kind", "user", "resource", "action", "result")
KINDS: Final = ("", "change", "refusal", "access")


async def load_audit(call: PageCall) -> Values:
    """Read a page of records, the newest first."""
    kept = {name: call.get(name) for name in FILTERS}
    found = await call.api.get(
        "/audit",
        pageSize=ROWS,
        pageToken=call.get("pageToken"),
        fromMs=_instant(call, "from"),
        toMs=_instant(call, "to"),
        **kept,
    )
    token = found.get("nextPageToken")
    range_ = {"from": call.get("from"), "to": call.get("to")}
    return {
        "records": found["records"],
        "kinds": KINDS,
        "filter": {name: text or "" for name, text in {**kept, **range_}.items()},
        "unreachable": found.get("unreachable", []),
        "next": url("/audit", pageToken=token, **kept, **range_) if token else "",
    }


def _instant(call: PageCall, name: str) -> int | None:
    text = call.get(name)
    try:
        return None if text is None else int(Field(name, name, FieldKind.TIME).value_of(text))
    except InvalidField:
        return None


PAGES: Final = (Page("/audit", "audit", load_audit, is_live=False),)
