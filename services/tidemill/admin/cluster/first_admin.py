"""The first administrator: the super user that a file names (ADR 0074).

    NAME       line 1
    SECRET     line 2

Several admin processes may start at once. The home accepts the change of one of them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final, final

import grpc
import structlog

from tidemill.admin.audit.author import CREATE, UPDATE
from tidemill.admin.cluster.security_client import FoundItem, Item, SecurityClient
from tidemill.admin.cluster.user_changes import UserChanges
from tidemill.common.errors import BadRequest, BrokerGroupUnreachable, Conflict, ServiceError
from tidemill.common.lifecycle import StartError
from tidemill.common.private_files import read_private
from tidemill.security.bans import BAN, BanKind
from tidemill.security.identities import User, UserType, check_secret, check_user_name, user_of
from tidemill.security.subjects import subject_name
from tidemill.security.table import USER
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

if TYPE_CHECKING:
    from tidemill.security.secret_keys import SecretKeys

VIA_BOOTSTRAP: Final = "bootstrap"
FILE_BYTES_MAX: Final = 4_096  # a larger file has not two lines
# Pause before the next attempt. It doubles: a home may be down for hours.
PAUSE_S_MIN: Final = 0.2
PAUSE_S_MAX: Final = 10.0
PAGE_USERS: Final = 200  # decoded in some milliseconds

log = structlog.get_logger()


class BootstrapPolicy(StrEnum):
    """When the file counts."""

    ONCE = "once"  # while the cluster has no super user
    ALWAYS = "always"  # at each start


@dataclass(frozen=True, slots=True)
class FirstAdmin:
    """The content of the file."""

    name: str
    secret: str = field(repr=False)


class NameIsTaken(Exception):
    """A normal user has the name of the first administrator."""


def read_first_admin(file: str) -> FirstAdmin:
    """Read a file. Raises StartError, without the content of the file in its text."""
    try:
        lines = read_private(file, bytes_max=FILE_BYTES_MAX).split()
        if len(lines) != 2:
            raise ValueError("it needs two lines: the name of a super user, and its secret")
        return FirstAdmin(_checked_name(lines[0]), check_secret(lines[1]))
    except (OSError, ValueError, BadRequest) as error:
        raise StartError(f"security_bootstrap_file {file!r} cannot be used: {error}") from error


def _checked_name(name: str) -> str:
    try:
        return check_user_name(name)
    except BadRequest:
        # The line may be the secret, so no text shows it.
        raise ValueError(
            "line 1 is not a name of 1 to 64 characters of A-Z a-z 0-9 . _ @ -"
        ) from None


@final
class FirstAdminCreation:
    """Creates the first administrator as soon as the home answers."""

    def __init__(
        self,
        items: SecurityClient,
        keys: Callable[[], SecretKeys | None],
        wall_ms: Callable[[], int],
        *,
        admin: FirstAdmin,
        policy: BootstrapPolicy,
        process: str,
    ) -> None:
        """`keys` returns the keys of the secrets, and `process` is the name in the audit log."""
        self._items = items
        self._keys = keys
        self._wall_ms = wall_ms
        self._admin = admin
        self._policy = policy
        self._process = process

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Repeat until the user exists or is not needed, at most until the block ends."""
        if self._policy is BootstrapPolicy.ALWAYS:
            log.warning(
                "security_bootstrap_policy is always, so each start sets the secret of the file;"
                " set it to once when the lock-out is over",
                user=self._admin.name,
            )
        async with asyncio.TaskGroup() as tasks:
            creating = tasks.create_task(self._repeat(), name="first administrator")
            yield
            creating.cancel()

    async def _repeat(self) -> None:
        pause_s = PAUSE_S_MIN
        while True:
            try:
                is_changed = await self.attempt()
            except NameIsTaken as error:
                log.error(  # noqa: TRY400  # A traceback adds nothing to the reason.
                    "first administrator not created", user=self._admin.name, reason=str(error)
                )
                return
            except (ServiceError, grpc.aio.AioRpcError) as error:
                # Other processes start at the same time, so the first failures are ordinary.
                if pause_s >= PAUSE_S_MAX:
                    log.warning("first administrator not created yet", reason=str(error))
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, PAUSE_S_MAX)
            else:
                log.info(
                    "first administrator set" if is_changed else "first administrator not needed",
                    user=self._admin.name,
                )
                return

    async def attempt(self) -> bool:
        """Create or change the user if the policy asks for it; return whether it was changed.

        Raises NameIsTaken, ServiceError.
        """
        before = await self._items.find(USER, self._admin.name)
        if self._policy is BootstrapPolicy.ONCE and await self._has_super_user(before):
            return False
        is_changed = is_banned = False
        ban = subject_name(BanKind.USER, self._admin.name)

        async def check() -> None:
            nonlocal is_banned
            if self._policy is BootstrapPolicy.ALWAYS:  # A ban is a lock-out, too.
                is_banned = (await self._items.find(BAN, ban)).encoded is not None

        def decide(found: FoundItem) -> list[Item]:
            nonlocal is_changed
            if self._policy is BootstrapPolicy.ONCE and found.version != before.version:
                raise Conflict("the users have changed meanwhile")  # There may be a super user now.
            old = _read(found)
            changes = UserChanges(self._keys, self._wall_ms(), VIA_BOOTSTRAP)
            new = changes.set_super(
                self._admin.name, old, self._admin.secret, table_version=found.version
            )
            items: list[Item] = [new.to_item()] if new != old else []
            if is_banned:
                items.append({"op": "deleteBan", "name": ban})
            is_changed = bool(items)
            return items

        author = pb.ChangeAuthor(
            via=VIA_BOOTSTRAP,
            process=self._process,
            call=f"{VIA_BOOTSTRAP} {self._policy.value}",
            resource=f"User:{self._admin.name}",
            action=CREATE if before.encoded is None else UPDATE,
        )
        await self._items.change(
            USER, self._admin.name, decide, caller=VIA_BOOTSTRAP, audit=author, check=check
        )
        return is_changed

    async def _has_super_user(self, present: FoundItem) -> bool:
        """Whether the cluster has a super user at the version of a read of the home.

        Raises NameIsTaken if it has none, and a normal user has the name.
        """
        after_name, has_more = "", True
        while has_more:
            page = await self._items.page(USER, after_name, PAGE_USERS)
            if not present.is_from_home or page.version != present.version:
                raise BrokerGroupUnreachable("the home does not answer, or its users change")
            users = [user_of(encoded) for encoded in page.encoded]
            if any(user.type is UserType.SUPER for user in users):
                return True
            has_more = page.has_more
            after_name = users[-1].name if users else ""
        if present.encoded is not None:
            raise NameIsTaken(
                "a normal user has this name; delete that user, write another name into"
                " security_bootstrap_file, or set security_bootstrap_policy to always"
            )
        return False


def _read(found: FoundItem) -> User | None:
    return None if found.encoded is None else user_of(found.encoded)
