"""`tidemill security ...`: the mode, and the first administrator."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Final

import typer

from tidemill.cli.credentials import create_credentials, credentials_file, find_saved
from tidemill.cli.key_rotation import rotate_key
from tidemill.cli.rest import (
    call,
    call_pages,
    check_is_sure,
    is_text,
    options_of,
    say,
    segment,
    show,
    warn_unreachable,
)
from tidemill.cli.security_import import import_users
from tidemill.cli.security_refusals import find_refusals, show_refusals
from tidemill.common.errors import BadRequest
from tidemill.common.exit_codes import EXIT_REFUSED
from tidemill.common.prompts import confirm, fail
from tidemill.common.rest_client import Json
from tidemill.security.identities import check_user_name, new_secret

app = typer.Typer(no_args_is_help=True, help="Require credentials and rights, or stop that.")

FIRST_ADMIN = "admin"
# A changed mode counts at the admin process within a second.
CHECK_S: Final = 5.0
LOOK_PERIOD_S: Final = 0.1
AdminName = Annotated[str, typer.Option("--name", help="Name of the first super user.")]
Permissive = Annotated[
    bool, typer.Option("--permissive", help="Count refusals, and let the calls pass.")
]

Force = Annotated[
    bool, typer.Option("--force", help="Set the mode also if it locks this command out.")
]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask for a confirmation.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the effect and change nothing.")]


@app.command("enable")
def enable(
    context: typer.Context,
    admin: AdminName = FIRST_ADMIN,
    permissive: Permissive = False,
    force: Force = False,
    dry_run: DryRun = False,
) -> None:
    """Require credentials. Make a super user if there is none.

    Its secret is shown once, and saved in ~/.config/tidemill/credentials. If there is a super user,
    this command needs the credentials of one, because it could lock everybody out. A second call
    changes nothing. With --permissive first, `/metrics` of the proxies counts the calls that would
    be refused (rocketmq_access_total), so that clients can be prepared.

    Examples:
    * `tidemill security enable --permissive`
    * `tidemill security enable`
    """
    before = call(context, "GET", "/security")
    if permissive and before["inForce"] == "on":
        fail("the mode is on already; lower it by `tidemill security disable`", EXIT_REFUSED)
    users = call_pages(context, "/users", "users")
    lines = []
    secret = ""
    # The REST API refuses users that list certificates.
    if not any(
        user["type"] == "SUPER" and user["enabled"] and not user["certificates"] for user in users
    ):
        secret, saved = _make_admin(context, admin, dry_run=dry_run)
        lines.append(f"user      {admin}  super, {'would be ' if dry_run else ''}new")
        if not dry_run:
            lines.append(f"secret    {secret}  shown once; saved in {saved}")
    elif not permissive and before["inForce"] != "on" and not force and not dry_run:
        _check_caller(context, before)
    after = _set_mode(context, "permissive" if permissive else "on", dry_run=dry_run)
    lines.append(_mode_line(before, after, dry_run=dry_run))
    open_ports = [proxy["name"] for proxy in after["proxies"] if proxy["openPort"]]
    lines += [f"warning   {name}: its port for clients does not require TLS" for name in open_ports]
    answer = {**after, "secret": secret} if secret and not dry_run else after
    say(context, answer, "\n".join(lines))


def _make_admin(context: typer.Context, name: str, *, dry_run: bool) -> tuple[str, Path]:
    """Create a super user; return its secret and the file with it.

    The secret is saved before the call, and stays saved if the answer is lost: the user may exist
    then. The next call takes the saved secret.
    """
    try:
        check_user_name(name)
    except BadRequest as error:
        raise typer.BadParameter(error.message) from error
    address = options_of(context).admin
    saved = find_saved()
    is_repeated = saved is not None and saved.user == name and saved.is_for(address)
    secret = saved.secret if saved is not None and is_repeated else new_secret()
    file = credentials_file()
    if not is_repeated and not dry_run:
        file = create_credentials(name, secret, address)

    def delete_file() -> None:
        if not is_repeated and not dry_run:
            file.unlink(missing_ok=True)

    body = {"type": "SUPER", "secret": secret, "ifVersion": 0}
    path = f"/users/{segment(name)}"
    call(context, "PUT", path, body=body, query=_query(dry_run), on_refusal=delete_file)
    return secret, file


def _check_caller(context: typer.Context, before: Json) -> None:
    """End the command if its credentials would not pass as a super user in the mode `on`.

    The mode `off` checks no credentials, so the mode is `permissive` meanwhile, which refuses none.
    """
    caller = call(context, "GET", "/session")
    if caller["superCredentials"]:
        return
    if before["inForce"] == "off":
        _set_mode(context, "permissive", dry_run=False)
        end_s = time.monotonic() + CHECK_S
        while caller["mode"] == "off" and time.monotonic() < end_s:
            time.sleep(LOOK_PERIOD_S)
            caller = call(context, "GET", "/session")
        if caller["superCredentials"]:
            return
        _set_mode(context, before["mode"], dry_run=False)
    name = caller.get("user")
    who = f"{name} is not a super user" if name else "it has no valid credentials"
    fail(
        f"the mode on would lock this command out: {who}. Name a super user with --user and"
        " --secret-file, or add --force",
        EXIT_REFUSED,
    )


def _set_mode(context: typer.Context, mode: str, *, dry_run: bool) -> Json:
    return call(context, "PUT", "/security", body={"mode": mode}, query=_query(dry_run))


def _mode_line(before: Json, after: Json, *, dry_run: bool) -> str:
    change = f"mode      {before['inForce']} -> {after['inForce']}"
    if dry_run:
        return f"{change}  would be set"
    return f"{change}  version {after['version']}, {_confirmed(after)}"


def _query(dry_run: bool) -> dict[str, str]:
    return {"dryRun": "true"} if dry_run else {}


app.command("rotate-key")(rotate_key)
app.command("import")(import_users)


@app.command("disable")
def disable(context: typer.Context, is_sure: Yes = False, dry_run: DryRun = False) -> None:
    """Ignore credentials and rights again. Users and roles stay.

    Example: tidemill security disable --dry-run
    """
    if not dry_run:
        check_is_sure("security disable", is_sure=is_sure)
    before = call(context, "GET", "/security")
    if before["floor"] != "off":
        fail(f"security_floor is {before['floor']}: change that setting first", EXIT_REFUSED)
    if not dry_run and not is_sure:
        confirm("Set the mode off? Every client can then send, receive and administer.")
    after = _set_mode(context, "off", dry_run=dry_run)
    say(context, after, _mode_line(before, after, dry_run=dry_run))


@app.command("status")
def status(context: typer.Context) -> None:
    """Show the mode, the version and the keys of the admin process and of each proxy.

    The recorded mode is that of the configuration. A process applies its security_floor if that is
    stricter. Below are the refused calls of the last day, and in the mode permissive those that the
    mode on would refuse, with Get on Cluster:audit. Proxies forget them when they end.

    Example: tidemill security status
    """
    found = call(context, "GET", "/security")
    refusals = find_refusals(context, int(time.time() * 1_000))
    found["refusals"] = None if refusals is None else [each._asdict() for each in refusals]
    rows = [
        ("admin", found["inForce"], found["version"], _keys_of(found)),
        *(
            (each["name"], each["mode"], each["version"], _keys_of(each))
            for each in found["proxies"]
        ),
    ]
    if is_text(context):
        typer.echo(f"recorded mode {found['mode']}, floor of the admin process {found['floor']}\n")
    show(context, found, ("PROCESS", "MODE", "VERSION", "KEYS"), rows)
    if is_text(context):
        show_refusals(context, refusals)
    warn_unreachable(found)


def _keys_of(process: Json) -> str:
    return " ".join(process["keyIds"]) or "none"


def _confirmed(answer: Json) -> str:
    """Return how many proxies have applied a change."""
    proxies = answer["proxies"]
    applied = sum(proxy["version"] >= answer["version"] for proxy in proxies)
    total = len(proxies) + len(answer.get("unreachable", ()))
    return f"applied by {applied} of {total} proxies"
