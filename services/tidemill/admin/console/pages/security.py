"""Users, roles, tokens, quotas and bans, and the answer to "may this user do that?"."""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

from tidemill.admin.console.actions import PageAction, Rows
from tidemill.admin.console.forms import ENTRY_EXAMPLE, Field, FieldKind, entry_line
from tidemill.admin.console.page import Page, PageCall, Values, url
from tidemill.admin.console.rendering import time_text
from tidemill.admin.http.rest_calls import CallProblem, Document

ROWS: Final = 50  # per page
ACTIONS_OF_RIGHTS: Final = ("Pub", "Sub", "Create", "Update", "Delete", "Get", "List")


async def load_security(call: PageCall) -> Values:
    """Read the mode, a page of users, and all lists of limits."""
    answer: Document | None = None
    question = {name: call.get(name) or "" for name in ("user", "action", "resource")}
    error = ""
    if all(question.values()):
        try:
            answer = (await call.api.call("POST", "/access:check", body={**question})).document
        except CallProblem as problem:
            if problem.status is not HTTPStatus.BAD_REQUEST:
                raise
            error = problem.detail
    users = await call.api.get("/users", pageSize=ROWS, pageToken=call.get("pageToken"))
    token = users.get("nextPageToken")
    return {
        "security": await call.api.get("/security"),
        "users": users["users"],
        "next": url("/security", pageToken=token) if token else "",
        "roles": (await call.api.get("/roles"))["roles"],
        "quotas": (await call.api.get("/quotas"))["quotas"],
        "bans": (await call.api.get("/bans"))["bans"],
        "question": question,
        "answer": answer,
        "error": error,
        "actions": ACTIONS_OF_RIGHTS,
    }


async def load_user(call: PageCall) -> Values:
    """Read a user with its secrets and entries."""
    return {"user": await call.api.get(f"/users/{call.path['user']}")}


def _user_rows(found: Document) -> Rows:
    user = found.get("user", found)
    rows = [
        ("Enabled", "yes" if user["enabled"] else "no"),
        ("Type", user["type"]),
        ("Roles", ", ".join(user["roles"]) or "none"),
        ("Entries", "; ".join(entry_line(each) for each in user["entries"]) or "none"),
    ]
    if "tokens" in found:
        rows.append(("Tokens that end", str(len(found["tokens"]))))
    if found.get("secret"):
        rows.append(("Secret, shown once", found["secret"]))
    return rows


def _ban_rows(found: Document) -> Rows:
    ban = found.get("ban", found)
    until = "for ever" if ban["untilMs"] <= 0 else time_text(ban["untilMs"])
    return [("Banned", f"{ban['kind']} {ban['value']}"), ("Until", until)]


PAGES: Final = (
    Page("/security", "security", load_security, is_live=False),
    Page("/security/users/{user}", "user", load_user, is_live=False),
)
ACTIONS: Final = (
    PageAction(
        path="/security/users/{user}/set",
        method="PUT",
        rest="/users/{user}",
        title="Change user {user}",
        about="A user that does not exist is created, and its secret is shown once.",
        back="/security",
        fields=(
            Field("type", "Type", FieldKind.CHOICE, choices=("", "NORMAL", "SUPER")),
            Field("enabled", "May call", FieldKind.FLAG, default="true", sends_empty=True),
            Field("roles", "Roles, one per line", FieldKind.LIST, sends_empty=True),
            Field(
                "entries",
                "Entries, one per line",
                FieldKind.ENTRIES,
                f"Such as `{ENTRY_EXAMPLE}`, `deny Topic:payments Pub`, or with"
                " `from 10.1.0.0/16` at the end.",
                sends_empty=True,
            ),
        ),
        current="/users/{user}",
        texts_of=lambda found: {
            "type": found["type"],
            "enabled": "true" if found["enabled"] else "",
            "roles": "\n".join(found["roles"]),
            "entries": "\n".join(entry_line(each) for each in found["entries"]),
        },
        rows=_user_rows,
        button=lambda _found, path: f"Save user {path['user']}",
        shows_secret=True,
    ),
    PageAction(
        path="/security/users/{user}/rotate",
        method="POST",
        rest="/users/{user}:rotate",
        title="New secret of {user}",
        about="The secret that is used today stays valid for the given time.",
        back="/security/users/{user}",
        fields=(
            Field(
                "retireAfterMs", "End of the old one, in ms", FieldKind.NUMBER, default="604800000"
            ),
        ),
        rows=_user_rows,
        button=lambda _found, path: f"Make a new secret of {path['user']}",
        shows_secret=True,
    ),
    PageAction(
        path="/security/users/{user}/delete",
        method="DELETE",
        rest="/users/{user}",
        title="Delete user {user}",
        about="Its connections end within a second, and its tokens end with it.",
        back="/security",
        rows=_user_rows,
        button=lambda _found, path: f"Delete user {path['user']}",
        is_loss=True,
    ),
    PageAction(
        path="/clients/{client_id}/ban",
        method="POST",
        rest="/bans",
        title="Ban {client_id}",
        about="The client is refused everywhere, until the ban ends.",
        back="/clients",
        body={"clientId": "client_id"},
        fields=(
            Field("forMs", "For, in ms", FieldKind.NUMBER, "Empty: for ever.", default="3600000"),
            Field("reason", "Reason"),
        ),
        rows=_ban_rows,
        button=lambda _found, path: f"Ban {path['client_id']}",
    ),
    PageAction(
        path="/security/bans/{ban}/delete",
        method="DELETE",
        rest="/bans/{ban}",
        title="End the ban {ban}",
        about="Calls are accepted again.",
        back="/security",
        rows=_ban_rows,
        button=lambda _found, path: f"End the ban {path['ban']}",
    ),
)
