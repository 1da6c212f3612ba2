"""`tidemill context ...`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from tidemill.cli.completion_names import complete_context
from tidemill.cli.contexts import NAME, NAME_TEXT, ClusterContext, read_contexts, save_contexts
from tidemill.cli.rest import admin_url, check_is_sure, options_of, say, show
from tidemill.common.exit_codes import EXIT_REFUSED
from tidemill.common.prompts import confirm, fail
from tidemill.common.rest_client import Json

app = typer.Typer(
    no_args_is_help=True,
    help="""Name clusters, and choose the one that commands use.

A context has the address of the admin API, and optionally its CA file and a file with credentials.
`--context` chooses one for a command. `--admin` and `TIDEMILL_ADMIN` precede the context in use.

* `tidemill context create prod https://prod:8080 --credentials-file ~/prod --protected`
* `tidemill context use prod`
* `tidemill --context staging topic list`
""",
)

Name = Annotated[str, typer.Argument(help="Name of the context.", autocompletion=complete_context)]

COLUMNS = ("CONTEXT", "IN USE", "ADDRESS", "PROTECTED", "CA FILE", "CREDENTIALS FILE")


@app.command("list")
def list_contexts(context: typer.Context) -> None:
    """List the contexts of ~/.config/tidemill/contexts.yaml.

    Example: tidemill context list
    """
    known = read_contexts()
    answer = [_document(each, known.current) for _, each in sorted(known.by_name.items())]
    show(context, answer, COLUMNS, [_row(each) for each in answer])


@app.command("show")
def show_context(
    context: typer.Context,
    name: Annotated[
        str,
        typer.Argument(
            help="Context. Default: the one of the command.", autocompletion=complete_context
        ),
    ] = "",
) -> None:
    """Show a context.

    Examples:
    * `tidemill context show`
    * `tidemill context show prod`
    """
    known = read_contexts()
    chosen = name or options_of(context).context_name or known.current
    if not chosen:
        fail("no context is in use; see `tidemill context use --help`", EXIT_REFUSED)
    answer = _document(known.get(chosen), known.current)
    show(context, answer, ("NAME", "VALUE"), list(zip(COLUMNS, _row(answer), strict=True)))


@app.command("use")
def use_context(
    context: typer.Context,
    name: Annotated[
        str, typer.Argument(help="Name of the context.", autocompletion=complete_context)
    ] = "",
    is_none: Annotated[bool, typer.Option("--none", help="Use no context.")] = False,
) -> None:
    """Let commands without --context use a context.

    Examples:
    * `tidemill context use prod`
    * `tidemill context use --none`
    """
    if bool(name) == is_none:
        raise typer.BadParameter("give either a context or --none")
    known = read_contexts()
    if name:
        known.get(name)
    save_contexts(replace(known, current=name))
    sentence = f"commands use context {name}" if name else "commands use no context"
    say(context, {"current": name}, sentence)


@app.command("create")
def create_context(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Name of the context.")],
    address: Annotated[str, typer.Argument(help="Address of the admin API.")],
    ca_file: Annotated[
        Path | None,
        typer.Option(help="Authorities (PEM) of its certificate. Default: public authorities."),
    ] = None,
    credentials_file: Annotated[
        Path | None,
        typer.Option(
            help="File with two lines, a user and its secret, or with one line, a named token."
            " Default: ~/.config/tidemill/credentials."
        ),
    ] = None,
    is_protected: Annotated[
        bool, typer.Option("--protected", help="Ask for the name of the context before changes.")
    ] = False,
) -> None:
    """Create a context. It is in use if it is the first one.

    In a protected context, each command that changes something asks for the name of the context,
    also with --yes. Scripts answer with --confirm NAME.

    Examples:
    * `tidemill context create local http://127.0.0.1:8080`
    * `tidemill context create prod https://prod:8080 --ca-file ca.pem --protected`
    """
    if not NAME.fullmatch(name):
        raise typer.BadParameter(f"{name!r} is not a name: {NAME_TEXT}")
    created = ClusterContext(
        name=name,
        address=admin_url(address),
        ca_file=_existing(ca_file),
        credentials_file=_existing(credentials_file),
        is_protected=is_protected,
    )
    known = read_contexts()
    if name in known.by_name and known.by_name[name] != created:
        fail(
            f"context {name} exists with other values; change it by `tidemill context set {name}`",
            EXIT_REFUSED,
        )
    current = known.current if known.by_name else name
    save_contexts(replace(known, by_name={**known.by_name, name: created}, current=current))
    note = ", in use" if current == name else f"; use it with `tidemill context use {name}`"
    say(context, _document(created, current), f"context {name}: {created.address}{note}")


@app.command("set")
def set_context(
    context: typer.Context,
    name: Name,
    address: Annotated[str | None, typer.Option(help="Address of the admin API.")] = None,
    ca_file: Annotated[
        Path | None, typer.Option(help="Authorities (PEM) of its certificate.")
    ] = None,
    credentials_file: Annotated[
        Path | None, typer.Option(help="File with two lines, a user and its secret, or a token.")
    ] = None,
    is_protected: Annotated[
        bool | None,
        typer.Option(
            "--protected/--unprotected", help="Ask for the name of the context before changes."
        ),
    ] = None,
) -> None:
    """Change a context. Values without an option stay.

    Examples:
    * `tidemill context set prod --address https://prod-2:8080`
    * `tidemill context set staging --protected`
    """
    known = read_contexts()
    before = known.get(name)
    changed = replace(
        before,
        address=before.address if address is None else admin_url(address),
        ca_file=_existing(ca_file) or before.ca_file,
        credentials_file=_existing(credentials_file) or before.credentials_file,
        is_protected=before.is_protected if is_protected is None else is_protected,
    )
    save_contexts(replace(known, by_name={**known.by_name, name: changed}))
    result = "unchanged" if changed == before else "changed"
    say(context, _document(changed, known.current), f"context {name}: {changed.address}, {result}")


@app.command("delete")
def delete_context(
    context: typer.Context,
    name: Name,
    is_sure: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete a context. The cluster, the CA file and the credentials file stay.

    Example: tidemill context delete staging
    """
    known = read_contexts()
    deleted = known.get(name)
    check_is_sure("context delete", is_sure=is_sure)
    if not is_sure:
        confirm(f"Delete context {name} of {deleted.address}?")
    remaining = {other: each for other, each in known.by_name.items() if other != name}
    current = "" if known.current == name else known.current
    save_contexts(replace(known, by_name=remaining, current=current))
    note = "; commands use no context" if known.current == name else ""
    say(context, _document(deleted, current), f"context {name} is deleted{note}")


def _existing(file: Path | None) -> Path | None:
    """Return the absolute path of a file. Ends the command if it is missing."""
    if file is None:
        return None
    found = file.expanduser().absolute()
    if not found.is_file():
        raise typer.BadParameter(f"there is no file {found}")
    return found


def _document(each: ClusterContext, current: str) -> Json:
    return {"name": each.name, "inUse": each.name == current, "protected": False, **each.as_json()}


def _row(document: Json) -> tuple[object, ...]:
    return (
        document["name"],
        "yes" if document["inUse"] else "",
        document["address"],
        "yes" if document["protected"] else "",
        document.get("caFile"),
        document.get("credentialsFile"),
    )
