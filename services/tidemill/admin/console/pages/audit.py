"""The audit log."""

from __future__ import annotations

from typing import Final

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
        fromMs=call.instant_ms("from"),
        toMs=call.instant_ms("to"),
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


PAGES: Final = (Page("/audit", "audit", load_audit, is_live=False),)
