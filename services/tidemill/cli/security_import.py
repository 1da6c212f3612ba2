"""`tidemill security import`: create the users and rights of a RocketMQ cluster."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

from tidemill.cli.rest import call, call_pages, segment, show
from tidemill.cli.rocketmq_acl import ImportedUser, read_users, roles_of
from tidemill.common.exit_codes import EXIT_REFUSED, EXIT_USAGE
from tidemill.common.private_files import read_private
from tidemill.common.prompts import fail, warn
from tidemill.common.rest_client import Json
from tidemill.security.acl import ALLOW, DENY, AccessEntry

FILE_BYTES_MAX: Final = 16 << 20  # 10,000 users with 20 entries of 80 bytes
PROBLEMS_SHOWN: Final = 20

Files = Annotated[
    list[Path], typer.Argument(help="Files of RocketMQ; - reads standard input.", allow_dash=True)
]
AllowWeak = Annotated[
    bool, typer.Option("--allow-weak", help="Import secrets of 6 to 15 characters, too.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the users and change nothing.")]


def import_users(
    context: typer.Context, files: Files, allow_weak: AllowWeak = False, dry_run: DryRun = False
) -> None:
    """Create the users and rights of a RocketMQ cluster.

    Reads the output of `mqadmin listUser` and `mqadmin listAcl`, or a plain_acl.yml of ACL 1.0.
    Imports nothing if one line cannot be imported. Users that exist stay as they are, so the
    command can be repeated. The Default policy of a user becomes a role. The mode does not change.

    Examples:
    * `tidemill security import users.txt acls.txt --dry-run`
    * `tidemill security import plain_acl.yml --allow-weak`
    """
    found = read_users([_read(file) for file in files], allows_weak=allow_weak)
    for note in found.notes:
        warn(note)
    if found.problems:
        shown = "\n".join(found.problems[:PROBLEMS_SHOWN])
        more = len(found.problems) - PROBLEMS_SHOWN
        rest = f"\nand {more} more" if more > 0 else ""
        fail(f"nothing is imported:\n{shown}{rest}", EXIT_USAGE)
    existing = {user["name"] for user in call_pages(context, "/users", "users")}
    new = [user for user in found.users if user.name not in existing]
    roles, role_of = roles_of(new)
    _put_roles(context, roles, is_dry=dry_run)
    for user in new:
        body = _body_of(user, role_of.get(user.name), allow_weak=allow_weak)
        if not dry_run:
            call(context, "PUT", f"/users/{segment(user.name)}", body=body)
    result = "would be created" if dry_run else "created"
    rows = [
        (
            user.name,
            user.type,
            len(user.entries),
            role_of.get(user.name, ""),
            "exists, unchanged" if user.name in existing else result,
        )
        for user in found.users
    ]
    columns = ("USER", "TYPE", "ENTRIES", "ROLE", "RESULT")
    answer = [dict(zip(map(str.lower, columns), row, strict=True)) for row in rows]
    show(context, answer, columns, rows)


def _put_roles(
    context: typer.Context, roles: dict[str, list[AccessEntry]], *, is_dry: bool
) -> None:
    """Create the roles. End the command before any change if one exists with other entries."""
    existing = {role["name"]: role["entries"] for role in call_pages(context, "/roles", "roles")}
    bodies = {name: _entries_of(entries) for name, entries in roles.items()}
    other = [name for name in bodies if existing.get(name, bodies[name]) != bodies[name]]
    if other:
        fail(
            f"nothing is imported: the role {', '.join(other)} exists with other entries; delete"
            " it, or create its users by hand",
            EXIT_REFUSED,
        )
    for name in bodies.keys() - existing.keys():
        body = {"entries": bodies[name], "ifVersion": 0}
        if not is_dry:
            call(context, "PUT", f"/roles/{segment(name)}", body=body)


def _body_of(user: ImportedUser, role: str | None, *, allow_weak: bool) -> Json:
    return {
        "type": user.type.value,
        "enabled": user.is_enabled,
        "secret": user.secret,
        "allowWeakSecret": allow_weak,
        "entries": _entries_of(user.entries),
        "roles": [] if role is None else [role],
        "ifVersion": 0,
    }


def _entries_of(entries: Sequence[AccessEntry]) -> list[Json]:
    return [
        {
            "resource": entry.resource,
            "actions": entry.to_item()["actions"],
            "sources": list(entry.sources),
            "decision": ALLOW if entry.is_allowed else DENY,
        }
        for entry in entries
    ]


def _read(file: Path) -> str:
    """Return the content of a file.

    End the command if others may read it, if nobody can, or if it is too long.
    """
    try:
        if str(file) == "-":
            content = sys.stdin.buffer.read(FILE_BYTES_MAX + 1)
            if len(content) > FILE_BYTES_MAX:
                raise ValueError(f"it is longer than {FILE_BYTES_MAX} bytes")
            return content.decode("ascii", errors="replace")
        return read_private(str(file), bytes_max=FILE_BYTES_MAX)
    except OSError as error:
        fail(f"cannot read {file}: {error.strerror}", EXIT_USAGE)
    except ValueError as error:
        fail(f"cannot import {file}: {error}", EXIT_USAGE)
