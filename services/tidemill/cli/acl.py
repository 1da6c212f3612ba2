"""`tidemill acl ...`: the entries of users and roles."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated

import typer

from tidemill.cli.rest import call, say, segment, show
from tidemill.common.errors import BadRequest
from tidemill.common.exit_codes import EXIT_PROBLEM
from tidemill.common.rest_client import Json
from tidemill.security.acl import ALLOW, DENY, check_names, entry_of, parse_entry

app = typer.Typer(no_args_is_help=True, help="Allow, deny and check actions of users and roles.")

ENTRY_COLUMNS = ("RESOURCE", "ACTIONS", "FROM", "DECISION")
Subject = Annotated[
    str, typer.Argument(help="User:NAME, Role:NAME, or the name of a user.", metavar="SUBJECT")
]
ResourcePattern = Annotated[
    str,
    typer.Argument(
        help="Topic:NAME, Group:NAME, Cluster:AREA or *. The name may be * or end with *."
    ),
]
Actions = Annotated[
    str, typer.Argument(help="All, or names of actions separated by commas, such as Pub,Sub.")
]
Sources = Annotated[
    list[str] | None,
    typer.Option("--from", metavar="CIDR", help="Only from these addresses; may be repeated."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the effect and change nothing.")]


class Decision(StrEnum):
    """Whether an entry allows or denies."""

    ALLOWS = ALLOW
    DENIES = DENY


@app.command("list")
def list_entries(context: typer.Context, subject: Subject) -> None:
    """List the entries of a user or a role.

    Example: tidemill acl list orders
    """
    found = call(context, "GET", _path(subject))
    show(context, found["entries"], ENTRY_COLUMNS, entry_rows(found["entries"]))


@app.command("allow")
def allow(
    context: typer.Context,
    subject: Subject,
    resource: ResourcePattern,
    actions: Actions,
    sources: Sources = None,
    dry_run: DryRun = False,
) -> None:
    """Add an entry that allows actions.

    Example: tidemill acl allow orders "Topic:orders*" Pub --from 10.1.0.0/16
    """
    entry = _entry(resource, actions, sources, Decision.ALLOWS, is_new=True)
    _change(context, subject, added=entry, dry_run=dry_run)


@app.command("deny")
def deny(
    context: typer.Context,
    subject: Subject,
    resource: ResourcePattern,
    actions: Actions,
    sources: Sources = None,
    dry_run: DryRun = False,
) -> None:
    """Add an entry that denies actions. A more exact entry that allows them wins.

    Example: tidemill acl deny Role:sellers "Topic:payments*" All
    """
    entry = _entry(resource, actions, sources, Decision.DENIES, is_new=True)
    _change(context, subject, added=entry, dry_run=dry_run)


@app.command("revoke")
def revoke(
    context: typer.Context,
    subject: Subject,
    resource: ResourcePattern,
    actions: Actions,
    sources: Sources = None,
    decision: Annotated[
        Decision | None,
        typer.Option(
            case_sensitive=False,
            help="Decision of the entry. Needed beside an entry with the other decision.",
        ),
    ] = None,
    dry_run: DryRun = False,
) -> None:
    """Remove the entry with exactly this resource, these actions and these addresses.

    Examples:
    * `tidemill acl revoke orders "Topic:orders*" Pub --from 10.1.0.0/16`
    * `tidemill acl revoke orders Topic:payments Pub --decision deny`
    """
    entry = _entry(resource, actions, sources, decision or "", is_new=False)
    _change(context, subject, removed=entry, dry_run=dry_run)


@app.command("check")
def check(
    context: typer.Context,
    user: Annotated[str, typer.Option(help="Name of the user.")],
    action: Annotated[str, typer.Option(help="Pub, Sub, Create, Update, Delete, Get or List.")],
    topic: Annotated[str | None, typer.Option(help="Name of a topic.")] = None,
    group: Annotated[str | None, typer.Option(help="Name of a consumer group.")] = None,
    area: Annotated[str | None, typer.Option(help="Area of the cluster, such as clients.")] = None,
    address: Annotated[str | None, typer.Option(help="Address of the client.")] = None,
) -> None:
    """Show whether a user may do something, and the entry that decides. Exit 4 if it may not.

    Example: tidemill acl check --user orders --action Pub --topic payments
    """
    given = [("Topic", topic), ("Group", group), ("Cluster", area)]
    named = [f"{kind}:{name}" for kind, name in given if name is not None]
    if len(named) != 1:
        raise typer.BadParameter("name one resource: --topic, --group or --area")
    body = {"user": user, "action": action, "resource": named[0]}
    if address is not None:
        body["address"] = address
    answer = call(context, "POST", "/access:check", body=body)
    verdict = "allowed" if answer["allowed"] else "refused"
    say(context, answer, f"{verdict}   {answer['reason']}")
    if not answer["allowed"]:
        raise typer.Exit(EXIT_PROBLEM)


def entry_rows(entries: Sequence[Json]) -> list[tuple[str, ...]]:
    """Return the rows of a table of entries."""
    return [
        (
            entry["resource"],
            ",".join(entry["actions"]),
            ",".join(entry["sources"]) or "everywhere",
            entry["decision"],
        )
        for entry in entries
    ]


def has_equal_entries(found: Sequence[Json], wanted: Sequence[Json]) -> bool:
    """Whether two lists have the same entries, in any order."""
    return set(map(entry_of, found)) == set(map(entry_of, wanted))


def _path(subject: str) -> str:
    kind, separator, name = subject.partition(":")
    if not separator:
        return f"/users/{segment(subject)}"
    if kind.capitalize() not in {"User", "Role"} or not name:
        raise typer.BadParameter(f"write User:NAME or Role:NAME, not {subject!r}")
    return f"/{kind.lower()}s/{segment(name)}"


def _entry(
    resource: str, actions: str, sources: list[str] | None, decision: str, *, is_new: bool
) -> dict[str, Json]:
    """Return an entry in the form of the API. Ends the command if it is malformed."""
    names = [name.strip() for name in actions.split(",")]
    try:
        entry = parse_entry(resource, names, sources=sources or ())
        if is_new:
            check_names([entry])
    except BadRequest as error:
        raise typer.BadParameter(error.message) from error
    return {"sources": [], **entry.to_item(), "decision": decision}


def _change(
    context: typer.Context,
    subject: str,
    *,
    added: dict[str, Json] | None = None,
    removed: dict[str, Json] | None = None,
    dry_run: bool,
) -> None:
    path = _path(subject)
    found = call(context, "GET", path)
    entries = list(found["entries"])
    done = ""
    if removed is not None:
        gone = [entry for entry in entries if _is_same(entry, removed)]
        if not gone:
            decided = f", decision {removed['decision']}" if removed["decision"] else ""
            raise typer.BadParameter(
                f"{subject} has no entry with this resource, these actions and these"
                f" addresses{decided}; see `tidemill acl list {subject}`"
            )
        if len({entry["decision"] for entry in gone}) > 1:
            raise typer.BadParameter(
                f"{subject} has entries of both decisions for this; add --decision"
            )
        entries = [entry for entry in entries if entry not in gone]
        done = f", without {gone[0]['decision']} {gone[0]['resource']}"
    if added is not None and added not in entries:
        entries.append(added)
    body = {"entries": entries, "ifVersion": found["version"]}
    query = {"dryRun": "true"} if dry_run else {}
    answer = call(context, "PUT", path, body=body, query=query)
    verb = "would have" if dry_run else "has"
    count = len(answer["entries"])
    noun = "entry" if count == 1 else "entries"
    say(context, answer, f"{subject} {verb} {count} {noun}{done}")


def _is_same(entry: Json, removed: dict[str, Json]) -> bool:
    return (
        entry["resource"] == removed["resource"]
        and set(entry["actions"]) == set(removed["actions"])
        and sorted(entry["sources"]) == sorted(removed["sources"])
        and removed["decision"] in {"", entry["decision"]}
    )
