"""The options of the root command, with the values of the context in effect (ADR 0097)."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import typer

from tidemill.cli.contexts import ClusterContext, read_contexts
from tidemill.cli.credentials import UserCredentials, find_credentials, read_saved
from tidemill.cli.output import OutputFormat
from tidemill.cli.rest import Options, admin_url, read_namespace, read_token
from tidemill.common.prompts import warn

CONTEXT_NOUN: Final = "context"  # its commands change the contexts, so none is in effect
FLAG, ENVIRONMENT = "COMMANDLINE", "ENVIRONMENT"  # sources of an option
# Options of the cluster in TIDEMILL_ADMIN, with their empty values.
ACCESS: Final[dict[str, Any]] = {
    "token": "",
    "token_file": None,
    "user": "",
    "secret_file": None,
    "ca_file": None,
}
# Credentials and their variables. click reads an empty variable as a missing one.
CREDENTIALS: Final = {
    "token": "TIDEMILL_ADMIN_TOKEN",
    "token_file": "TIDEMILL_ADMIN_TOKEN_FILE",
    "user": "TIDEMILL_USER",
    "secret_file": "TIDEMILL_SECRET_FILE",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RootValues:
    """Values of the options of the root command; each has the name of its parameter."""

    admin: str
    context_name: str
    confirmed: str
    token: str
    token_file: Path | None
    user: str
    secret_file: Path | None
    ca_file: Path | None
    sends_plain_token: bool
    namespace: str
    output: OutputFormat
    has_no_color: bool
    is_quiet: bool
    is_insecure: bool


def read_options(context: typer.Context, values: RootValues) -> Options:
    """Return the options of a command. Ends the command if they contradict each other."""
    is_noun = context.invoked_subcommand == CONTEXT_NOUN
    chosen = None if is_noun else _find_context(context, values.context_name, values.admin)
    if chosen is not None and _source(context, "context_name") == FLAG:
        # The flag precedes the environment, so credentials of another cluster do not go here.
        stale = {
            name: empty for name, empty in ACCESS.items() if _source(context, name) == ENVIRONMENT
        }
        values = replace(values, **stale)
    else:
        _check_variables(context, values)
    for name in ("token", "user"):
        if _source(context, name) == FLAG and not getattr(values, name):
            raise typer.BadParameter(f"--{name} is empty; omit it to use the saved credentials")
    if values.is_insecure:
        if values.ca_file is not None:
            raise typer.BadParameter("--insecure and --admin-ca-file contradict each other")
        warn("the certificate of the admin API is not checked")
    confirmed = values.confirmed
    if confirmed and (chosen is None or chosen.name != confirmed):
        used = f"context {chosen.name}" if chosen else "no context"
        raise typer.BadParameter(f"--confirm has {confirmed!r}, but the command uses {used}")
    is_addressed = _source(context, "admin") == FLAG
    return Options(
        admin=admin_url(values.admin) if chosen is None or is_addressed else chosen.address,
        output=values.output,
        has_color=not values.has_no_color,
        is_quiet=values.is_quiet,
        is_insecure=values.is_insecure,
        token=read_token(values.token, values.token_file),
        credentials=_credentials(chosen, values.user, values.secret_file),
        ca_file=_ca_file(context, chosen, values.ca_file),
        sends_plain_token=values.sends_plain_token,
        namespace=read_namespace(values.namespace, context.invoked_subcommand),
        context=chosen,
        context_name=values.context_name,
        confirmed=confirmed,
    )


def _check_variables(context: typer.Context, values: RootValues) -> None:
    """End the command if a variable of its credentials is empty and no other credentials are given.

    The saved credentials may belong to a super user, so they do not replace a lost value.
    """
    if any(getattr(values, name) for name in CREDENTIALS):
        return
    for name, variable in CREDENTIALS.items():
        if os.environ.get(variable) == "" and _source(context, name) != FLAG:
            raise typer.BadParameter(
                f"the variable {variable} is empty; unset it to use the saved credentials"
            )


def _find_context(context: typer.Context, name: str, admin: str) -> ClusterContext | None:
    """Return the context in effect. None: there is none, or the command has another address."""
    known = read_contexts()
    name_source, source = _source(context, "context_name"), _source(context, "admin")
    chosen = known.get(name) if name else known.by_name.get(known.current)
    is_addressed = source in {FLAG, ENVIRONMENT}
    if chosen is None or not is_addressed or chosen.is_for(admin_url(admin)):
        return chosen
    if name and name_source == source:
        options = ("--context", "--admin")
        if source == ENVIRONMENT:
            options = ("TIDEMILL_CONTEXT", "TIDEMILL_ADMIN")
        raise typer.BadParameter(
            f"{options[0]} is {name} with the address {chosen.address}, but {options[1]} is"
            f" {admin}; omit one of them"
        )
    return chosen if name and name_source == FLAG else None


def _source(context: typer.Context, parameter: str) -> str:
    source = context.get_parameter_source(parameter)
    return "" if source is None else source.name


def _credentials(
    chosen: ClusterContext | None, user: str, secret_file: Path | None
) -> UserCredentials | None:
    is_given = user or secret_file is not None
    if chosen is None or chosen.credentials_file is None or is_given:
        return find_credentials(user, secret_file)
    found = read_saved(chosen.credentials_file, is_named=True)
    if found is None:
        raise typer.BadParameter(
            f"the credentials file {chosen.credentials_file} of context {chosen.name} is empty"
        )
    return found


def _ca_file(
    context: typer.Context, chosen: ClusterContext | None, file: Path | None
) -> Path | None:
    """Return the file of the authorities, or None for the public authorities."""
    if file is None:
        return None if chosen is None else chosen.ca_file
    # The Secret of a publicly signed certificate has no such file, so a missing file that the
    # environment names is not an error. A missing file on the command line is.
    is_typed = _source(context, "ca_file") != ENVIRONMENT
    return file if is_typed or file.exists() else None
