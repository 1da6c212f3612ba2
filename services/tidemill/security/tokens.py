"""Named tokens: credentials of a user that end by themselves and may have fewer rights (ADR 0075).

    tmk_ID_SECRET      ID: 16 hexadecimal digits, SECRET: 32 random bytes in base64url

The item of a token has the SHA-256 of the text SECRET. The secret is random, so it needs no salt.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

PREFIX: Final = "tmk_"
ID_BYTES: Final = 8
SECRET_BYTES: Final = 32
DAY_MS: Final = 86_400_000
DEFAULT_DURATION_MS: Final = 90 * DAY_MS
DURATION_MS_MAX: Final = 400 * DAY_MS
TOKENS_OF_A_USER_MAX: Final = 100  # deleted in one change with the user
HEADER_CHARS_MAX: Final = 4_096
WRONG: Final = "the token is wrong"  # also of an unknown token, and of a deleted user
_TOKEN: Final = re.compile(r"tmk_([0-9a-f]{16})_([A-Za-z0-9_-]{43})")


@dataclass(frozen=True, slots=True)
class ShownToken:
    """A token as a call shows it."""

    id: str
    secret: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedToken:
    """A credential of one user."""

    id: str
    name: str
    user: str
    user_id: int  # A later user of the name has another one.
    sha256: str = field(repr=False)
    roles: tuple[str, ...] = ()  # none: all rights of the user
    not_after_ms: int = 0  # 0: it does not end
    created_at_ms: int = 0
    changed_by: str = ""
    version: int = 0  # of the security items with its creation; the home sets it

    def is_over(self, now_ms: int) -> bool:
        """Whether the token has ended."""
        return 0 < self.not_after_ms < now_ms

    @property
    def via(self) -> str:
        """Its kind and name, as the audit log shows a credential."""
        return f"token:{self.name}"

    def to_item(self) -> dict[str, Any]:
        """Return the configuration item that puts this token."""
        fields = {
            "name": self.name,
            "user": self.user,
            "userId": self.user_id,
            "sha256": self.sha256,
            "roles": list(self.roles),
            "notAfterMs": self.not_after_ms,
            "createdAtMs": self.created_at_ms,
            "changedBy": self.changed_by,
        }
        return {"op": "token", "name": self.id, "token": fields}


class MadeToken(NamedTuple):
    """A random token: its id, its whole text, and the hash of its secret."""

    id: str
    text: str
    sha256: str


def make_token() -> MadeToken:
    """Return a new token."""
    token_id, secret = secrets.token_hex(ID_BYTES), secrets.token_urlsafe(SECRET_BYTES)
    return MadeToken(token_id, f"{PREFIX}{token_id}_{secret}", hash_secret(secret))


def token_of(encoded: bytes) -> NamedToken:
    """Read the stored item of a token."""
    item = json.loads(encoded)
    fields = item["token"]
    return NamedToken(
        id=item["name"],
        name=fields["name"],
        user=fields["user"],
        user_id=fields["userId"],
        sha256=fields["sha256"],
        roles=tuple(fields["roles"]),
        not_after_ms=fields["notAfterMs"],
        created_at_ms=fields["createdAtMs"],
        changed_by=fields["changedBy"],
        version=item.get("version", 0),
    )


def parse_bearer(authorization: str) -> ShownToken | None:
    """Return the token of a header `Bearer tmk_...`; None if it has none.

    A client may repeat its header. Then the last one counts, as for signatures.
    """
    if len(authorization) > HEADER_CHARS_MAX:
        return None
    scheme, _, text = authorization.rpartition(",")[2].strip().partition(" ")
    found = _TOKEN.fullmatch(text.strip())
    return ShownToken(*found.groups()) if found and scheme.lower() == "bearer" else None


def hash_secret(secret: str) -> str:
    """Return the SHA-256 of a secret, in hexadecimal digits."""
    return hashlib.sha256(secret.encode()).hexdigest()


_RANDOM_HASH: Final = hash_secret(secrets.token_urlsafe(SECRET_BYTES))


def has_secret(token: NamedToken | None, shown: ShownToken) -> bool:
    """Whether the shown secret is that of the token.

    A missing token costs the same time as a wrong secret.
    """
    stored = _RANDOM_HASH if token is None else token.sha256
    is_equal = hmac.compare_digest(hash_secret(shown.secret), stored)
    return is_equal and token is not None
