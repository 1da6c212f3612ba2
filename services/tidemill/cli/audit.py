"""`tidemill audit ...`: changes, refused calls and accesses."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Final

import typer

from tidemill.cli.rest import call, show, warn_unreachable
from tidemill.common.prompts import warn
from tidemill.common.rest_client import Json
from tidemill.common.times import DURATION, duration_ms, utc
from tidemill.security.audit_results import AuditAction, AuditResult

app = typer.Typer(no_args_is_help=True, help="Show changes, refused calls and accesses.")

PAGE_SIZE: Final = 1_000  # the limit of the API
LIMIT: Final = 100
COLUMNS: Final = ("TIME", "BY", "ACTION", "RESOURCE", "RESULT", "CHANGE")


# Settings that a topic or consumer group may lack, so that a change adds or removes them.
OPTIONAL: Final = frozenset(
    {"pausedUntilMs", "pauseReason", "deliverySpreadMs", "retention", "dedup", "transaction"}
)
TIME_NAMES: Final = ("AtMs", "untilMs", "UntilMs", "notAfterMs")  # ends of the names of Unix times


class Kind(StrEnum):
    """The kinds of records."""

    CHANGE = "change"
    REFUSAL = "refusal"
    ACCESS = "access"


@app.callback()
def noun() -> None:
    """Keep `list` a command of its own, although it is the only one."""


@app.command("list")
def list_audit(
    context: typer.Context,
    since: Annotated[
        str,
        typer.Option(metavar=DURATION, help="Only as old as this, such as 1h. Default: any age."),
    ] = "",
    kind: Annotated[Kind | None, typer.Option(help="Only records of this kind.")] = None,
    user: Annotated[str, typer.Option(help="Only of this user, verified or claimed.")] = "",
    resource: Annotated[
        str, typer.Option(help="Only of this resource, such as Topic:orders or Topic:ord*.")
    ] = "",
    action: Annotated[
        AuditAction | None, typer.Option(case_sensitive=False, help="Only this action.")
    ] = None,
    client: Annotated[
        str, typer.Option(help="Only calls of this client id, and changes of it, such as a kick.")
    ] = "",
    result: Annotated[AuditResult | None, typer.Option(help="Only this result.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of records.")] = LIMIT,
) -> None:
    """List changes, refused calls and accesses, the newest first.

    Examples: tidemill audit list --since 1h --kind change; tidemill audit list --resource Group:g
    """
    filters = {
        "kind": "" if kind is None else kind.value,
        "user": user,
        "resource": resource,
        "action": "" if action is None else action.value,
        "clientId": client,
        "result": "" if result is None else result.value,
        "fromMs": str(max(int(time.time() * 1_000) - duration_ms(since), 0)) if since else "",
    }
    query = {name: value for name, value in filters.items() if value}
    records, has_more = _find(context, query, limit)
    rows = [_row(record) for record in records]
    names = dict.fromkeys(row[COLUMNS.index("RESOURCE")] for row in rows)
    show(context, records, COLUMNS, rows, names=names)
    if has_more:
        warn(f"there are more than {limit} records; add --limit, or filters")


def _find(context: typer.Context, query: Mapping[str, str], limit: int) -> tuple[list[Json], bool]:
    """Return the newest records, and whether there are more."""
    records: list[Json] = []
    token = ""
    while True:
        size = min(limit - len(records), PAGE_SIZE)
        paged = {**query, "pageSize": str(size), **({"pageToken": token} if token else {})}
        page = call(context, "GET", "/audit", query=paged)
        records += page["records"]
        if not token:
            warn_unreachable(page)
        token = page.get("nextPageToken", "")
        if not token or len(records) >= limit:
            return records, bool(token)


def _row(record: Mapping[str, Any]) -> tuple[str, ...]:
    user = record.get("user") or record.get("claimedUser", "")
    by = " at ".join(filter(None, (user, record.get("from", ""))))
    cells = (
        _utc(record["atMs"]),
        by,
        record.get("action") or record.get("call", ""),
        record.get("resource", ""),
        record.get("result", ""),
        _change(record),
    )
    return tuple(map(_escaped, cells))


def _escaped(text: str) -> str:
    """Escape characters that would move the cursor; the text may come from a client."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def _change(record: Mapping[str, Any]) -> str:
    """Return the changed fields, or the reason of a refusal, with the number of equal calls."""
    text = record.get("reason", "")
    before, after = record.get("before") or {}, record.get("after") or {}
    if not text:
        names = list({**before, **after})
        is_update = record.get("action") == AuditAction.UPDATE
        text = ", ".join(
            _difference(name, before, after, has_default=is_update and name in OPTIONAL)
            for name in names
        )
    count = record.get("count", 1)
    return f"{text} ({count} times)" if count > 1 else text


def _difference(
    name: str, before: Mapping[str, Any], after: Mapping[str, Any], *, has_default: bool
) -> str:
    """Return a field with its values; with `has_default`, a missing value is shown too."""
    old, new = before.get(name), after.get(name)
    if isinstance(old, list) and isinstance(new, list) and old != new:
        if _is_numbers(old) and _is_numbers(new) and len(old) == len(new):
            pairs = enumerate(zip(old, new, strict=True))
            return "; ".join(f"{name}[{n}] {a} -> {b}" for n, (a, b) in pairs if a != b)
        olds, news = ([_text(_with_times(one, name)) for one in each] for each in (old, new))
        parts = [f"-{text}" for text in olds if text not in news]
        parts += [f"+{text}" for text in news if text not in olds]
        return f"{name} {'; '.join(parts)}" if parts else f"{name} in another order"
    values = [
        _text(_with_times(state[name], name)) if name in state else "unset"
        for state in (before, after)
        if has_default or name in state
    ]
    return f"{name} {' -> '.join(dict.fromkeys(values))}"


def _is_numbers(values: list[object]) -> bool:
    """Whether a list has a number per queue."""
    return all(isinstance(each, int) for each in values)


def _with_times(value: Any, name: str) -> Any:
    """Return a value with its Unix times as UTC; 0 means that there is none."""
    if isinstance(value, dict):
        return {key: _with_times(each, key) for key, each in value.items()}
    if isinstance(value, list):
        return [_with_times(each, name) for each in value]
    if name.endswith(TIME_NAMES) and isinstance(value, int):
        return _utc(value) if value else "none"
    return value


def _utc(at_ms: int) -> str:
    return utc(at_ms // 1_000 * 1_000).replace(".000Z", "Z")


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, dict) and {"resource", "actions", "decision"} <= value.keys():
        return _entry_text(value)
    if isinstance(value, list):
        return "; ".join(map(_text, value)) or "none"
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


def _entry_text(entry: Mapping[str, Any]) -> str:
    """Return an entry of a user or a role as the arguments of `tidemill acl` name it."""
    actions, sources = ",".join(entry["actions"]), ",".join(entry.get("sources", ()))
    text = f"{entry['decision']} {entry['resource']} {actions}"
    return f"{text} from {sources}" if sources else text
