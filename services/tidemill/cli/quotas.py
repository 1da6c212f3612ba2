"""`tidemill quota ...`."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote

import typer

from tidemill.cli.messages import printable
from tidemill.cli.rest import call, call_pages, say, segment, show
from tidemill.common.exit_codes import EXIT_USAGE
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
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the effect and change nothing.")]


@app.command("list")
def list_quotas(context: typer.Context) -> None:
    """List all quotas.

    Example: tidemill quota list
    """
    quotas = call_pages(context, "/quotas", "quotas")
    rows = [
        (
            quota["kind"],
            printable(quota["subject"]),
            _rate(quota["publishMessagesPerS"] or quota["dispatchMessagesPerS"]),
            _rate(quota["publishBytesPerS"] or quota["dispatchBytesPerS"]),
            _stored(quota["storedBytes"]),
            _rate(quota["pendingTimers"]),
        )
        for quota in quotas
    ]
    header = ("KIND", "SUBJECT", "MESSAGES/S", "BYTES/S", "STORED-BYTES", "PENDING-TIMERS")
    show(context, quotas, header, rows)


@app.command("set")
def set_quota(
    context: typer.Context,
    user: User = None,
    client: Client = None,
    topic: Topic = None,
    prefix: Prefix = None,
    group: Group = None,
    messages: Annotated[
        int, typer.Option(min=0, help="Messages per second. Default: 0, no limit.")
    ] = 0,
    size: Annotated[
        int, typer.Option("--bytes", min=0, help="Bytes per second. Default: 0, no limit.")
    ] = 0,
    stored: Annotated[
        str | None,
        typer.Option(
            "--stored-bytes",
            help="Size of all stored messages of a topic or a prefix, such as 10GiB."
            " Default: no limit.",
        ),
    ] = None,
    timers: Annotated[
        int,
        typer.Option(
            "--pending-timers",
            min=0,
            help="Delayed messages of a topic or a prefix that are not due yet."
            " Default: 0, no limit.",
        ),
    ] = 0,
    dry_run: DryRun = False,
) -> None:
    """Set the limits of a subject. A limit that is not given is removed.

    Examples:
    * `tidemill quota set --topic orders --messages 1000 --bytes 10000000`
    * `tidemill quota set --prefix shop% --stored-bytes 10GiB --pending-timers 100000`
    """
    limited = "publish" if group is None else "dispatch"
    stored_bytes = 0 if stored is None else size_bytes(stored)
    body = {
        f"{limited}MessagesPerS": messages,
        f"{limited}BytesPerS": size,
        "storedBytes": stored_bytes,
        "pendingTimers": timers,
    }
    query = {"dryRun": "true"} if dry_run else {}
    path = _path(user, client, topic, prefix, group)
    quota = call(context, "PUT", path, body=body, query=query)
    verb = "would be set" if dry_run else "set"
    limits = f"messages/s {_rate(messages)}, bytes/s {_rate(size)}"
    if stored_bytes or timers:
        limits += f", stored bytes {_stored(stored_bytes)}, pending timers {_rate(timers)}"
    say(context, quota, f"quota of {_subject(quota)}: {verb}, {limits}")


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
