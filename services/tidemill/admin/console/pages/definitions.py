"""Definitions as a file, and support bundles."""

from __future__ import annotations

import json
from typing import Any, Final

from tidemill.admin.console.actions import PageAction, Rows
from tidemill.admin.console.forms import Field, FieldKind
from tidemill.admin.http.rest_calls import Document

SHOWN_MAX: Final = 100  # changes that delete nothing


def _changes(found: Document) -> Rows:
    # What is lost is never cut.
    changes = sorted(found["changes"], key=lambda one: one["action"] != "DELETE")
    deletions = sum(one["action"] == "DELETE" for one in changes)
    shown = changes[: deletions + SHOWN_MAX]
    rows = [(f"{one['action'].lower()} {one['kind']} {one['name']}", _effect(one)) for one in shown]
    if len(changes) > len(shown):
        rows.append(("And other changes", str(len(changes) - len(shown))))
    return rows or [("Changes", "none: the cluster is as the file defines it")]


def _effect(change: Document) -> str:
    """Return the changed settings, or the loss, in one line."""
    if "loss" in change:
        return "loses " + ", ".join(
            f"{name} {_short(value)}" for name, value in change["loss"].items()
        )
    before, after = change.get("before", {}), change.get("after", {})
    changed = [
        f"{name} {_short(before.get(name))} to {_short(value)}"
        for name, value in after.items()
        if before and before.get(name) != value
    ]
    return ", ".join([*changed, *([change["note"]] if "note" in change else [])]) or "as defined"


def _short(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


def _apply_button(found: Document, _path: object) -> str:
    return f"Make {len(found['changes'])} changes" if found["changes"] else ""


ACTIONS: Final = (
    PageAction(
        path="/settings-definitions/apply",
        method="POST",
        rest="/definitions:apply",
        title="Apply definitions",
        about="Makes roles, users, topics, consumer groups and quotas as a file defines them. A"
        " missing field does not change, and a kind that the file lacks is left alone.",
        back="/settings",
        fields=(
            Field(
                "file",
                "File",
                FieldKind.DOCUMENT,
                "JSON, as the download has it. For YAML: tidemill definitions apply.",
                is_required=True,
            ),
            Field(
                "prune",
                "Delete objects of the listed kinds that the file lacks",
                FieldKind.FLAG,
                is_query=True,
            ),
        ),
        rows=_changes,
        button=_apply_button,
        is_loss=True,
    ),
    PageAction(
        path="/settings-bundle/make",
        method="POST",
        rest="/support-bundles",
        title="Make a support bundle",
        about="Collects states, settings, audit and log lines of all processes in one file, without"
        " bodies and secrets. It is kept for an hour.",
        back="/settings",
        fields=(Field("anonymize", "Replace names and addresses by hashes", FieldKind.FLAG),),
        rows=lambda _found: [],
        button=lambda _found, _path: "Make a support bundle",
        has_dry_run=False,
    ),
)
