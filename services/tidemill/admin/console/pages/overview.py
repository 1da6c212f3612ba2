"""The overview: problems, broker groups, the worst consumer groups, the largest topics."""

from __future__ import annotations

from typing import Final

from tidemill.admin.console.page import Page, PageCall, Values, segment
from tidemill.admin.http.rest_calls import Document

PERIOD_S: Final = 2.0  # Each rendering reads all parts.
# Problems of consumer groups. The others are of broker groups.
_OF_GROUPS: Final = frozenset({"LagGrowing", "DlqGrowing"})


async def load_overview(call: PageCall) -> Values:
    """Read the parts that the caller may see."""
    found = await call.api.get("/overview")
    return {
        "status": found["status"],
        "problems": [{**each, "page": page_of(each)} for each in found["problems"]],
        "notices": sum(each["severity"] == "NOTICE" for each in found["problems"]),
        "members": found.get("brokerGroups"),
        "disks": {each["broker"]: each for each in found.get("disks", [])},
        "groups": found.get("groups"),
        "topics": found.get("topics"),
        "next_due_at_ms": found.get("nextDueAtMs"),
        "dead_letters": found.get("deadLetters", {}),
        "changes": found.get("changes"),
        "unanswered": found.get("unanswered", []),
        "unreachable": found.get("unreachable", []),
    }


def page_of(problem: Document) -> str:
    """Return the page with more about a problem, below /ui."""
    if problem["code"] in _OF_GROUPS:
        return f"/groups/{segment(problem['object'])}"
    return "/cluster"


PAGES: Final = (Page("/overview", "overview", load_overview, period_s=PERIOD_S),)
