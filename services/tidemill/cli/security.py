"""`tidemill security ...`: the mode, and the first administrator."""

from __future__ import annotations

import os
from typing import Annotated, TextIO

import typer

from tidemill.cli.credentials import credentials_file
from tidemill.cli.key_rotation import rotate_key
from tidemill.cli.rest import (
    OutputFormat,
    call,
    call_pages,
    options_of,
    say,
    segment,
    show,
    warn_unreachable,
)
from tidemill.cli.security_import import import_users
from tidemill.common.exit_codes import EXIT_REFUSED, EXIT_USAGE
from tidemill.common.prompts import fail
from tidemill.common.rest_client import Json

app = typer.Typer(no_args_is_help=True, help="Require credentials and rights, or stop that.")

FIRST_ADMIN = "admin"
AdminName = Annotated[str, typer.Option("--name", help="Name of the first super user.")]
Permissive = Annotated[
    bool, typer.Option("--permissive", help="Count refusals, and let the calls pass.")
]


@app.command("enable")
def enable(
    context: typer.Context, admin: AdminName = FIRST_ADMIN, permissive: Permissive = False
) -> None:
    """Require credentials. Make a super user if there is none.

    Its secret is shown once, and saved in ~/.config/tidemill/credentials. A second call changes
    nothing. With --permissive first, `/metrics` of the proxies counts the calls that would be
    refused (rocketmq_access_total), so that clients can be prepared.

    Examples:
    * `tidemill security enable --permissive`
    * `tidemill security enable`
    """
    before = call(context, "GET", "/security")
    users = call_pages(context, "/users", "users")
    lines = []
    secret = ""
    if not any(user["type"] == "SUPER" and user["enabled"] for user in users):
        body = {"type": "SUPER", "ifVersion": 0}
        # The file is opened first: a secret that is lost locks everybody out.
        with _credentials_file() as file:
            made = call(context, "PUT", f"/users/{segment(admin)}", body=body)
            secret, saved = made["secret"], file.name
            file.write(f"{admin}\n{secret}\n")
        lines += [
            f"user      {admin}  super, new",
            f"secret    {secret}  shown once; saved in {saved}",
        ]
    if permissive and before["inForce"] == "on":
        fail("the mode is on already; lower it by `tidemill security disable`", EXIT_REFUSED)
    mode = "permissive" if permissive else "on"
    after = call(context, "PUT", "/security", body={"mode": mode})
    lines.append(
        f"mode      {before['inForce']} -> {after['inForce']}  version {after['version']},"
        f" {_confirmed(after)}"
    )
    answer = {**after, "secret": secret} if secret else after
    say(context, answer, "\n".join(lines))


app.command("rotate-key")(rotate_key)
app.command("import")(import_users)


@app.command("disable")
def disable(context: typer.Context) -> None:
    """Ignore credentials and rights again. Users and roles stay.

    Example: tidemill security disable
    """
    before = call(context, "GET", "/security")
    if before["floor"] != "off":
        fail(f"security_floor is {before['floor']}: change that setting first", EXIT_REFUSED)
    after = call(context, "PUT", "/security", body={"mode": "off"})
    say(context, after, f"mode      {before['inForce']} -> {after['inForce']}  {_confirmed(after)}")


@app.command("status")
def status(context: typer.Context) -> None:
    """Show the mode, the version and the keys of the admin process and of each proxy.

    The recorded mode is that of the configuration. A process applies its security_floor if that is
    stricter.

    Example: tidemill security status
    """
    found = call(context, "GET", "/security")
    rows = [
        ("admin", found["inForce"], found["version"], _keys_of(found)),
        *(
            (each["name"], each["mode"], each["version"], _keys_of(each))
            for each in found["proxies"]
        ),
    ]
    if options_of(context).output is not OutputFormat.JSON:
        typer.echo(f"recorded mode {found['mode']}, floor of the admin process {found['floor']}\n")
    show(context, found, ("PROCESS", "MODE", "VERSION", "KEYS"), rows)
    warn_unreachable(found)


def _keys_of(process: Json) -> str:
    return " ".join(process["keyIds"]) or "none"


def _confirmed(answer: Json) -> str:
    """Return how many proxies have applied a change."""
    proxies = answer["proxies"]
    applied = sum(proxy["version"] >= answer["version"] for proxy in proxies)
    total = len(proxies) + len(answer.get("unreachable", ()))
    return f"applied by {applied} of {total} proxies"


def _credentials_file() -> TextIO:
    """Open the file for the credentials, for this account alone. Ends the command if it cannot."""
    file = credentials_file()
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        fail(f"{file} has other credentials already: move it away first", EXIT_USAGE)
    except OSError as error:
        fail(f"cannot save the credentials in {file}: {error}", EXIT_USAGE)
    # A number as `file` would make the name a number.
    return open(file, "w", opener=lambda _path, _flags: descriptor)
