"""Tokens of Kubernetes service accounts at the port for clients (ADR 0079).

x-mq-session-token   a token; the official clients send it beside a signature, which is ignored
authorization        Bearer and a token
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, final

from tidemill.proxy.server.bearer import SCHEME, is_bearer
from tidemill.security.failure_buckets import SignatureChecks
from tidemill.security.kubernetes_tokens import SESSION_TOKEN, KubernetesTokens
from tidemill.security.signatures import AUTHORIZATION
from tidemill.security.tokens import PREFIX

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidemill.proxy.server.gated_call import GatedCall
    from tidemill.proxy.settings import ProxySettings
    from tidemill.security.issuer_keys import IssuerKeys
    from tidemill.security.table import KnownUser, SecurityTable


class AccountLogin(NamedTuple):
    """The user of a token, and the end of the token."""

    known: KnownUser
    not_after_ms: int


@final
class ServiceAccounts:
    """The check of the tokens of all calls of the process."""

    def __init__(self, table: SecurityTable, tokens: KubernetesTokens, keys: IssuerKeys) -> None:
        """`keys` are those that `tokens` are verified with."""
        self.keys = keys
        self._table = table
        self._tokens = tokens

    def find_token(self, headers: Mapping[str, str]) -> str:
        """Return the token of a call; empty if it has none. An empty header counts as absent."""
        if session := _last_of(headers.get(SESSION_TOKEN, "")):
            return session
        authorization = headers.get(AUTHORIZATION, "")
        if not is_bearer(authorization):
            return ""
        # A header that a client has repeated is a list.
        text = _last_of(authorization)
        text = text[len(SCHEME) :].strip() if is_bearer(text) else text
        return "" if text.startswith(PREFIX) else text

    def verify(self, text: str, call: GatedCall, now_ms: int) -> AccountLogin:
        """Return the user of a token. Raises Unauthorized, KeyMissing, Overloaded.

        The order of the checks is: token, its user, enabled.
        """
        verified = self._tokens.verify(text, address=_address_of(call), now_ms=now_ms)
        known = self._table.account_user(verified.account)
        known.check_token(now_ms)
        return AccountLogin(known, verified.not_after_ms)

    def has_unknown_key(self, call: GatedCall) -> bool:
        """Whether the token of a call names an unknown key."""
        text = self.find_token(call.metadata)
        return bool(text) and self._tokens.has_unknown_key(text, address=_address_of(call))


def service_accounts_of(
    settings: ProxySettings,
    table: SecurityTable,
    keys: IssuerKeys | None,
    monotonic_ms: Callable[[], int],
) -> ServiceAccounts | None:
    """Return the check of the settings; None without an issuer."""
    if keys is None:
        return None
    limit = SignatureChecks(monotonic_ms)
    tokens = KubernetesTokens(settings.oidc_issuer, settings.oidc_audience, keys.present, limit)
    return ServiceAccounts(table, tokens, keys)


def _address_of(call: GatedCall) -> str:
    address = call.find_address()
    return "" if address is None else str(address)


def _last_of(header: str) -> str:
    return header.rpartition(",")[2].strip()
