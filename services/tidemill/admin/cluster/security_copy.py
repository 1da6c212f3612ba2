"""A copy of the users, tokens, roles and the mode that requests need, at most half a second old.

The home stores the items (ADR 0073). If no broker group answers, the last known ones stay in force.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias, final

import grpc
import structlog

from tidemill.common.errors import BrokerGroupUnreachable, Conflict, ServiceError
from tidemill.security.identities import READY_MADE_ROLES
from tidemill.security.table import MODE, ROLE, TOKEN, USER, KnownUser, Mode, SecurityTable
from tidemill.security.tokens import ShownToken, has_secret

if TYPE_CHECKING:
    from tidemill.admin.cluster.security_client import FoundItem

AGE_MS_MAX: Final = 500  # of an item at its use
READ_PERIOD_S: Final = 1.0  # of the mode without requests, so that it is known in an outage
REFRESH_WAIT_S: Final = 0.5  # then a request uses the last known item: the home is slow or down
# Users and tokens, unknown names included, that the copy keeps; beyond it the least recently used
# one is dropped.
USERS_MAX: Final = 1_000
ROLES_MAX: Final = 1_000  # the limit of a cluster
NAMED_BY_CALLERS: Final = frozenset({USER, TOKEN})  # kinds whose names a caller can invent

ItemKey: TypeAlias = tuple[str, str]  # kind and name; the mode has no name
FindItem: TypeAlias = Callable[[str, str], Awaitable["FoundItem"]]

log = structlog.get_logger()


@dataclass(slots=True)
class _Copy:
    """An item at its last read."""

    encoded: bytes | None = None  # None: there is no such item
    read_at_ms: int | None = None  # None: it was never read
    reading: asyncio.Task[None] | None = None
    error: Exception | None = None  # of the last read


@final
class AdminSecurityCopy:
    """The items that the requests of this process have needed."""

    def __init__(self, find: FindItem, monotonic_ms: Callable[[], int], *, floor: Mode) -> None:
        """`find` reads an item from the cluster; `floor` is the least mode."""
        self._find = find
        self.floor = floor
        self._monotonic_ms = monotonic_ms
        self._copies: OrderedDict[ItemKey, _Copy] = OrderedDict()
        self._version = 0  # of the newest table that was seen
        self._table = SecurityTable(self._find_copy, floor=floor)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Read the mode each second until the block ends."""
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(self._read_mode_periodically(), name="security mode")
            yield
            reading.cancel()

    @property
    def version(self) -> int:
        """The version of the newest table that was seen; reads of the mode keep it new."""
        return self._version

    async def mode(self) -> Mode:
        """Return the mode in force. Raises BrokerGroupUnreachable before the first answer."""
        await self._refresh(MODE, "")
        return self._table.mode

    async def account(self, name: str) -> KnownUser | None:
        """Return a user for the check of its secrets. Its roles may be unknown yet.

        Raises BrokerGroupUnreachable as `user` does.
        """
        await self._refresh(USER, name)
        return self._table.user(name)

    async def user(self, name: str) -> KnownUser | None:
        """Return a user with its present rights; None if there is none.

        Raises BrokerGroupUnreachable if no broker group has ever answered about it.
        """
        await self._refresh(USER, name)
        known = self._table.user(name)
        if known is None:
            return None
        roles = [role for role in known.user.roles if role not in READY_MADE_ROLES]
        if roles:
            await asyncio.gather(*(self._refresh(ROLE, role) for role in roles))
        return self._table.user(name)

    async def token_user(self, shown: ShownToken) -> KnownUser | None:
        """Return the user of a token with its present rights; None if the token is wrong.

        Raises BrokerGroupUnreachable as `user` does.
        """
        await self._refresh(TOKEN, shown.id)
        # A wrong secret reads no more than an unknown id.
        if (token := self._table.find_token(shown.id)) is None or not has_secret(token, shown):
            has_secret(None, shown)
            return None
        roles = [role for role in token.roles if role not in READY_MADE_ROLES]
        await asyncio.gather(self.user(token.user), *(self._refresh(ROLE, role) for role in roles))
        return self._table.token_user(shown)

    async def _read_mode_periodically(self) -> None:
        before: Mode | None = None
        while True:
            with contextlib.suppress(ServiceError):
                mode = await self.mode()
                if before not in {None, mode}:
                    log.info("security mode changed", mode=mode.text)
                before = mode
            await asyncio.sleep(READ_PERIOD_S)

    def _find_copy(self, kind: str, name: str) -> bytes | None:
        copy = self._copies.get((kind, name))
        return None if copy is None else copy.encoded

    async def _refresh(self, kind: str, name: str) -> None:
        """Read an item again if its copy is old. Requests at the same time share one read."""
        key = kind, name
        copy = self._copies.get(key)
        if copy is None:
            self._make_room(kind)
            copy = self._copies[key] = _Copy()
        self._copies.move_to_end(key)
        read_at_ms = copy.read_at_ms
        if read_at_ms is not None and self._monotonic_ms() - read_at_ms < AGE_MS_MAX:
            return
        if copy.reading is None or copy.reading.done():
            copy.reading = asyncio.create_task(self._read(key, copy), name="security item")
        # A cancelled request must not cancel the read, which others share.
        await asyncio.wait([copy.reading], timeout=None if read_at_ms is None else REFRESH_WAIT_S)
        if copy.read_at_ms is None:
            if kind in NAMED_BY_CALLERS and self._copies.get(key) is copy:
                del self._copies[key]  # It must not displace known users in an outage.
            what = {USER: f"user {name}", TOKEN: "this token"}.get(kind, "the security mode")
            raise BrokerGroupUnreachable(
                f"no broker group has answered about {what} yet, so the rights of this request are"
                f" unknown ({copy.error}); try again later"
            )

    async def _read(self, key: ItemKey, copy: _Copy) -> None:
        began_at_ms = self._monotonic_ms()
        try:
            answer = await self._find(*key)
            if not answer.is_from_home and answer.version < self._version:
                raise BrokerGroupUnreachable("the broker groups that answer have older users")
            self._version = answer.version  # A restored home may have an older table.
            found = answer.encoded
        except Conflict as error:
            if key[0] != MODE or copy.read_at_ms is not None:
                copy.error = error
                return
            found = None  # A broker of an older version has no users, so its mode is `off`.
        except (ServiceError, grpc.aio.AioRpcError) as error:
            copy.error = error
            return
        copy.read_at_ms = began_at_ms
        if found != copy.encoded:
            copy.encoded = found
            self._table.note_change(*key)

    def _make_room(self, kind: str) -> None:
        """Drop the least recently used user if the copy is full. Roles and the mode stay."""
        if len(self._copies) < USERS_MAX + ROLES_MAX or kind not in NAMED_BY_CALLERS:
            return
        users = [(key, copy) for key, copy in self._copies.items() if key[0] in NAMED_BY_CALLERS]
        # Names without a user go first, because clients can invent them.
        oldest = next((key for key, copy in users if copy.encoded is None), None)
        oldest = oldest or next((key for key, _ in users), None)
        if oldest is not None:
            del self._copies[oldest]
            self._table.note_change(*oldest)
