"""The user of a call, by its credentials: a token, a signature or a certificate (ADR 0071).

The first of these that a call has decides, in this order. Nothing remembers a right. Only the match
of a header with a secret is remembered, because a client sends the same header for a second.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple, final

from tidemill.common.errors import Banned, KeyMissing, Overloaded, Unauthorized
from tidemill.proxy.server import bearer
from tidemill.proxy.server.gated_call import Caller, GatedCall
from tidemill.proxy.server.signed_calls import SignedCalls
from tidemill.security.signatures import AUTHORIZATION, DATE_TIME, parse_header

if TYPE_CHECKING:
    from tidemill.proxy.server.service_accounts import ServiceAccounts
    from tidemill.security.identities import User
    from tidemill.security.secret_keys import SecretKeys
    from tidemill.security.table import KnownUser, SecurityTable

# Headers with a verified signature. A client changes its header every second.
VERIFIED_MAX: Final = 16_384
VERIFIED_HEADER_CHARS_MAX: Final = 1_024


class _Verified(NamedTuple):
    """A header that matches a secret of a user."""

    caller: Caller  # as of its generation
    sealed: bytes  # the secret, encrypted; a later secret may have the same id


@final
class CallCredentials:
    """The checks of the credentials of all calls of the process."""

    def __init__(
        self,
        table: SecurityTable,
        keys: Callable[[], SecretKeys | None],
        wall_ms: Callable[[], int],
        accounts: ServiceAccounts | None,
    ) -> None:
        """`keys` and `accounts` are those of the gate."""
        self.accounts = accounts
        self.generation = 0  # of the table
        self._table = table
        self._signatures = SignedCalls(table, keys)
        self._wall_ms = wall_ms
        self._bans = table.bans
        # The newer half and the older half of the verified headers.
        self._verified: dict[tuple[str, str], _Verified] = {}
        self._verified_before: dict[tuple[str, str], _Verified] = {}
        # By method and result. Counters that begin at zero show their first increase.
        self.authentications = Counter(
            {(method, result): 0 for method in bearer.METHODS for result in ("verified", "refused")}
        )

    @property
    def has_keys(self) -> bool:
        """Whether there is a key file."""
        return self._signatures.has_keys

    @property
    def undecryptable_count(self) -> int:
        """The number of secrets that no key of the key file decrypts."""
        return len(self._signatures.undecryptable)

    def note_change(self) -> None:
        """Check each call again, after a change of users, bans or keys."""
        self.generation += 1
        self._signatures.undecryptable.clear()

    def is_current(self, caller: Caller) -> bool:
        """Whether nothing has changed since the user was found, and its secret has not ended."""
        _, not_after_ms, generation = caller
        return generation == self.generation and (
            not not_after_ms or self._wall_ms() <= not_after_ms
        )

    def find(self, call: GatedCall) -> Caller | None:
        """Return the user of a call; None if it has no credentials.

        Raises Unauthorized, KeyMissing, Overloaded. The order of the checks is: signature, end of
        the secret, enabled, ban. A text names the user only after a correct signature.
        """
        try:
            return self._find(call)
        except (Unauthorized, KeyMissing, Overloaded):
            self.authentications[self._method_of(call), "refused"] += 1
            raise

    def _find(self, call: GatedCall) -> Caller | None:
        if self.accounts is not None and (token := self.accounts.find_token(call.metadata)):
            login = self.accounts.verify(token, call, self._wall_ms())
            self.authentications[bearer.KUBERNETES, "verified"] += 1
            self._check_caller(login.known, call)
            return Caller(login.known, login.not_after_ms, self.generation)
        authorization = call.metadata.get(AUTHORIZATION)
        if not authorization:
            return self._find_certified(call)
        if bearer.is_bearer(authorization):
            known = bearer.verify_token(self._table, authorization, self._wall_ms())
            self.authentications[bearer.TOKEN, "verified"] += 1
            self._check_caller(known, call)
            return Caller(known, known.not_after_ms, self.generation)
        key = authorization, call.metadata.get(DATE_TIME, "")
        verified = self._verified.get(key) or self._verified_before.get(key)
        if verified is not None and self.is_current(verified.caller):
            # A copied header may come over another connection.
            verified.caller.known.check_certificate(call.certificate_names)
            return verified.caller
        found = None
        if verified is not None:
            found = self._signatures.find_again(verified.caller.known.user, verified.sealed)
        if found is None:
            header = parse_header(*key)
            if header is None:
                return self._find_certified(call)
            found = self._signatures.verify(header)
            self.authentications[bearer.SIGNATURE, "verified"] += 1
        known, secret = found
        user = known.user
        if secret.is_over(self._wall_ms()):
            text = f"the secret of user {user.name} has ended; use the newer one"
            raise of_user(user, Unauthorized(text))
        if not user.is_enabled:
            raise of_user(user, Unauthorized(f"user {user.name} is disabled"))
        self._check_caller(known, call)
        # Only now: a remembered header is not checked again until the next change.
        caller = Caller(known, secret.not_after_ms, self.generation)
        self._remember(key, _Verified(caller, secret.sealed))
        return caller

    def _method_of(self, call: GatedCall) -> str:
        """Return the kind of the credentials of a call."""
        if self.accounts is not None and self.accounts.find_token(call.metadata):
            return bearer.KUBERNETES
        if not call.metadata.get(AUTHORIZATION):
            return bearer.CERTIFICATE
        return bearer.method_of(call.metadata)

    def _find_certified(self, call: GatedCall) -> Caller | None:
        """Return the user of the certificate of a connection; None without a certificate."""
        if not (names := call.certificate_names):
            return None
        known = self._table.certificate_user(names)
        if known is None:
            raise Unauthorized("no credentials, and no user lists a name of the certificate")
        known.check_token(self._wall_ms())
        self._check_caller(known, call)
        self.authentications[bearer.CERTIFICATE, "verified"] += 1
        return Caller(known, 0, self.generation)

    def _check_caller(self, known: KnownUser, call: GatedCall) -> None:
        """Raise Unauthorized for another certificate than the user lists, or a banned user."""
        known.check_certificate(call.certificate_names)
        ban = self._bans.find_user(known.user.name, known.user.id, self._wall_ms())
        if ban is not None:
            raise of_user(known.user, Banned(ban.text))

    def _remember(self, key: tuple[str, str], verified: _Verified) -> None:
        if len(key[0]) + len(key[1]) > VERIFIED_HEADER_CHARS_MAX:
            return
        if len(self._verified) >= VERIFIED_MAX // 2:
            self._verified_before, self._verified = self._verified, {}
        self._verified[key] = verified


def of_user(user: User, error: Unauthorized) -> Unauthorized:
    """Note in the error of a call that its credentials are those of a user."""
    error.user_id = user.id
    return error
