"""Processes: what runs, with which settings; log levels and slow calls."""

from __future__ import annotations

from typing import Final

from tidemill.admin.console.actions import PageAction, Rows
from tidemill.admin.console.forms import Field, FieldKind
from tidemill.admin.console.page import Page, PageCall, Values
from tidemill.admin.console.rendering import time_text
from tidemill.admin.http.rest_calls import Document

SLOW_CALLS_SHOWN: Final = 20
REFRESH_S: Final = 5.0  # each refresh asks all processes
SKEW_MS: Final = 100  # smaller differences of clocks are not shown


async def load_processes(call: PageCall) -> Values:
    """Read all processes and the newest slow calls."""
    topic = call.get("topic")
    found = await call.api.get("/processes")
    slow = await call.api.get("/slow-calls", topic=topic)
    return {
        "processes": found["items"],
        "calls": slow["items"][:SLOW_CALLS_SHOWN],
        "topic": topic or "",
        "skew_ms": SKEW_MS,
        "unreachable": found.get("unreachable", []),
    }


async def load_process(call: PageCall) -> Values:
    """Read one process and its settings."""
    path = f"/processes/{call.path['process']}"
    process, settings = await call.api.get(path), await call.api.get(f"{path}/settings")
    items = sorted(settings["items"], key=lambda each: each["value"] == each["default"])
    return {"process": process, "settings": items}


def _changed(found: Document) -> Rows:
    rows = []
    for each in found["items"]:
        until = f" until {time_text(each['untilMs'])}" if "untilMs" in each else ""
        rows.append((each["process"], f"{each['before']} to {each['level']}{until}"))
    return rows


PAGES: Final = (
    Page("/settings", "processes", load_processes, period_s=REFRESH_S),
    Page("/settings/{process}", "process", load_process, is_live=False),
)
ACTIONS: Final = (
    PageAction(
        path="/settings/{process}/log-level",
        method="PUT",
        rest="/processes/{process}/log-level",
        title="Log level of {process}",
        about="Changes the log level for some time, without a restart. * means all processes.",
        back="/settings",
        fields=(
            Field(
                "level",
                "Level",
                FieldKind.CHOICE,
                "Empty: the level of the settings.",
                choices=("", "debug", "info", "warning", "error"),
            ),
            Field("forMs", "For (ms)", FieldKind.NUMBER, "At most a day.", default="1800000"),
        ),
        rows=_changed,
        button=lambda _found, path: f"Change the log level of {path['process']}",
    ),
)
