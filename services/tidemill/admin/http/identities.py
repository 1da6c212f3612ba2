"""The user of a request to the REST API, by its header `Authorization`, or by its cookie.

    Basic USER:SECRET    a user of the cluster
    Bearer tmk_ID_SECRET a user of the cluster, with a named token
    Bearer JWT           a user of the cluster, with the token of a Kubernetes service account
    Bearer TOKEN         the built-in super user, with the token of admin_token_file
    MQv2-HMAC-SHA1 ...   a user of the cluster, with a signature; of calls by gRPC alone
    a session cookie     a user of the cluster that has logged in (`sessions.py`)

The mode decides what a missing or wrong credential means (ADR 0071).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, final

import structlog
from starlette.datastructures import Headers

from tidemill.admin.http.actor import BUILT_IN_USER, UNKNOWN_ADDRESS, VIA_FILE, Actor, make_actor
from tidemill.admin.http.failed_logins import FailedLogins
from tidemill.admin.http.refused_login import RefusedLogin
from tidemill.admin.http.request_access import RequestAccess, user_access
from tidemill.admin.http.route_templates import PREFIX
from tidemill.admin.http.service_accounts import find_token
from tidemill.admin.http.sessions import (
    VIA_SESSION,
    Session,
    Sessions,
    find_cookie,
    set_cookie,
    set_renewed_cookie,
)
from tidemill.admin.http.shown_secrets import (
    MISSING,
    VIA_BASIC,
    ShownSecret,
    find_shown_secret,
    is_bearer,
)
from tidemill.common.addresses import is_loopback
from tidemill.common.errors import (
    BrokerGroupUnreachable,
    KeyMissing,
    Unauthorized,
    WrongCredentials,
)
from tidemill.security.identities import SECRETS_MAX, USER_NAME_CHARS_MAX, SealedSecret
from tidemill.security.kubernetes_tokens import hash_of
from tidemill.security.secret_keys import UnknownKey
from tidemill.security.table import Mode
from tidemill.security.tokens import WRONG as WRONG_TOKEN
from tidemill.security.tokens import parse_bearer

if TYPE_CHECKING:
    from starlette.types import Scope

    from tidemill.admin.cluster.security_copy import AdminSecurityCopy
    from tidemill.admin.http.service_accounts import RestServiceAccounts
    from tidemill.security.secret_keys import SecretKeys
    from tidemill.security.secret_uses import SecretUses
    from tidemill.security.table import KnownUser

NO_CERTIFICATE: Final = ()  # This API accepts none, so users that list some are refused.
# Time of the answer to wrong credentials, from the begin of the check: the first check of an
# existing user takes longer than that of an unknown one.
WRONG_ANSWER_S: Final = 0.05
REPLICAS: Final = f"{PREFIX}/replicas"
CHALLENGE: Final = 'Basic realm="tidemill", Bearer realm="tidemill"'
SESSION_ENDED: Final = "the session has ended; log in again"
REFUSED_BY_FILE: Final = (
    "the token is missing or wrong; send the token of this API in the header"
    " Authorization: Bearer TOKEN"
)

log = structlog.get_logger()


class Token(Protocol):
    """The token of admin_token_file."""

    def admits(self, authorization: str) -> bool:
        """Whether the header contains the token."""


class IdentityReports(Protocol):
    """The receiver of refused requests, and of those of super users."""

    def note_refusal(
        self,
        scope: Scope,
        actor: Actor,
        reason: str,
        *,
        action: str = "",
        resource: str = "",
        passes: bool = False,
        is_known: bool = False,
    ) -> None:
        """Note a refused request; it `passes` in the mode permissive."""

    def note_access(self, scope: Scope, actor: Actor) -> None:
        """Note a request of a super user."""


class Identity(NamedTuple):
    """The caller of a request, and its rights."""

    actor: Actor
    access: RequestAccess


class VerifiedUser(NamedTuple):
    """The user of a request, and its credential: a token has it in `known`."""

    known: KnownUser
    secret: SealedSecret | None = None  # that was shown
    session: Session | None = None
    kind: str = VIA_BASIC  # of the credential, unless `known` has one

    @property
    def via(self) -> str:
        """The kind and the name of the credential."""
        return self.known.via or self.kind


class _MissingRights:
    """Notes the missing rights of one request."""

    def __init__(self, reports: IdentityReports | None, scope: Scope, actor: Actor) -> None:
        self._reports, self._scope, self._actor = reports, scope, actor

    def note_missing_right(self, reason: str, actions: str, resource: str, *, passes: bool) -> None:
        """Note a missing right."""
        if self._reports is not None:
            self._reports.note_refusal(
                self._scope,
                self._actor,
                reason,
                action=actions,
                resource=resource,
                passes=passes,
                is_known=True,
            )


@final
class IdentityCheck:
    """The check of credentials of all requests of the process."""

    def __init__(
        self,
        copy: AdminSecurityCopy,
        keys: Callable[[], SecretKeys | None],
        *,
        wall_ms: Callable[[], int],
        monotonic_ms: Callable[[], int],
        token: Token | None = None,
        reports: IdentityReports | None = None,
        sessions: Sessions | None = None,
        uses: SecretUses | None = None,
        accounts: RestServiceAccounts | None = None,
    ) -> None:
        """`keys` returns the keys of the secrets; None without a key file.

        `uses` gets the uses of secrets. `accounts` verifies tokens of service accounts; None: there
        are none.
        """
        self._uses = uses
        self._accounts = accounts
        self.sessions = sessions or Sessions(keys, wall_ms)
        self._copy = copy
        self._keys = keys
        self._wall_ms = wall_ms
        self._token = token
        self._reports = reports
        self._failed = FailedLogins(monotonic_ms)
        self._random_secret = secrets.token_urlsafe(32).encode()
        self._is_token_reported = False

    async def identify(self, scope: Scope) -> Identity:
        """Return the caller of a request. Raises RefusedLogin, ServiceError."""
        shown = Headers(scope=scope).getlist("authorization")
        if len(shown) == 1 and self._token is not None and self._token.admits(shown[0]):
            try:
                mode = await self._copy.mode()
            except BrokerGroupUnreachable:
                mode = Mode.ON  # The token may do everything in each mode, also in an outage.
            return self._built_in(scope, mode)
        try:
            mode = await self._copy.mode()
        except BrokerGroupUnreachable as error:
            # The mode may be `on`. The controllers, at which an operator repairs a broker group
            # without a master, keep no mode.
            if not scope["path"].startswith(REPLICAS):
                raise
            if not is_loopback(make_actor(scope).address):
                raise BrokerGroupUnreachable(
                    f"{error.message}; to repair replicas before a broker group answers, run the"
                    " command on the machine of the admin process, or set admin_token_file and send"
                    " its token in the header Authorization: Bearer TOKEN"
                ) from None
            mode = self._copy.floor
        if mode is Mode.OFF or (mode is Mode.PERMISSIVE and self._token is not None):
            if self._token is not None:
                raise self._refused(scope, RefusedLogin(REFUSED_BY_FILE))
            return Identity(make_actor(scope), RequestAccess(mode, is_super=False))
        try:
            verified = await self._verify(scope, shown, make_actor(scope).address)
        except RefusedLogin as refused:
            if mode is Mode.ON:
                raise self._refused(scope, refused) from None
            self._note_refusal(scope, refused, passes=True)
            return self._anonymous(scope, mode)
        except KeyMissing as error:
            if mode is Mode.ON:
                raise
            self._note_refusal(scope, RefusedLogin(error.message), passes=True)
            return self._anonymous(scope, mode)
        known = verified.known
        actor = make_actor(scope, user=known.user.name, via=verified.via)
        notes = _MissingRights(self._reports, scope, actor)
        access = user_access(
            mode,
            known,
            address=actor.address,
            notes=notes,
            secret=verified.secret,
            session=verified.session,
        )
        if access.is_super and self._reports is not None:
            self._reports.note_access(scope, actor)
        self._renew(scope, verified.session)
        return Identity(actor, access)

    def _renew(self, scope: Scope, session: Session | None) -> None:
        """Let the answer have a new cookie if that of the request is a minute old."""
        renewed = None if session is None else self.sessions.renew(session)
        if renewed is not None:
            set_renewed_cookie(scope, set_cookie(scope, self.sessions.encode(renewed)))

    @property
    def challenge(self) -> str:
        """The value of WWW-Authenticate."""
        return CHALLENGE

    def _built_in(self, scope: Scope, mode: Mode) -> Identity:
        if mode is Mode.ON and not self._is_token_reported:
            self._is_token_reported = True
            log.warning(
                "the token of admin_token_file is used as a super user; give each caller a user"
            )
        actor = make_actor(scope, user=BUILT_IN_USER, via=VIA_FILE)
        if self._reports is not None:
            self._reports.note_access(scope, actor)
        return Identity(actor, RequestAccess(mode, is_super=True, address=actor.address))

    def _anonymous(self, scope: Scope, mode: Mode) -> Identity:
        """Return the caller of a request that passes in the mode permissive.

        Its missing credentials are noted already, so its missing rights are not.
        """
        return Identity(make_actor(scope), RequestAccess(mode, is_super=False))

    def _refused(self, scope: Scope, refused: RefusedLogin) -> RefusedLogin:
        self._note_refusal(scope, refused, passes=False)
        return refused

    def _note_refusal(self, scope: Scope, refused: RefusedLogin, *, passes: bool) -> None:
        if self._reports is not None:
            actor = make_actor(scope, user=refused.user, via=refused.via)
            if refused.claimed_user:
                actor = replace(actor, claimed_user=refused.claimed_user)
            self._reports.note_refusal(scope, actor, refused.reason, passes=passes)

    async def _verify(self, scope: Scope, shown: list[str], address: str) -> VerifiedUser:
        """Return the user of a request. Raises RefusedLogin, KeyMissing, BrokerGroupUnreachable.

        The first credential that is present decides: the header, then the cookie.
        """
        if len(shown) == 1 and self._accounts is not None and (token := find_token(shown[0])):
            return VerifiedUser(await self._verify_account(self._accounts, token, address))
        if len(shown) == 1 and is_bearer(shown[0]):
            return VerifiedUser(await self._verify_token(shown[0], address))
        if shown:
            return await self._verify_secret(find_shown_secret(scope, shown), address)
        if (cookie := find_cookie(scope)) is not None:
            return await self._verify_session(cookie)
        raise RefusedLogin(MISSING)

    async def _verify_session(self, cookie: str) -> VerifiedUser:
        """Return the user of a cookie. Raises RefusedLogin, BrokerGroupUnreachable.

        A failure is not counted: nobody can guess a signature.
        """
        session = self.sessions.read(cookie)
        known = None if session is None else await self._copy.user(session.user)
        if session is None or known is None or (secret := session.find_secret(known.user)) is None:
            raise RefusedLogin(SESSION_ENDED)
        self._check_valid(known, secret, VIA_SESSION)
        self._note_use(known, secret)  # The session ends with its secret.
        return VerifiedUser(known, session=session, kind=VIA_SESSION)

    async def _verify_token(self, authorization: str, address: str) -> KnownUser:
        """Return the user of a named token. Raises RefusedLogin, BrokerGroupUnreachable.

        The order of the checks is: token, its end, enabled. The id of a token is no secret, so it
        has failed logins of its own, like a user.
        """
        began_at_s = asyncio.get_running_loop().time()
        shown = parse_bearer(authorization)
        name = "" if shown is None else f"token {shown.id}"
        self._check_limit(name, address)
        try:
            known = None if shown is None else await self._copy.token_user(shown)
        except BrokerGroupUnreachable:
            self._note_failure(name, address)
            raise
        self._check_limit(name, address)
        if known is None:
            self._note_failure(name, address)
            await self._wait_for_wrong_answer(began_at_s)
            raise RefusedLogin(WRONG_TOKEN)
        try:
            known.check_token(self._wall_ms())
            known.check_certificate(NO_CERTIFICATE)
        except Unauthorized as error:
            raise RefusedLogin.of(error) from None
        return known

    async def _verify_account(
        self, accounts: RestServiceAccounts, token: str, address: str
    ) -> KnownUser:
        """Return the user of a service account.

        Raises RefusedLogin, KeyMissing, BrokerGroupUnreachable. The order of the checks is: token,
        its user, enabled. A wrong token names no user, so it has failed logins of its own.
        """
        began_at_s = asyncio.get_running_loop().time()
        name = f"token {hash_of(token).hex()[:16]}"
        self._check_limit(name, address)
        try:
            account = await accounts.find_account(token, self._wall_ms())
        except Unauthorized as error:
            self._note_failure(name, address)
            if isinstance(error, WrongCredentials):
                await self._wait_for_wrong_answer(began_at_s)
            raise RefusedLogin(error.message) from None
        try:
            return await accounts.user_of(account, self._wall_ms())
        except Unauthorized as error:
            raise RefusedLogin.of(error) from None

    # ------------------------------------------------------------ secrets and signatures

    async def _verify_secret(self, shown: ShownSecret, address: str) -> VerifiedUser:
        """Return the user of a secret. Raises RefusedLogin, KeyMissing, BrokerGroupUnreachable.

        The order of the checks is: secret, end of the secret, enabled. A text names the user only
        after a correct secret.
        """
        began_at_s = asyncio.get_running_loop().time()
        name = shown.name
        if len(name) > USER_NAME_CHARS_MAX:
            name = ""  # No user has this name, and nothing keeps it.
        self._check_limit(name, address)
        try:
            account = await self._copy.account(name) if name else None
        except BrokerGroupUnreachable:
            self._note_failure(name, address)  # The check of invented names is limited too.
            raise
        # The check and the count are one piece: requests at the same time cannot exceed the limit.
        self._check_limit(name, address)
        try:
            sealed = self._find_secret(account, shown)
        except WrongCredentials as error:
            self._note_failure(name, address)
            await self._wait_for_wrong_answer(began_at_s)
            raise RefusedLogin(error.message, claimed_user=name) from None
        # Roles are read for a verified user alone, so that the time tells nothing about others.
        known = await self._copy.user(name)
        # A rotation of the key file may have encrypted the secret again meanwhile.
        secrets_now = () if known is None else known.user.secrets
        sealed_now = next((each for each in secrets_now if each.is_same(sealed)), None)
        if known is None or sealed_now is None:
            raise RefusedLogin(shown.wrong, claimed_user=name)
        self._check_valid(known, sealed_now, shown.kind)
        self._note_use(known, sealed_now)
        return VerifiedUser(known, secret=sealed_now, kind=shown.kind)

    def _check_valid(self, known: KnownUser, secret: SealedSecret, via: str) -> None:
        """Raise RefusedLogin if the secret has ended, or if the user is disabled."""
        name = known.user.name
        if secret.is_over(self._wall_ms()):
            text = f"the secret of user {name} has ended; use the newer one"
            raise RefusedLogin(text, user=name, via=via)
        if not known.user.is_enabled:
            raise RefusedLogin(f"user {name} is disabled", user=name, via=via)
        try:
            known.check_certificate(NO_CERTIFICATE)
        except Unauthorized as error:
            raise RefusedLogin.of(error, via) from None

    def _note_use(self, known: KnownUser, secret: SealedSecret) -> None:
        if self._uses is not None:
            self._uses.note_now(known.user.id, secret)

    def _note_failure(self, name: str, address: str) -> None:
        if address != UNKNOWN_ADDRESS:
            self._failed.note(name, address)

    async def _wait_for_wrong_answer(self, began_at_s: float) -> None:
        delay_s = began_at_s + WRONG_ANSWER_S - asyncio.get_running_loop().time()
        await asyncio.sleep(max(delay_s, 0))

    def _check_limit(self, name: str, address: str) -> None:
        if wait_s := self._failed.wait_s(name, address):
            raise RefusedLogin(
                f"too many failed logins from {address}; wait {wait_s} s", wait_s=wait_s
            )

    def _find_secret(self, known: KnownUser | None, shown: ShownSecret) -> SealedSecret:
        """Return the secret that was shown. Raises WrongCredentials, KeyMissing.

        Each secret costs the same time, whether it is equal or not. A random one replaces a missing
        one.
        """
        keys = self._keys()
        if keys is None:
            raise KeyMissing(
                "this admin process has no security_key_file, so it verifies no secret; set it, or"
                " use the token of admin_token_file"
            )
        found: SealedSecret | None = None
        stored = () if known is None else known.user.secrets
        for secret in stored:
            assert known is not None, "it has secrets"
            try:
                opened = keys.open(secret, user_id=known.user.id)
            except UnknownKey:
                # Another admin process may have encrypted it under a new key of the file.
                keys = self._keys() or keys
                try:
                    opened = keys.open(secret, user_id=known.user.id)
                except UnknownKey as error:
                    raise KeyMissing(f"a secret cannot be decrypted: {error}") from None
            if shown.fits(opened):
                found = secret
        for _ in range(SECRETS_MAX - len(stored)):
            shown.fits(self._random_secret)
        if found is None:
            raise WrongCredentials(shown.wrong)
        return found
