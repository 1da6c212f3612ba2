"""The check of credentials of a REST API without brokers: no users, and the mode off."""

from __future__ import annotations

from tests.support.clocks import ManualClock
from tidemill.admin.cluster.security_client import FoundItem
from tidemill.admin.cluster.security_copy import AdminSecurityCopy
from tidemill.admin.http.identities import IdentityCheck, IdentityReports, Token
from tidemill.security.table import Mode


def identities(token: Token | None = None, reports: IdentityReports | None = None) -> IdentityCheck:
    """Return a check that admits everyone, or only the token."""

    async def find(_kind: str, _name: str) -> FoundItem:
        return FoundItem(None, 0)

    clock = ManualClock()
    copy = AdminSecurityCopy(find, clock.monotonic_ms, floor=Mode.OFF)
    return IdentityCheck(
        copy,
        lambda: None,
        wall_ms=clock.wall_ms,
        monotonic_ms=clock.monotonic_ms,
        token=token,
        reports=reports,
    )
