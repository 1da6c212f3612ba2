"""The overview: problems, broker groups, the worst consumer groups, the largest topics."""

from __future__ import annotations

from http import HTTPStatus
from typing import Final, NamedTuple

from tidemill.admin.console.page import Page, PageCall, Values, segment
from tidemill.admin.console.rendering import number_text
from tidemill.admin.console.rest_calls import CallProblem, Document

ROWS: Final = 5  # of each table
PERIOD_S: Final = 2.0  # It has six calls of the REST API.


class Problem(NamedTuple):
    """A fact that needs an operator, and the page that has more about it."""

    object: str
    text: str
    page: str


async def load_overview(call: PageCall) -> Values:
    """Read the parts that the caller may see."""
    groups = await _allowed(call, "/groups", sort="-lag", pageSize=ROWS)
    topics = await _allowed(call, "/topics", sort="-bytes", pageSize=ROWS)
    timers = await _allowed(call, "/timers", pageSize=1)
    members = await _allowed(call, "/broker-groups")
    storage = await _allowed(call, "/storage", pageSize=1)
    changes = await _allowed(call, "/audit", kind="change", pageSize=ROWS)
    found = (groups, topics, timers, storage, changes)
    return {
        "groups": None if groups is None else groups["groups"],
        "topics": None if topics is None else topics["topics"],
        "next_due_at_ms": _next_due(timers),
        "members": None if members is None else members["items"],
        "disks": {} if storage is None else {each["broker"]: each for each in _disks(storage)},
        "changes": None if changes is None else changes["records"],
        "problems": find_problems(members, storage, groups),
        "unreachable": sorted({name for each in found for name in _lacking(each)}),
    }


async def _allowed(call: PageCall, path: str, **query: str | int) -> Document | None:
    """Read a document; None without the right to read it. Raises CallProblem."""
    try:
        return await call.api.get(path, **query)
    except CallProblem as problem:
        if problem.status is HTTPStatus.FORBIDDEN:
            return None
        raise


def _lacking(found: Document | None) -> list[str]:
    return [] if found is None else found.get("unreachable", [])


def _disks(storage: Document) -> list[Document]:
    disks: list[Document] = storage["brokerGroups"]
    return disks


def _next_due(timers: Document | None) -> int | None:
    if timers is None or not timers["timers"]:
        return None
    due_at_ms: int = timers["timers"][0]["dueAtMs"]
    return due_at_ms


def find_problems(
    members: Document | None, storage: Document | None, groups: Document | None
) -> list[Problem]:
    """Return the problems, the most urgent first."""
    problems = []
    for member in [] if members is None else members["items"]:
        if not member["reachable"]:
            reason = member.get("reason", "no answer")
            problems.append(Problem(member["name"], f"unreachable: {reason}", "/cluster"))
        behind = [replica["name"] for replica in member["replicas"] if not replica["inSync"]]
        if behind:
            problems.append(
                Problem(member["name"], f"not in sync: {', '.join(behind)}", "/cluster")
            )
    problems += [
        Problem(disk["broker"], "the disk is full: sends fail", "/cluster")
        for disk in ([] if storage is None else _disks(storage))
        if disk["isFull"]
    ]
    for group in [] if groups is None else groups["groups"]:
        if group.get("lag") and group.get("consumers") == 0:
            text = f"{number_text(group['lag'])} messages and no consumer"
            problems.append(Problem(group["name"], text, f"/groups/{segment(group['name'])}"))
    return problems


PAGES: Final = (Page("/overview", "overview", load_overview, period_s=PERIOD_S),)
