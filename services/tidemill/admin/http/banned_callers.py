"""The refusal of banned users and addresses by the REST API (ADR 0078).

An operator must be able to undo each ban. So a ban of addresses does not hold for loopback
addresses, and no ban holds for the token of admin_token_file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, final

from tidemill.admin.http.actor import VIA_FILE, Actor
from tidemill.admin.http.identities import Identity
from tidemill.admin.http.refused_login import RefusedLogin
from tidemill.common.addresses import is_loopback

if TYPE_CHECKING:
    from starlette.types import Scope

    from tidemill.admin.cluster.ban_copy import BanCopy
    from tidemill.security.bans import Ban


class Identities(Protocol):
    """The check of credentials."""

    @property
    def challenge(self) -> str:
        """The value of WWW-Authenticate."""

    async def identify(self, scope: Scope) -> Identity:
        """Return the caller of a request. Raises RefusedLogin, ServiceError."""


class BanReports(Protocol):
    """The receiver of refused requests."""

    def note_refusal(self, scope: Scope, actor: Actor, reason: str) -> None:
        """Note a refused request."""


@final
class BannedCallers:
    """The check of credentials, and of bans behind it."""

    def __init__(
        self,
        identities: Identities,
        bans: BanCopy,
        wall_ms: Callable[[], int],
        reports: BanReports | None = None,
    ) -> None:
        self._identities = identities
        self._bans = bans
        self._wall_ms = wall_ms
        self._reports = reports

    @property
    def challenge(self) -> str:
        """The value of WWW-Authenticate."""
        return self._identities.challenge

    async def identify(self, scope: Scope) -> Identity:
        """Return the caller of a request. Raises RefusedLogin, ServiceError."""
        identity = await self._identities.identify(scope)
        if identity.actor.via == VIA_FILE:
            return identity
        await self._bans.refresh()
        ban = self._find_ban(identity)
        if ban is None:
            return identity
        if self._reports is not None:
            self._reports.note_refusal(scope, identity.actor, ban.text)
        raise RefusedLogin(ban.text)

    def _find_ban(self, identity: Identity) -> Ban | None:
        now_ms, table = self._wall_ms(), self._bans.table
        known, address = identity.access.known, identity.actor.address
        if known is not None:
            ban = table.find_user(known.user.name, known.user.id, now_ms)
            if ban is not None:
                return ban
        return None if is_loopback(address) else table.find_host(address, now_ms)
