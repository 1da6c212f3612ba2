"""`tidemill token ...`."""

from __future__ import annotations

from typing import Annotated

import typer

from tidemill.cli.rest import call, call_pages, check_is_sure, say, show
from tidemill.common.exit_codes import EXIT_REFUSED
from tidemill.common.prompts import confirm, fail, warn
from tidemill.common.rest_client import Json
from tidemill.common.times import DURATION, duration_within_ms, utc

app = typer.Typer(no_args_is_help=True, help="Create, list and delete named tokens.")

DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the effect and change nothing.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask for a confirmation.")]


@app.command("list")
def list_tokens(context: typer.Context) -> None:
    """List tokens: all of them with Get on Cluster:security, else your own.

    Example: tidemill token list
    """
    tokens = call_pages(context, "/tokens", "tokens")
    rows = [
        (
            token["id"],
            token["name"],
            token["user"],
            " ".join(token["roles"]),
            utc(token["createdAtMs"]),
            _end_of(token),
        )
        for token in sorted(tokens, key=lambda token: (token["user"], token["name"]))
    ]
    names = [row[1] for row in rows]
    columns = ("TOKEN", "NAME", "USER", "ROLES", "CREATED", "ENDS")
    show(context, tokens, columns, rows, names=names)


@app.command("create")
def create_token(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Name of the token, unique among those of its user.")],
    user: Annotated[str, typer.Option(help="User of the token. Default: the caller.")] = "",
    roles: Annotated[
        list[str] | None,
        typer.Option(
            "--role",
            help="Role that limits the token; repeat it for several. Default: all rights of its"
            " user.",
        ),
    ] = None,
    expires_after: Annotated[
        str,
        typer.Option(
            metavar=DURATION, help="Time until the token ends, at most 400d. Default: 90d."
        ),
    ] = "",
    has_no_expiry: Annotated[
        bool, typer.Option("--no-expiry", help="Let the token never end.")
    ] = False,
    dry_run: DryRun = False,
) -> None:
    """Create a token, and print it once.

    Standard output has only the token, so that a file can take it.

    Examples:
    * `tidemill token create ci --role viewer --expires-after 30d`
    * `tidemill token create backup --user ops`
    """
    body: dict[str, Json] = {"name": name}
    if user:
        body["user"] = user
    if roles:
        body["roles"] = roles
    if expires_after:
        body["expiresAfterMs"] = duration_within_ms(
            "--expires-after", expires_after, least="1ms", most="400d"
        )
    if has_no_expiry:
        body["noExpiry"] = True
    made = call(context, "POST", "/tokens", body=body, query=_query(dry_run))
    if dry_run:
        say(context, made, f"token {name}: would be created for user {made['user']}")
        return
    warn(f"the token of user {made['user']} is shown once; save it now. It ends: {_end_of(made)}")
    say(context, made, made["token"])


@app.command("delete")
def delete_token(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Name or id of the token.")],
    user: Annotated[str, typer.Option(help="User of the token. Default: any.")] = "",
    is_sure: Yes = False,
    dry_run: DryRun = False,
) -> None:
    """Delete a token. It is invalid at once.

    Example: tidemill token delete ci --dry-run
    """
    token = _find(context, name, user)
    path = f"/tokens/{token['id']}"
    what = f"token {token['name']} of user {token['user']}"
    if not dry_run:
        check_is_sure("token delete", is_sure=is_sure)
        if not is_sure:
            confirm(f"Delete {what}?")
    deletion = call(context, "DELETE", path, query=_query(dry_run))
    say(context, deletion, f"{what}: {'would be deleted' if dry_run else 'deleted'}")


def _find(context: typer.Context, name: str, user: str) -> Json:
    """Return the token of a name or id. End the command if there is none, or more than one."""
    tokens = call_pages(context, "/tokens", "tokens")
    if by_id := [token for token in tokens if token["id"] == name]:
        return by_id[0]
    found = [token for token in tokens if token["name"] == name]
    if user:
        found = [token for token in found if token["user"] == user]
    if not found:
        fail(f"there is no token {name!r}; see `tidemill token list`", EXIT_REFUSED)
    if len(found) > 1:
        users = ", ".join(token["user"] for token in found)
        fail(f"several users have a token {name}: {users}; add --user", EXIT_REFUSED)
    return found[0]


def _end_of(token: Json) -> str:
    return utc(token["notAfterMs"]) if token["notAfterMs"] else "never"


def _query(dry_run: bool) -> dict[str, str]:
    return {"dryRun": "true"} if dry_run else {}
