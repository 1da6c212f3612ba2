"""The user of a call, by its credentials: a token, a signature or a certificate (ADR 0071).

The first of these that a call has decides, in this order. Nothing remembers a right. Only the match
of a header with a secret is remembered, because a client sends the same header for a second.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeAlias, final

from tidemill.common.errors import Banned, Unauthorized
from tidemill.proxy.server import bearer
from tidemill.proxy.server.gated_call import Caller, GatedCall
from tidemill.proxy.server.signed_calls import SignedCalls
from tidemill.security.secret_uses import SecretUses
from tidemill.security.signatures import AUTHORIZATION, DATE_TIME, check_date, parse_header
from tidemill.security.table import VIA_CERTIFICATE, identity_text

if TYPE_CHECKING:
    from tidemill.proxy.server.service_accounts import ServiceAccounts
    from tidemill.security.identities import SealedSecret
    from tidemill.security.secret_keys import SecretKeys
    from tidemill.security.table import KnownUser, SecurityTable

# Headers with a verified signature. A client changes its header every second.
VERIFIED_MAX: Final = 16_384
VERIFIED_HEADER_CHARS_MAX: Final = 1_024
# The exports of client metrics: Python clients sign the first one, and repeat its headers.
_SIGNED_ONCE: Final = "export"

_SignedText: TypeAlias = tuple[str, str]  # the header with the signature, and the date


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
        self.signature_age_max_ms = 0  # 0: without limit
        self._table = table
        self._signatures = SignedCalls(table, keys)
        self._wall_ms = wall_ms
        self._bans = table.bans
        self.uses = SecretUses(time.monotonic, wall_ms)
        self._verified: dict[_SignedText, Caller] = {}
        # The same headers, the oldest first. Each new one drops the oldest: to free thousands of
        # callers at once takes longer than a turn.
        self._verified_order: deque[_SignedText] = deque()
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
        return caller.generation == self.generation and (
            not caller.not_after_ms or self._wall_ms() <= caller.not_after_ms
        )

    def find(self, call: GatedCall) -> Caller | None:
        """Return the user of a call; None if it has no credentials.

        Raises Unauthorized, KeyMissing, Overloaded. The order of the checks is: signature, end of
        the secret, enabled, certificate, ban, date. A text names the user only after a correct
        signature.
        """
        headers = call.metadata
        if self.accounts is not None and (token := self.accounts.find_token(headers)):
            login = self.accounts.verify(token, call, self._wall_ms())
            self.authentications[bearer.KUBERNETES, "verified"] += 1
            return self._accept(call, login.known, login.not_after_ms)
        key = headers.get(AUTHORIZATION, ""), headers.get(DATE_TIME, "")
        verified = self._verified.get(key)
        if verified is not None:
            if self.is_current(verified):
                # A copied header may come over another connection.
                if verified.known.user.certificates:
                    verified.known.check_certificate(call.certificate_names)
                self._check_age(call, verified.known, key[1])
                if verified.use is not None:
                    verified.use.at_s = call.started_at
                return verified
            found = self._signatures.find_again(verified.known.user, verified.sealed)
            if found is not None:
                return self._accept_signed(call, key, *found)
        authorization = key[0]
        if not authorization:
            return self._find_certified(call)
        if authorization[0] in "bB" and bearer.is_bearer(authorization):
            known = bearer.verify_token(self._table, authorization, self._wall_ms())
            self.authentications[bearer.TOKEN, "verified"] += 1
            return self._accept(call, known, known.not_after_ms)
        header = parse_header(*key)
        if header is None:
            return self._find_certified(call)
        known, secret = self._signatures.verify(header)
        self.authentications[bearer.SIGNATURE, "verified"] += 1
        return self._accept_signed(call, key, known, secret)

    def _accept_signed(
        self, call: GatedCall, key: _SignedText, known: KnownUser, secret: SealedSecret
    ) -> Caller:
        """Check the rest of a signed call, and remember its header. Raises Unauthorized."""
        user = known.user
        if secret.not_after_ms and secret.is_over(self._wall_ms()):
            text = f"the secret of user {user.name} has ended; use the newer one"
            raise known.name_in(Unauthorized(text))
        if not user.is_enabled:
            raise known.name_in(Unauthorized(f"user {user.name} is disabled"))
        caller = self._accept(call, known, secret.not_after_ms, secret.sealed)
        self._check_age(call, known, key[1])
        caller = caller._replace(use=self.uses.note(user.id, secret, call.started_at))
        # Only now: a remembered header is not checked again until the next change.
        if len(key[0]) + len(key[1]) <= VERIFIED_HEADER_CHARS_MAX:
            if key not in self._verified:
                self._verified_order.append(key)
                if len(self._verified_order) > VERIFIED_MAX:
                    del self._verified[self._verified_order.popleft()]
            self._verified[key] = caller
        return caller

    def _check_age(self, call: GatedCall, known: KnownUser, date_time: str) -> None:
        """Check the date of a signature at the begin of its call. Raises Unauthorized.

        An open stream keeps the headers of its begin, so its age does not count.
        """
        if not self.signature_age_max_ms or call.method == _SIGNED_ONCE:
            return
        open_ms = round((time.monotonic() - call.started_at) * 1_000)
        now_ms = self._wall_ms() - open_ms
        try:
            check_date(date_time, now_ms=now_ms, age_ms_max=self.signature_age_max_ms)
        except Unauthorized as error:
            raise known.name_in(error) from None

    def count_refused(self, call: GatedCall) -> None:
        """Count a call whose credentials `find` has refused."""
        self.authentications[self._method_of(call), "refused"] += 1

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
            error = Unauthorized("no credentials, and no user lists a name of the certificate")
            error.identities = tuple([identity_text(VIA_CERTIFICATE, name) for name in names])
            raise error
        known.check_token(self._wall_ms())
        caller = self._accept(call, known, 0)
        self.authentications[bearer.CERTIFICATE, "verified"] += 1
        return caller

    def _accept(
        self, call: GatedCall, known: KnownUser, not_after_ms: int, sealed: bytes = b""
    ) -> Caller:
        """Return the caller.

        Raises Unauthorized for another certificate than the user lists, or a banned user.
        """
        user = known.user
        if user.certificates:
            known.check_certificate(call.certificate_names)
        if self._bans.has_users:
            ban = self._bans.find_user(user.name, user.id, self._wall_ms())
            if ban is not None:
                raise known.name_in(Banned(ban.text))
        return Caller(known, not_after_ms, self.generation, sealed)
