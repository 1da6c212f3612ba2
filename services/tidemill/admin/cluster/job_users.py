"""The users of release jobs, which this process keeps up to date (ADR 0083).

Several admin processes may have the folder. The home accepts the change of one of them, and the
others then find the users as they should be.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Final, final

import grpc
import structlog

from tidemill.admin.audit.author import CREATE, UPDATE
from tidemill.admin.cluster.first_admin import PAUSE_S_MAX, PAUSE_S_MIN, VIA_BOOTSTRAP
from tidemill.admin.cluster.security_client import FoundItem, Item, SecurityClient
from tidemill.admin.cluster.user_changes import UserChanges, find_sealing_key
from tidemill.common.errors import ServiceError
from tidemill.common.file_changes import FileChanges
from tidemill.common.lifecycle import StartError
from tidemill.security.identities import User, UserType, user_of
from tidemill.security.job_users import RIGHTS, Job, JobFiles, files_of, read_job_files
from tidemill.security.table import USER
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

if TYPE_CHECKING:
    from tidemill.security.secret_keys import SecretKeys

# A job reads its secret at its start. The longest one has a day (replace-volumes).
RETIRE_AFTER_MS: Final = 24 * 3_600_000
CHECK_PERIOD_S: Final = 5.0  # between two looks at the files

log = structlog.get_logger()


class JobNameIsTaken(Exception):
    """A super user has the name of a job's user; the message names it."""


@final
class JobUserUpkeep:
    """Creates the users of jobs as soon as the home answers, and again after a change of a file."""

    def __init__(
        self,
        items: SecurityClient,
        keys: Callable[[], SecretKeys | None],
        wall_ms: Callable[[], int],
        *,
        folder: str,
        process: str,
    ) -> None:
        """Read the folder. Raises StartError.

        `keys` returns the keys of the secrets, and `process` is the name in the audit log.
        """
        self._items = items
        self._keys = keys
        self._wall_ms = wall_ms
        self._folder = folder
        self._process = process
        self._files = FileChanges(files_of(folder))
        try:
            found = read_job_files(folder)
        except ValueError as error:
            raise StartError(
                f"security_job_users_dir {folder!r} cannot be used: {error}"
            ) from error
        self._log_unusable(found)
        self._secrets = found.secrets

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep the users up to date until the block ends."""
        async with asyncio.TaskGroup() as tasks:
            keeping = tasks.create_task(self._repeat(), name="users of jobs")
            yield
            keeping.cancel()

    async def _repeat(self) -> None:
        while True:
            await self._store()
            await self._change()

    async def _change(self) -> None:
        """Wait until a secret differs."""
        while True:
            await asyncio.sleep(CHECK_PERIOD_S)
            if self.read_again():
                return

    async def _store(self) -> None:
        """Create or change the users, with attempts until the home accepts all of them."""
        pause_s = PAUSE_S_MIN
        jobs = list(self._secrets)
        # A user that the home refuses does not delay the other users.
        while jobs := [
            job for job in jobs if not await self._try(job, is_late=pause_s >= PAUSE_S_MAX)
        ]:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_S_MAX)

    async def _try(self, job: Job, *, is_late: bool) -> bool:
        """Create or change a user, and return whether no further attempt is needed.

        Other processes start at the same time. So only a late failure is logged.
        """
        try:
            is_changed = await self.attempt(job)
        except JobNameIsTaken as error:
            log.error(  # noqa: TRY400  # A traceback adds nothing to the reason.
                "user of a job not stored", user=job.user, reason=str(error)
            )
        except (ServiceError, grpc.aio.AioRpcError) as error:
            if is_late:
                log.warning("user of a job not stored yet", user=job.user, reason=str(error))
            return False
        else:
            if is_changed:
                log.info("user of a job stored", user=job.user)
        return True

    def read_again(self) -> bool:
        """Read changed files; return whether a secret differs.

        A job whose file is unusable keeps its former secret.
        """
        if not self._files.detect():
            return False
        try:
            found = read_job_files(self._folder)
        except ValueError as error:
            log.error(  # noqa: TRY400  # A traceback adds nothing to the reason.
                "secrets of jobs not reloaded, previous ones stay valid",
                folder=self._folder,
                reason=str(error),
            )
            return False
        self._log_unusable(found)
        for job in found.unusable:
            if job in self._secrets:
                found.secrets[job] = self._secrets[job]
        is_changed = not found.secrets.is_same(self._secrets)
        self._secrets = found.secrets
        return is_changed

    def _log_unusable(self, found: JobFiles) -> None:
        for job, reason in found.unusable.items():
            log.error(
                "secret of a job not usable, its user is not changed",
                folder=self._folder,
                job=str(job),
                reason=reason,
            )

    async def attempt(self, job: Job) -> bool:
        """Create or change the user of a job if it differs; return whether it was changed.

        Raises JobNameIsTaken, ServiceError.
        """
        changes = UserChanges(self._keys, self._wall_ms(), VIA_BOOTSTRAP)
        is_new = (await self._items.find(USER, job.user)).encoded is None
        is_changed = False

        async def check() -> None:
            changes.sealing_key = await find_sealing_key(self._items)

        def decide(found: FoundItem) -> list[Item]:
            nonlocal is_changed
            old = _read(found)
            if old is not None and old.type is UserType.SUPER:
                raise JobNameIsTaken(
                    f"{job.user} is a super user, and release jobs need few rights; delete this"
                    " user or make it NORMAL, and restart the admin process"
                )
            new = changes.set_job_user(
                job.user,
                old,
                entries=RIGHTS[job],
                secret=self._secrets[job],
                retire_after_ms=RETIRE_AFTER_MS,
                table_version=found.version,
            )
            is_changed = new != old
            return [new.to_item()] if is_changed else []

        author = pb.ChangeAuthor(
            via=VIA_BOOTSTRAP,
            process=self._process,
            call=f"{VIA_BOOTSTRAP} job",
            resource=f"User:{job.user}",
            action=CREATE if is_new else UPDATE,
        )
        await self._items.change(
            USER, job.user, decide, caller=VIA_BOOTSTRAP, audit=author, check=check
        )
        return is_changed


def _read(found: FoundItem) -> User | None:
    return None if found.encoded is None else user_of(found.encoded)
