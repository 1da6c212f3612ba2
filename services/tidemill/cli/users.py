"""`tidemill user ...`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from tidemill.cli.acl import has_equal_entries
from tidemill.cli.credentials import replace_saved
from tidemill.cli.rest import (
    call,
    call_pages,
    check_is_sure,
    find_sendable,
    options_of,
    say,
    segment,
    show,
)
from tidemill.common.clock import SystemClock
from tidemill.common.errors import BadRequest
from tidemill.common.exit_codes import EXIT_REFUSED
from tidemill.common.prompts import confirm, fail, warn
from tidemill.common.rest_client import Json
from tidemill.common.times import DURATION, duration_within_ms, utc
from tidemill.security.acl import AccessEntry, check_names
from tidemill.security.identities import consumer_entries, pipeline_entries, producer_entries

app = typer.Typer(no_args_is_help=True, help="Create, list, show, change and delete users.")

Name = Annotated[str, typer.Argument(help="Name of the user: the access key of its clients.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the effect and change nothing.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask for a confirmation.")]
Force = Annotated[
    bool, typer.Option("--force", help="Also the user of this command, and the last super user.")
]
Roles = Annotated[
    list[str] | None,
    typer.Option("--role", help="Name of a role; repeat it for several. They replace the others."),
]
Accounts = Annotated[
    list[str] | None,
    typer.Option(
        "--service-account",
        metavar="NAMESPACE/NAME",
        help="Kubernetes service account whose tokens are credentials of the user; repeat it for"
        ' several. They replace the others; "" removes all.',
    ),
]
CertificateNames = Annotated[
    list[str] | None,
    typer.Option(
        "--certificate",
        metavar="NAME",
        help="URI name, DNS name or common name of a client certificate that each call of the user"
        ' must use; repeat it for several. They replace the others; "" removes all.',
    ),
]
Producers = Annotated[
    list[str] | None,
    typer.Option("--producer", metavar="TOPIC", help="May send to the topic; NAME* is a prefix."),
]
Consumers = Annotated[
    list[str] | None,
    typer.Option("--consumer", metavar="GROUP:TOPIC", help="May consume the topic in the group."),
]
Pipelines = Annotated[
    list[str] | None,
    typer.Option("--pipeline", metavar="GROUP:TOPIC", help="A pipeline may read the topic."),
]


class UserTypeName(StrEnum):
    """Whether a user needs rights."""

    SUPER = "SUPER"
    NORMAL = "NORMAL"


Type = Annotated[
    UserTypeName | None,
    typer.Option("--type", case_sensitive=False, help="SUPER may do everything. Default: NORMAL."),
]


@app.command("list")
def list_users(context: typer.Context) -> None:
    """List all users.

    Example: tidemill user list
    """
    users = call_pages(context, "/users", "users")
    rows = [
        (
            user["name"],
            user["type"],
            "yes" if user["enabled"] else "no",
            len(user["secrets"]),
            len(user["entries"]),
            " ".join(user["roles"]),
        )
        for user in users
    ]
    show(context, users, ("USER", "TYPE", "ENABLED", "SECRETS", "ENTRIES", "ROLES"), rows)


@app.command("show")
def show_user(context: typer.Context, name: Name) -> None:
    """Show a user with its secrets and their last uses.

    Processes know the uses since their start. `tidemill acl list NAME` shows the entries.

    Example: tidemill user show orders
    """
    user = call(context, "GET", f"/users/{segment(name)}")
    rows = [
        (
            secret["id"],
            secret["keyId"],
            utc(secret["createdAtMs"]),
            utc(secret["notAfterMs"]) if secret["notAfterMs"] else "never",
            _last_use_text(user, secret),
        )
        for secret in user["secrets"]
    ]
    columns = ("SECRET", "KEY", "CREATED", "ENDS", "LAST USE")
    show(context, user, columns, rows, names=[name])
    if unreachable := user.get("unreachable"):
        warn(f"the uses at these processes are unknown: {', '.join(unreachable)}")


def _last_use_text(user: Json, secret: Json) -> str:
    """Return the last known use of a secret."""
    if used_at_ms := secret.get("usedAtMs"):
        return utc(used_at_ms)
    # An admin process of an older version knows none.
    since_ms = user.get("usesSinceMs", 0)
    return f"none since {utc(max(since_ms, secret['createdAtMs']))}" if since_ms else "unknown"


@app.command("create")
def create_user(
    context: typer.Context,
    name: Name,
    kind: Type = None,
    roles: Roles = None,
    producers: Producers = None,
    consumers: Consumers = None,
    pipelines: Pipelines = None,
    accounts: Accounts = None,
    certificates: CertificateNames = None,
    dry_run: DryRun = False,
) -> None:
    """Create a user, and print its secret once. If an equal user exists, nothing changes.

    Examples:
    * `tidemill user create orders --producer orders --consumer billing:orders`
    * `tidemill user create ops --role operator`
    * `tidemill user create shop --producer orders --service-account shop/orders`
    """
    body = _body(kind, roles, accounts, certificates)
    body["entries"] = template_entries(producers, consumers, pipelines)
    found = call(context, "GET", f"/users/{segment(name)}", may_miss=True, may_be_forbidden=True)
    if found is not None:
        if not _is_equal(found, body):
            fail(
                f"user {name} exists with other settings; change them by `tidemill user set"
                f" {name}`, and its entries by `tidemill acl`",
                EXIT_REFUSED,
            )
        say(context, found, f"user {name}: exists already, unchanged; its secret stays")
        return
    body["ifVersion"] = 0
    user = call(context, "PUT", f"/users/{segment(name)}", body=body, query=_query(dry_run))
    say(
        context, user, f"user {name}: {'would be created' if dry_run else 'created'}{_secret(user)}"
    )


def _is_equal(found: Json, body: dict[str, Json]) -> bool:
    """Whether a user is as a new one with these settings would be."""
    lists = ("roles", "serviceAccounts", "certificates")
    return (
        found["enabled"]
        and found["type"] == body.get("type", UserTypeName.NORMAL)
        and all(set(found[field]) == set(body.get(field, ())) for field in lists)
        and has_equal_entries(found["entries"], body["entries"])
    )


def template_entries(
    producers: list[str] | None, consumers: list[str] | None, pipelines: list[str] | None
) -> list[Json]:
    """Return the JSON of the entries that the options name."""
    entries: list[AccessEntry] = []
    try:
        for topic in producers or ():
            entries += producer_entries(topic)
        for pair in consumers or ():
            entries += consumer_entries(*_pair(pair))
        for pair in pipelines or ():
            entries += pipeline_entries(*_pair(pair))
        check_names(entries)
    except BadRequest as error:
        raise typer.BadParameter(error.message) from error
    return [entry.to_item() for entry in _without_repetitions(entries)]


@app.command("set")
def set_user(
    context: typer.Context,
    name: Name,
    kind: Type = None,
    roles: Roles = None,
    accounts: Accounts = None,
    certificates: CertificateNames = None,
    force: Force = False,
    dry_run: DryRun = False,
) -> None:
    """Change the type, the roles, the service accounts or the certificates of a user.

    `tidemill acl` changes its entries.

    Example: tidemill user set ops --role operator --role auditor
    """
    found = call(context, "GET", f"/users/{segment(name)}")  # Ends the command if it is missing.
    body = {
        **_body(kind, roles, accounts, certificates),
        "ifVersion": found["version"],
        "force": force,
    }
    user = call(context, "PUT", f"/users/{segment(name)}", body=body, query=_query(dry_run))
    say(context, user, f"user {name}: {'would be changed' if dry_run else 'changed'}")


@app.command("enable")
def enable_user(context: typer.Context, name: Name, dry_run: DryRun = False) -> None:
    """Make the credentials of a user valid again.

    Example: tidemill user enable orders
    """
    _set_enabled(context, name, is_enabled=True, dry_run=dry_run)


@app.command("disable")
def disable_user(
    context: typer.Context, name: Name, force: Force = False, dry_run: DryRun = False
) -> None:
    """Refuse all credentials of a user from now on.

    Example: tidemill user disable orders
    """
    _set_enabled(context, name, is_enabled=False, force=force, dry_run=dry_run)


@app.command("rotate")
def rotate_user(
    context: typer.Context,
    name: Name,
    retire_after: Annotated[
        str,
        typer.Option(
            metavar=DURATION, help="Time until the present secret ends, at most 400d. 0s: at once."
        ),
    ] = "7d",
    force: Annotated[
        bool, typer.Option("--force", help="End the older one of two valid secrets now.")
    ] = False,
    dry_run: DryRun = False,
) -> None:
    """Make a new secret beside the present one, and print it once.

    Both are valid until the present one ends, so that clients change without an error. A user has
    at most two secrets: until the older one has ended, a second rotation needs --force. With
    --retire-after 0s, all other secrets end at once. If the command uses the saved credentials of
    the user, it saves the new secret there.

    Example: tidemill user rotate orders --retire-after 1d
    """
    retire_after_ms = duration_within_ms("--retire-after", retire_after, least="0s", most="400d")
    body = {"retireAfterMs": retire_after_ms, "force": force}
    path = f"/users/{segment(name)}:rotate"
    user = call(context, "POST", path, body=body, query=_query(dry_run))
    done = "would have a new secret" if dry_run else "new secret"
    sent = find_sendable(options_of(context))
    if user.get("secret") and sent is not None and not sent.is_named and sent.user == name:
        done += f", saved in {replace_saved(name, user['secret'], sent.address)}"
    now_ms = SystemClock().wall_ms()
    ends = [each["notAfterMs"] for each in user.get("secrets", ()) if each["notAfterMs"] > now_ms]
    if ends:
        done += f"; the former one is valid until {utc(max(ends))}"
    elif retire_after_ms == 0:
        done += "; the former ones have ended" if not dry_run else "; the former ones would end"
    say(context, user, f"user {name}: {done}{_secret(user)}")


@app.command("delete")
def delete_user(
    context: typer.Context,
    name: Name,
    is_sure: Yes = False,
    force: Force = False,
    dry_run: DryRun = False,
) -> None:
    """Delete a user. Its credentials are invalid at once.

    Example: tidemill user delete orders --dry-run
    """
    path = f"/users/{segment(name)}"
    forced = {"force": "true"} if force else {}
    if not dry_run:
        check_is_sure("user delete", is_sure=is_sure)
        if not is_sure:
            call(context, "DELETE", path, query=_query(dry_run=True) | forced)
            confirm(f"Delete user {name}?")
    deletion = call(context, "DELETE", path, query=_query(dry_run) | forced)
    say(context, deletion, f"user {name}: {'would be deleted' if dry_run else 'deleted'}")


def _set_enabled(
    context: typer.Context, name: str, *, is_enabled: bool, force: bool = False, dry_run: bool
) -> None:
    path = f"/users/{segment(name)}"
    found = call(context, "GET", path)  # Ends the command if it is missing.
    body = {"enabled": is_enabled, "ifVersion": found["version"], "force": force}
    user = call(context, "PUT", path, body=body, query=_query(dry_run))
    done = "enabled" if is_enabled else "disabled"
    say(context, user, f"user {name}: {'would be ' if dry_run else ''}{done}")


def _body(
    kind: UserTypeName | None,
    roles: list[str] | None,
    accounts: list[str] | None,
    certificates: list[str] | None,
) -> dict[str, Json]:
    body: dict[str, Json] = {}
    if kind is not None:
        body["type"] = kind.value
    if roles is not None:
        body["roles"] = roles
    if accounts is not None:
        body["serviceAccounts"] = [account for account in accounts if account]
    if certificates is not None:
        body["certificates"] = [name for name in certificates if name]
    return body


def _pair(text: str) -> tuple[str, str]:
    group, separator, topic = text.partition(":")
    if not separator or not group or not topic:
        raise typer.BadParameter(f"write GROUP:TOPIC, not {text!r}")
    return group, topic


def _without_repetitions(entries: list[AccessEntry]) -> list[AccessEntry]:
    return list(dict.fromkeys(entries))


def _query(dry_run: bool) -> dict[str, str]:
    return {"dryRun": "true"} if dry_run else {}


def _secret(user: Json) -> str:
    secret = user.get("secret")
    if not secret:
        return ""
    warn("the secret is shown once; save it now")
    return f"\nsecret {secret}"
