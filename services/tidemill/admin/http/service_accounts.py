"""Tokens of Kubernetes service accounts in requests to the REST API (ADR 0079)."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any, final

from tidemill.admin.cluster.item_copy import ItemCopy
from tidemill.common.errors import BrokerGroupUnreachable, Unauthorized
from tidemill.security.kubernetes_tokens import KubernetesTokens
from tidemill.security.listed_identities import ACCOUNTS, ListedIdentities, listed_by, only_user
from tidemill.security.table import USER, VIA_ACCOUNT
from tidemill.security.tokens import PREFIX

if TYPE_CHECKING:
    from tidemill.admin.cluster.security_copy import AdminSecurityCopy
    from tidemill.admin.settings import AdminSettings
    from tidemill.security.issuer_keys import IssuerKeys
    from tidemill.security.table import KnownUser


@final
class AnyNumberOfChecks:
    """No limit of checks: failed logins have a limit of their own."""

    def is_used_up(self, address: str) -> bool:  # noqa: ARG002  # As of each limit.
        """Admit each check."""
        return False

    def check(self, address: str) -> None:
        """Admit each check."""

    def note_failure(self, address: str) -> None:
        """Count nothing."""


@final
class AccountCopy:
    """The users that list service accounts, as new as the copy of the mode."""

    def __init__(
        self, read_all: Callable[[str], AsyncIterator[bytes]], find_version: Callable[[], int]
    ) -> None:
        """Read the users with `read_all` after a change of the version."""
        self._copy = ItemCopy(USER, read_all, find_version, _lists_any)
        self._copy.on_change = self._index
        self._identities = ListedIdentities()

    async def user_of(self, account: str) -> str:
        """Return the user of a service account. Raises Unauthorized, BrokerGroupUnreachable."""
        await self._copy.refresh()
        if not self._copy.is_known:
            raise BrokerGroupUnreachable(
                "no broker group has answered about the users of service accounts yet; try again"
                " later"
            )
        return only_user(self._identities.find(ACCOUNTS, account), ACCOUNTS, account)

    def _index(self) -> None:
        self._identities = ListedIdentities()
        for name, encoded in self._copy.items.items():
            self._identities.put(name, json.loads(encoded)[USER])


@final
class RestServiceAccounts:
    """The check of the tokens of all requests of the process."""

    def __init__(
        self,
        copy: AdminSecurityCopy,
        accounts: AccountCopy,
        tokens: KubernetesTokens,
        keys: IssuerKeys,
    ) -> None:
        """`keys` are those that `tokens` are verified with."""
        self._copy = copy
        self._accounts = accounts
        self._tokens = tokens
        self._keys = keys

    async def find_account(self, text: str, now_ms: int) -> str:
        """Return the service account of a token. Raises Unauthorized, KeyMissing."""
        if self._tokens.has_unknown_key(text, address=""):
            await self._keys.read_for_unknown()
        return self._tokens.verify(text, address="", now_ms=now_ms).account

    async def user_of(self, account: str, now_ms: int) -> KnownUser:
        """Return the user of a service account. Raises Unauthorized, BrokerGroupUnreachable."""
        known = await self._copy.user(await self._accounts.user_of(account))
        # The two copies may be of different versions.
        if known is None or account not in known.user.service_accounts:
            raise Unauthorized(f"no user lists the service account {account}")
        known = known.with_identity(VIA_ACCOUNT, account)
        known.check_token(now_ms)
        known.check_certificate(())
        return known


def rest_service_accounts_of(
    settings: AdminSettings,
    keys: IssuerKeys | None,
    copy: AdminSecurityCopy,
    read_all: Callable[[str], AsyncIterator[bytes]],
) -> RestServiceAccounts | None:
    """Return the check of the settings; None without an issuer."""
    if keys is None:
        return None
    issuer, audience, limit = settings.oidc_issuer, settings.oidc_audience, AnyNumberOfChecks()
    return RestServiceAccounts(
        copy,
        AccountCopy(read_all, lambda: copy.version),
        KubernetesTokens(issuer, audience, keys.present, limit),
        keys,
    )


def find_token(authorization: str) -> str:
    """Return the token of a header; empty if it has none, or a named token."""
    scheme, _, text = authorization.partition(" ")
    text = text.strip()
    return text if scheme.lower() == "bearer" and not text.startswith(PREFIX) else ""


def _lists_any(item: dict[str, Any]) -> bool:
    return bool(listed_by(item[USER]))
