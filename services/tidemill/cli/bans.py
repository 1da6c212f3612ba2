"""`tidemill ban ...`."""

from __future__ import annotations

from typing import Annotated

import typer

from tidemill.cli.clients import is_unknown_client, warn_of_stranger
from tidemill.cli.messages import printable
from tidemill.cli.rest import call, call_pages, say, segment, show
from tidemill.common.errors import BadRequest
from tidemill.common.exit_codes import EXIT_USAGE
from tidemill.common.prompts import fail
from tidemill.common.rest_client import Json
from tidemill.common.times import DURATION, duration_within_ms, utc
from tidemill.security.bans import BanKind, range_text
from tidemill.security.subjects import subject_name

app = typer.Typer(no_args_is_help=True, help="Ban users, clients and addresses.")

# Behind the name of a user that was deleted. A later user of the name is another one.
FORMER = " (deleted user)"
User = Annotated[str | None, typer.Option(help="Name of the user.")]
Client = Annotated[str | None, typer.Option(help="Id of the client, of all users.")]
Address = Annotated[str | None, typer.Option(metavar="CIDR", help="An address or a range.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the effect and change nothing.")]


@app.command("list")
def list_bans(context: typer.Context) -> None:
    """List all bans, also those that have ended, and those of deleted users.

    Example: tidemill ban list
    """
    bans = call_pages(context, "/bans", "bans")
    rows = [
        (
            ban["kind"],
            printable(ban["value"]) + (FORMER if ban["ofDeletedUser"] else ""),
            _end(ban),
            printable(ban["reason"]),
        )
        for ban in bans
    ]
    names = [ban["value"] for ban in bans]
    show(context, bans, ("KIND", "SUBJECT", "UNTIL", "REASON"), rows, names=names)


@app.command("create")
def create_ban(
    context: typer.Context,
    user: User = None,
    client: Client = None,
    address: Address = None,
    duration: Annotated[
        str | None,
        typer.Option(
            "--for", metavar=DURATION, help="Time until it ends, at most 3650d. Default: no end."
        ),
    ] = None,
    reason: Annotated[str, typer.Option(help="The reason, which only operators see.")] = "",
    force: Annotated[
        bool, typer.Option("--force", help="Ban also the user or the address of this command.")
    ] = False,
    dry_run: DryRun = False,
) -> None:
    """Ban a user, a client id or addresses, or replace their ban.

    Example: tidemill ban create --address 10.1.0.0/16 --for 1h --reason "a loop"
    """
    _subject(user, client, address)
    given: dict[str, object] = {
        "user": user,
        "clientId": client,
        "address": address,
        "reason": reason,
        "forMs": None if duration is None else _ban_ms(duration),
        "force": force,
    }
    body = {name: value for name, value in given.items() if value}
    query = {"dryRun": "true"} if dry_run else {}
    # Before the ban, which disconnects the client.
    is_stranger = client is not None and is_unknown_client(context, client)
    ban = call(context, "POST", "/bans", body=body, query=query)
    verb = "would be banned" if dry_run else "banned"
    say(context, ban, f"{ban['kind']} {printable(ban['value'])}: {verb}, until {_end(ban)}")
    if client is not None and is_stranger:
        warn_of_stranger(client)


@app.command("delete")
def delete_ban(
    context: typer.Context,
    user: User = None,
    client: Client = None,
    address: Address = None,
    ended: Annotated[bool, typer.Option("--ended", help="All bans that have ended.")] = False,
    dry_run: DryRun = False,
) -> None:
    """Delete a ban, or all bans that have ended.

    Example: tidemill ban delete --address 10.1.0.0/16
    """
    query = {"dryRun": "true"} if dry_run else {}
    verb = "would be deleted" if dry_run else "deleted"
    if ended:
        if user or client or address:
            fail("--ended deletes all bans that have ended; name no subject with it", EXIT_USAGE)
        names = [ban["name"] for ban in call_pages(context, "/bans", "bans") if ban["ended"]]
        deleted = [
            call(context, "DELETE", f"/bans/{segment(name)}", query=query, may_miss=True)
            for name in names
        ]
        say(context, deleted, f"{len(names)} ended bans: {verb}")
        return
    name = _subject(user, client, address)
    deletion = call(context, "DELETE", f"/bans/{segment(name)}", query=query)
    ban = deletion["ban"]
    say(context, deletion, f"ban of {ban['kind']} {printable(ban['value'])}: {verb}")


def _subject(user: str | None, client: str | None, address: str | None) -> str:
    """Return the name of the ban of the only given subject, or end the command."""
    subjects = {BanKind.USER: user, BanKind.CLIENT: client, BanKind.ADDRESS: address}
    given = [(kind, value) for kind, value in subjects.items() if value]
    if len(given) != 1:
        fail("name one subject: --user, --client or --address", EXIT_USAGE)
    [(kind, value)] = given
    if kind is not BanKind.ADDRESS:
        return subject_name(kind, value)
    try:
        return subject_name(kind, range_text(value))
    except BadRequest as error:
        raise typer.BadParameter(error.message) from error


def _ban_ms(duration: str) -> int:
    return duration_within_ms("--for", duration, least="1ms", most="3650d")


def _end(ban: Json) -> str:
    if not ban["untilMs"]:
        return "deleted"
    end = utc(ban["untilMs"] // 1_000 * 1_000).replace(".000Z", "Z")
    return f"{end} (ended)" if ban["ended"] else end
