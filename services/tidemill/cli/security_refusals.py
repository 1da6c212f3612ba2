"""The refused calls that `tidemill security status` shows."""

from __future__ import annotations

from collections import Counter
from typing import Final, NamedTuple

import typer

from tidemill.cli.rest import call, show_table
from tidemill.common.prompts import warn

DAY_MS: Final = 86_400_000
PAGE_SIZE: Final = 1_000
PAGES_MAX: Final = 20  # of the newest refusals; a process keeps at most 10,000
SHOWN_MAX: Final = 10


class RefusedCalls(NamedTuple):
    """Equal calls that were refused."""

    by: str  # the user, or the address of a call without one
    call: str
    resource: str
    result: str  # refused, would_refuse
    calls: int


def find_refusals(context: typer.Context, now_ms: int) -> list[RefusedCalls] | None:
    """Return the refused calls of the last day, the most frequent first.

    Returns None if the caller may not read the audit log.
    """
    counts: Counter[tuple[str, str, str, str]] = Counter()
    query = {"kind": "refusal", "fromMs": str(now_ms - DAY_MS), "pageSize": str(PAGE_SIZE)}
    for _ in range(PAGES_MAX):
        page = call(context, "GET", "/audit", query=query, may_be_forbidden=True)
        if page is None:
            return None
        for record in page["records"]:
            by = record.get("user") or record.get("from", "")
            key = (by, record.get("call", ""), record.get("resource", ""), record["result"])
            counts[key] += record.get("count", 1)
        if not (token := page.get("nextPageToken")):
            break
        query["pageToken"] = token
    else:
        warn(f"only the newest {PAGES_MAX * PAGE_SIZE} refusals are counted")
    return [RefusedCalls(*key, count) for key, count in counts.most_common()]


def show_refusals(context: typer.Context, refusals: list[RefusedCalls] | None) -> None:
    """Print the refused calls."""
    if refusals is None:
        typer.echo("\nrefusals in the last day: unknown, because they need Get on Cluster:audit")
        return
    total = sum(refusal.calls for refusal in refusals)
    typer.echo(f"\nrefusals in the last day: {total or 'none'}")
    if refusals:
        show_table(context, ("BY", "CALL", "RESOURCE", "RESULT", "CALLS"), refusals[:SHOWN_MAX])
    if len(refusals) > SHOWN_MAX:
        typer.echo(
            f"and {len(refusals) - SHOWN_MAX} kinds more; see `tidemill audit list --kind refusal`"
        )
