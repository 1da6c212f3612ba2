"""`tidemill role ...`."""

from __future__ import annotations

from typing import Annotated

import typer

from tidemill.cli.acl import ENTRY_COLUMNS, entry_rows, has_equal_entries
from tidemill.cli.rest import call, call_pages, check_is_sure, say, segment, show
from tidemill.cli.users import Consumers, Pipelines, Producers, template_entries
from tidemill.common.exit_codes import EXIT_REFUSED
from tidemill.common.prompts import confirm, fail
from tidemill.common.rest_client import Json

app = typer.Typer(no_args_is_help=True, help="Create, list, show, change and delete roles.")

Name = Annotated[str, typer.Argument(help="Name of the role.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the effect and change nothing.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask for a confirmation.")]


@app.command("list")
def list_roles(context: typer.Context) -> None:
    """List all roles; viewer, operator and admin are parts of Tidemill.

    Example: tidemill role list
    """
    roles = call_pages(context, "/roles", "roles")
    rows = [
        (role["name"], len(role["entries"]), "yes" if role["readyMade"] else "no") for role in roles
    ]
    show(context, roles, ("ROLE", "ENTRIES", "READY-MADE"), rows)


@app.command("show")
def show_role(context: typer.Context, name: Name) -> None:
    """Show the entries of a role.

    Example: tidemill role show operator
    """
    role = call(context, "GET", f"/roles/{segment(name)}")
    show(context, role, ENTRY_COLUMNS, entry_rows(role["entries"]), names=[name])


@app.command("create")
def create_role(
    context: typer.Context,
    name: Name,
    producers: Producers = None,
    consumers: Consumers = None,
    pipelines: Pipelines = None,
    dry_run: DryRun = False,
) -> None:
    """Create a role; `tidemill acl allow Role:NAME` adds other entries.

    If an equal role exists, nothing changes.

    Example: tidemill role create sellers --producer orders --consumer billing:orders
    """
    entries = template_entries(producers, consumers, pipelines)
    found = call(context, "GET", f"/roles/{segment(name)}", may_miss=True, may_be_forbidden=True)
    if found is not None:
        if not has_equal_entries(found["entries"], entries):
            fail(
                f"role {name} exists with other entries; replace them by `tidemill role set"
                f" {name}`, or add some by `tidemill acl allow Role:{name}`",
                EXIT_REFUSED,
            )
        say(context, found, f"role {name}: exists already, unchanged")
        return
    body = {"entries": entries, "ifVersion": 0}
    role = _put(context, name, body, dry_run=dry_run)
    say(context, role, f"role {name}: {'would be created' if dry_run else 'created'}")


@app.command("set")
def set_role(
    context: typer.Context,
    name: Name,
    producers: Producers = None,
    consumers: Consumers = None,
    pipelines: Pipelines = None,
    dry_run: DryRun = False,
) -> None:
    """Replace all entries of a role.

    Example: tidemill role set sellers --producer orders
    """
    entries = template_entries(producers, consumers, pipelines)
    if not entries:
        raise typer.BadParameter("name the new entries: --producer, --consumer or --pipeline")
    found = call(context, "GET", f"/roles/{segment(name)}")  # Ends the command if it is missing.
    body = {"entries": entries, "ifVersion": found["version"]}
    role = _put(context, name, body, dry_run=dry_run)
    say(context, role, f"role {name}: {'would be changed' if dry_run else 'changed'}")


def _put(context: typer.Context, name: str, body: Json, *, dry_run: bool) -> Json:
    query = {"dryRun": "true"} if dry_run else {}
    return call(context, "PUT", f"/roles/{segment(name)}", body=body, query=query)


@app.command("delete")
def delete_role(
    context: typer.Context, name: Name, is_sure: Yes = False, dry_run: DryRun = False
) -> None:
    """Delete a role that no user has.

    Example: tidemill role delete sellers --yes
    """
    path = f"/roles/{segment(name)}"
    if not dry_run:
        check_is_sure("role delete", is_sure=is_sure)
        if not is_sure:
            call(context, "DELETE", path, query={"dryRun": "true"})
            confirm(f"Delete role {name}?")
    deletion = call(context, "DELETE", path, query={"dryRun": "true"} if dry_run else {})
    say(context, deletion, f"role {name}: {'would be deleted' if dry_run else 'deleted'}")
