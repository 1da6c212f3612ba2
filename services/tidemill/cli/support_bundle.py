"""`tidemill support-bundle`."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Annotated

import typer

from tidemill.cli.operations import await_end, result_of
from tidemill.cli.rest import call, connect, say, segment
from tidemill.common.exit_codes import EXIT_PARTIAL, EXIT_REFUSED
from tidemill.common.private_files import write_private
from tidemill.common.prompts import fail
from tidemill.common.rest_client import RestOptionError, RestRejection, RestUnreachable


def make_bundle(
    context: typer.Context,
    file: Annotated[
        Path | None,
        typer.Option(help="File to write. Default: tidemill-support-NUMBER.tar.gz here."),
    ] = None,
    is_anonymous: Annotated[
        bool, typer.Option("--anonymize", help="Replace names and addresses by hashes.")
    ] = False,
) -> None:
    """Collect settings, states, audit and log lines of the cluster in one file, for support.

    It has no bodies of messages and no secrets. Its overview, audit log and log lines name objects
    of all users.

    Examples:
    * `tidemill support-bundle`
    * `tidemill support-bundle --anonymize --file bundle.tar.gz`
    """
    body = {"anonymize": is_anonymous}
    key = {"Idempotency-Key": secrets.token_hex(16)}
    begun = call(context, "POST", "/support-bundles", body=body, headers=key)["operation"]
    ended = await_end(context, begun["id"])
    if ended["state"] != "DONE":
        fail(result_of(ended), EXIT_PARTIAL)
    path = f"/support-bundles/{segment(begun['id'])}"
    target = file or Path(f"tidemill-support-{begun['id'].rpartition(':')[2]}.tar.gz")
    try:
        content = connect(context).download(path)
    except (RestRejection, RestUnreachable, RestOptionError):
        call(context, "GET", path)  # It prints the reason.
        raise typer.Exit(EXIT_REFUSED) from None
    try:
        write_private(target, content)
    except OSError as error:
        fail(f"{target} cannot be written: {error.strerror}", EXIT_REFUSED)
    say(context, {"file": str(target), "bytes": len(content)}, f"wrote {target}")
