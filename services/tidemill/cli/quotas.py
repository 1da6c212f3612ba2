"""`tidemill quota ...`.

`set_quota` is one piece because each of its options is a parameter.
"""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote

import typer

from tidemill.cli.bans import FORMER
from tidemill.cli.messages import printable
from tidemill.cli.rest import call, call_pages, say, segment, show
from tidemill.common.exit_codes import EXIT_REFUSED, EXIT_USAGE
from tidemill.common.prompts import fail
from tidemill.common.rest_client import Json
from tidemill.common.sizes import size_bytes, size_text
from tidemill.security.quotas import QuotaKind

app = typer.Typer(no_args_is_help=True, help="Limit sends and deliveries.")

User = Annotated[str | None, typer.Option(help="Name of the user.")]
Client = Annotated[str | None, typer.Option(help="Id of the client, of all users.")]
Topic = Annotated[str | None, typer.Option(help="Full name of the topic.")]
Prefix = Annotated[
    str | None, typer.Option(help="Begin of full topic names; shop% is the namespace shop.")
]
Group = Annotated[
    str | None, typer.Option(help="Full name of the consumer group, to limit its deliveries.")
]
REMOVED = "Remove this limit."
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the effect and change nothing.")]


@app.command("list")
def list_quotas(context: typer.Context) -> None:
    """List all quotas. That of a deleted user does not apply to a later user of its name.

    With `-o name`, each line is the option of a subject for the other commands.

    Examples:
    * `tidemill quota list`
    * `tidemill -o name quota list | xargs -n 1 tidemill quota delete --dry-run`
    """
    quotas = call_pages(context, "/quotas", "quotas")
    rows = [
        (
            quota["kind"],
            printable(quota["subject"]) + (FORMER if quota["ofDeletedUser"] else ""),
            _rate(quota["publishMessagesPerS"] or quota["dispatchMessagesPerS"]),
            _rate(quota["publishBytesPerS"] or quota["dispatchBytesPerS"]),
            _stored(quota["storedBytes"]),
            _rate(quota["pendingTimers"]),
        )
        for quota in quotas
    ]
    header = ("KIND", "SUBJECT", "MESSAGES/S", "BYTES/S", "STORED-BYTES", "PENDING-TIMERS")
    # The other commands take a subject as such an option.
    names = [f"--{quota['kind']}={quota['subject']}" for quota in quotas]
    show(context, quotas, header, rows, names=names)


@app.command("set")
def set_quota(
    context: typer.Context,
    user: User = None,
    client: Client = None,
    topic: Topic = None,
    prefix: Prefix = None,
    group: Group = None,
    messages: Annotated[int | None, typer.Option(min=1, help="Messages per second.")] = None,
    size: Annotated[int | None, typer.Option("--bytes", min=1, help="Bytes per second.")] = None,
    stored: Annotated[
        str | None,
        typer.Option(
            "--stored-bytes",
            help="Size of all stored messages of a topic or a prefix, such as 10GiB.",
        ),
    ] = None,
    timers: Annotated[
        int | None,
        typer.Option(
            "--pending-timers",
            min=1,
            help="Delayed messages of a topic or a prefix that are not due yet.",
        ),
    ] = None,
    no_messages: Annotated[bool, typer.Option("--no-messages", help=REMOVED)] = False,
    no_size: Annotated[bool, typer.Option("--no-bytes", help=REMOVED)] = False,
    no_stored: Annotated[bool, typer.Option("--no-stored-bytes", help=REMOVED)] = False,
    no_timers: Annotated[bool, typer.Option("--no-pending-timers", help=REMOVED)] = False,
    dry_run: DryRun = False,
) -> None:
    """Set limits of a subject. Limits that are not named stay.

    Examples:
    * `tidemill quota set --topic orders --messages 1000 --bytes 10000000`
    * `tidemill quota set --prefix shop% --stored-bytes 10GiB --pending-timers 100000`
    * `tidemill quota set --topic orders --no-bytes`
    """
    path = _path(user, client, topic, prefix, group)
    limited = "publish" if group is None else "dispatch"
    wanted = {
        f"{limited}MessagesPerS": _wanted("--messages", messages, is_removed=no_messages),
        f"{limited}BytesPerS": _wanted("--bytes", size, is_removed=no_size),
        "storedBytes": _wanted("--stored-bytes", _stored_bytes(stored), is_removed=no_stored),
        "pendingTimers": _wanted("--pending-timers", timers, is_removed=no_timers),
    }
    named = {field: limit for field, limit in wanted.items() if limit is not None}
    if not named:
        fail(
            "name a limit: --messages, --bytes, --stored-bytes or --pending-timers, or remove one,"
            " such as --no-messages",
            EXIT_USAGE,
        )
    found = call(context, "GET", path, may_miss=True)
    # A later user of a name inherits no limits.
    is_new = found is None or found["ofDeletedUser"]
    present = {} if is_new else {field: found[field] for field in wanted}
    limits = {**dict.fromkeys(wanted, 0), **present, **named}
    if not any(limits.values()):
        fail("no limit would remain; use `tidemill quota delete`", EXIT_REFUSED)
    body = {**limits, "ifVersion": 0 if found is None else found["version"]}
    query = {"dryRun": "true"} if dry_run else {}
    quota = call(context, "PUT", path, body=body, query=query)
    verb = "would be set" if dry_run else "set"
    messages_now, size_now, stored_now, timers_now = limits.values()
    text = f"messages/s {_rate(messages_now)}, bytes/s {_rate(size_now)}"
    if stored_now or timers_now:
        text += f", stored bytes {_stored(stored_now)}, pending timers {_rate(timers_now)}"
    say(context, quota, f"quota of {_subject(quota)}: {verb}, {text}")


def _wanted(option: str, limit: int | None, *, is_removed: bool) -> int | None:
    """Return the limit to set, 0 to remove it, or None to keep it."""
    if not is_removed:
        return limit
    if limit is not None:
        fail(f"{option} sets a limit that --no-{option.removeprefix('--')} removes", EXIT_USAGE)
    return 0


def _stored_bytes(text: str | None) -> int | None:
    if text is None:
        return None
    limit = size_bytes(text)
    if not limit:
        fail("--stored-bytes is at least 1B; --no-stored-bytes removes the limit", EXIT_USAGE)
    return limit


@app.command("delete")
def delete_quota(
    context: typer.Context,
    user: User = None,
    client: Client = None,
    topic: Topic = None,
    prefix: Prefix = None,
    group: Group = None,
    dry_run: DryRun = False,
) -> None:
    """Delete all limits of a subject.

    Example: tidemill quota delete --topic orders
    """
    query = {"dryRun": "true"} if dry_run else {}
    deletion = call(context, "DELETE", _path(user, client, topic, prefix, group), query=query)
    verb = "would be deleted" if dry_run else "deleted"
    say(context, deletion, f"quota of {_subject(deletion['quota'])}: {verb}")


def _path(
    user: str | None, client: str | None, topic: str | None, prefix: str | None, group: str | None
) -> str:
    """Return the path of the only given subject, or end the command."""
    subjects = {
        QuotaKind.USER: user,
        QuotaKind.CLIENT: client,
        QuotaKind.TOPIC: topic,
        QuotaKind.PREFIX: prefix,
        QuotaKind.GROUP: group,
    }
    given = [(kind, value) for kind, value in subjects.items() if value]
    if len(given) != 1:
        fail("name one subject: --user, --client, --topic, --prefix or --group", EXIT_USAGE)
    [(kind, value)] = given
    if kind is QuotaKind.CLIENT:
        segment(value.replace("/", "_"))  # A client chooses its id, so it may have slashes.
        return f"/quotas/{kind}/{quote(value, safe='')}"
    return f"/quotas/{kind}/{segment(value)}"


def _subject(quota: Json) -> str:
    return f"{quota['kind']} {printable(quota['subject'])}"


def _rate(limit: int) -> str:
    return str(limit) if limit else "no limit"


def _stored(limit: int) -> str:
    return size_text(limit) if limit else "no limit"
