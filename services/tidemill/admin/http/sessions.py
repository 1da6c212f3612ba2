"""Login sessions of browsers: a signed cookie (ADR 0077).

    1.PAYLOAD.MAC      both in base64url; the MAC is the HMAC-SHA256 of `1.PAYLOAD`

The payload is a JSON object with the fields of `Session`. The signature proves that this cluster
made it. The caller checks the user and its secret with each request.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import secrets
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple, final

from starlette.datastructures import Headers

from tidemill.common.addresses import is_loopback
from tidemill.common.errors import KeyMissing

if TYPE_CHECKING:
    from starlette.types import Scope

    from tidemill.security.identities import SealedSecret, User
    from tidemill.security.secret_keys import SecretKeys

VIA_SESSION: Final = "session"
PURPOSE: Final = "tidemill/session/1"  # of the derived keys
VERSION: Final = "1"
HOST_COOKIE: Final = "__Host-tidemill"
LOOPBACK_COOKIE: Final = "tidemill-session"
COOKIE_CHARS_MAX: Final = 1_024
IDLE_MS_MAX: Final = 30 * 60_000
SESSION_MS_MAX: Final = 12 * 3_600_000
RENEWAL_MS: Final = 60_000  # age of the last use in a cookie until a new one is sent
ID_BYTES: Final = 16
DENIED_MAX: Final = 10_000  # about 1 MB of logouts; beyond it older sessions end, too


class Session(NamedTuple):
    """A login of a user in a browser."""

    id: str
    user: str
    user_id: int
    secret_id: int
    secret_at_ms: int  # the creation of the secret, which tells it from others
    began_at_ms: int
    used_at_ms: int

    def find_secret(self, user: User) -> SealedSecret | None:
        """Return the secret of the login; None if the user has it no longer."""
        if user.id != self.user_id:
            return None
        for secret in user.secrets:
            if (secret.id, secret.created_at_ms) == (self.secret_id, self.secret_at_ms):
                return secret
        return None

    @property
    def ends_at_ms(self) -> int:
        """The end of the session, if it is not used again."""
        return min(self.used_at_ms + IDLE_MS_MAX, self.began_at_ms + SESSION_MS_MAX)


@final
class Sessions:
    """Signs, reads and ends the sessions of this process."""

    def __init__(self, keys: Callable[[], SecretKeys | None], wall_ms: Callable[[], int]) -> None:
        """`keys` returns the keys of the key file; None without one."""
        self._keys = keys
        self._wall_ms = wall_ms
        self._derived_from: SecretKeys | None = None
        self._derived: tuple[bytes, ...] = ()
        # Ids of sessions that were ended, with their begin and the time of the end, oldest first.
        self._denied: OrderedDict[str, tuple[int, int]] = OrderedDict()
        self._ended_until_ms = -1  # Sessions that began until then have ended.

    def begin(self, user: User, secret: SealedSecret) -> Session:
        """Return a new session of a user that has shown a secret."""
        now_ms = self._wall_ms()
        return Session(
            id=secrets.token_urlsafe(ID_BYTES),
            user=user.name,
            user_id=user.id,
            secret_id=secret.id,
            secret_at_ms=secret.created_at_ms,
            began_at_ms=now_ms,
            used_at_ms=now_ms,
        )

    def encode(self, session: Session) -> str:
        """Return the value of the cookie. Raises KeyMissing."""
        keys = self._signing_keys()
        if not keys:
            raise KeyMissing("this admin process has no security_key_file, so it signs no session")
        payload = _encode(json.dumps(session, separators=(",", ":")).encode())
        signed = f"{VERSION}.{payload}"
        return f"{signed}.{_encode(_sign(keys[0], signed))}"

    def read(self, value: str) -> Session | None:
        """Return the session of a cookie; None if it is not valid, or has ended."""
        signed, _, mac = value.rpartition(".")
        version, _, payload = signed.partition(".")
        shown = _decode(mac)
        # Each key costs the same time, whether it has signed or not.
        matches = [hmac.compare_digest(_sign(key, signed), shown) for key in self._signing_keys()]
        if version != VERSION or not any(matches):
            return None
        session = Session(*json.loads(_decode(payload)))
        return None if self._is_over(session) else session

    def renew(self, session: Session) -> Session | None:
        """Return the session with its last use now; None if its cookie is new enough."""
        now_ms = self._wall_ms()
        if now_ms - session.used_at_ms < RENEWAL_MS:
            return None
        return session._replace(used_at_ms=now_ms)

    def end(self, session: Session) -> None:
        """End a session in this process. All its cookies are invalid."""
        now_ms = self._wall_ms()
        self._denied[session.id] = session.began_at_ms, now_ms
        while self._denied:
            began_at_ms, ended_at_ms = next(iter(self._denied.values()))
            is_idle = now_ms - ended_at_ms > IDLE_MS_MAX  # So are all its cookies.
            if not is_idle and len(self._denied) <= DENIED_MAX:
                return
            self._denied.popitem(last=False)
            if not is_idle:
                self._ended_until_ms = max(self._ended_until_ms, began_at_ms)

    def _is_over(self, session: Session) -> bool:
        return (
            self._wall_ms() > session.ends_at_ms
            or session.id in self._denied
            or session.began_at_ms <= self._ended_until_ms
        )

    def _signing_keys(self) -> tuple[bytes, ...]:
        keys = self._keys()
        if keys is not self._derived_from:
            self._derived_from = keys
            self._derived = () if keys is None else keys.derive(PURPOSE)
        return self._derived


# ---------------------------------------------------------------- cookies


def cookie_name(scope: Scope) -> str:
    """Return the name of the cookie at the address of a request."""
    host = Headers(scope=scope).get("host", "")
    bare = host.rpartition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0]
    is_plain_loopback = scope.get("scheme") != "https" and is_loopback(bare)
    return LOOPBACK_COOKIE if is_plain_loopback else HOST_COOKIE


def find_cookie(scope: Scope) -> str | None:
    """Return the value of the cookie; None without one. Of several, the first counts."""
    name = cookie_name(scope)
    for header in Headers(scope=scope).getlist("cookie"):
        for part in header.split(";"):
            key, _, value = part.strip().partition("=")
            if key == name:
                return value if len(value) <= COOKIE_CHARS_MAX else ""
    return None


def set_cookie(scope: Scope, value: str) -> str:
    """Return the header `Set-Cookie`; an empty value deletes the cookie."""
    name = cookie_name(scope)
    secure = "; Secure" if name == HOST_COOKIE else ""
    end = "" if value else "; Max-Age=0"
    return f"{name}={value}; Path=/{secure}; HttpOnly; SameSite=Strict{end}"


def set_renewed_cookie(scope: Scope, header: str) -> None:
    """Store the header `Set-Cookie` for the answer in the state of a request."""
    scope.setdefault("state", {})["renewed_cookie"] = header


def renewed_cookie_of(scope: Scope) -> str:
    """Return the header `Set-Cookie` for the answer; "": none."""
    header: str = scope.get("state", {}).get("renewed_cookie", "")
    return header


def _sign(key: bytes, text: str) -> bytes:
    return hmac.digest(key, text.encode(), hashlib.sha256)


def _encode(value: bytes) -> str:
    return base64.urlsafe_b64encode(value).decode().rstrip("=")


def _decode(text: str) -> bytes:
    """Return the bytes of a text in base64url; none if it is malformed."""
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        return b""
