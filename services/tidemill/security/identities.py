"""Users and roles, as the configuration items of a cluster store them.

A secret is stored encrypted (`secret_keys.py`). The items are JSON objects; `docs/formats.md` lists
their fields.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from secrets import token_urlsafe
from sys import intern
from typing import Any, Final

from tidemill.common.errors import BadRequest
from tidemill.security.acl import ENTRIES_MAX, AccessEntry, Subject, entry_of, parse_entry
from tidemill.security.listed_identities import ACCOUNTS, CERTIFICATES

USER_NAME_CHARS_MAX: Final = 64
SECRETS_MAX: Final = 2
NEEDS_SUPER: Final = "it needs a super user"  # in refusals that entries cannot avoid
ROLES_MAX: Final = 64  # of one user
SECRET_BYTES: Final = 32  # of a random one: 43 characters
SECRET_CHARS_MIN: Final = 16
SECRET_CHARS_MAX: Final = 128
WEAK_SECRET_CHARS_MIN: Final = 6  # of an imported secret, as of RocketMQ

ACCOUNTS_MAX: Final = 16  # service accounts of one user
CERTIFICATES_MAX: Final = 16  # of one user
CERTIFICATE_CHARS_MAX: Final = 255
# Names of Kubernetes: a namespace is a label, a service account is labels with dots.
NAMESPACE: Final = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
ACCOUNT_NAME: Final = rf"(?=.{{1,253}}$){NAMESPACE}(?:\.{NAMESPACE})*"

_ACCOUNT = re.compile(rf"{NAMESPACE}/{ACCOUNT_NAME}")
_CERTIFICATE = re.compile(r"[!-~](?:[ -~]{0,253}[!-~])?")
_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_PRINTABLE = re.compile(r"[!-~]*")


class UserType(StrEnum):
    """Whether a user needs rights."""

    SUPER = "SUPER"  # may do everything
    NORMAL = "NORMAL"


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedSecret:
    """A secret of a user, encrypted."""

    id: int  # counts the secrets of the user
    key_id: str  # of the key that encrypts it
    sealed: bytes  # nonce and ciphertext
    created_at_ms: int
    not_after_ms: int = 0  # 0: it does not end

    @property
    def end_text(self) -> str:
        """The end, for errors."""
        if not self.not_after_ms:
            return "without an end"
        return f"until {datetime.fromtimestamp(self.not_after_ms // 1_000, UTC):%Y-%m-%dT%H:%M:%SZ}"

    def is_same(self, other: SealedSecret) -> bool:
        """Whether both are the same secret of a user, perhaps under different keys."""
        return (self.id, self.created_at_ms) == (other.id, other.created_at_ms)

    def is_over(self, now_ms: int) -> bool:
        """Whether the secret has ended."""
        return 0 < self.not_after_ms < now_ms

    def to_item(self) -> dict[str, Any]:
        """Return the secret as it is stored."""
        return {
            "id": self.id,
            "keyId": self.key_id,
            "sealed": base64.b64encode(self.sealed).decode(),
            "createdAtMs": self.created_at_ms,
            "notAfterMs": self.not_after_ms,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    """One identity. Its name is the access key of the clients."""

    name: str
    id: int  # never used again; owner of clients and deliveries
    type: UserType = UserType.NORMAL
    is_enabled: bool = True
    secrets: tuple[SealedSecret, ...] = ()
    entries: tuple[AccessEntry, ...] = ()
    roles: tuple[str, ...] = ()
    service_accounts: tuple[str, ...] = ()  # NS/NAME; their tokens are credentials of the user
    certificates: tuple[str, ...] = ()  # names; if there are any, each call must use one
    created_at_ms: int = 0
    changed_at_ms: int = 0
    changed_by: str = ""
    version: int = 0  # of the security items with its last change; the home sets it

    @property
    def subject(self) -> str:
        """Its name among the subjects of entries."""
        return f"User:{self.name}"

    @property
    def next_secret_id(self) -> int:
        """The id of its next secret."""
        return max((secret.id for secret in self.secrets), default=0) + 1

    def to_item(self) -> dict[str, Any]:
        """Return the configuration item that puts this user."""
        fields: dict[str, Any] = {
            "id": self.id,
            "type": self.type.value,
            "enabled": self.is_enabled,
            "secrets": [secret.to_item() for secret in self.secrets],
            "entries": [entry.to_item() for entry in self.entries],
            "roles": list(self.roles),
            "createdAtMs": self.created_at_ms,
            "changedAtMs": self.changed_at_ms,
            "changedBy": self.changed_by,
        }
        if self.service_accounts:
            fields[ACCOUNTS] = list(self.service_accounts)
        if self.certificates:
            fields[CERTIFICATES] = list(self.certificates)
        return {"op": "user", "name": self.name, "user": fields}


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessRole:
    """A named list of entries."""

    name: str
    entries: tuple[AccessEntry, ...] = ()
    changed_at_ms: int = 0
    changed_by: str = ""
    version: int = 0  # as of a user

    @property
    def subject(self) -> Subject:
        """The role with its entries, as a subject of decisions."""
        return Subject(f"Role:{self.name}", self.entries)

    def to_item(self) -> dict[str, Any]:
        """Return the configuration item that puts this role."""
        fields = {
            "entries": [entry.to_item() for entry in self.entries],
            "changedAtMs": self.changed_at_ms,
            "changedBy": self.changed_by,
        }
        return {"op": "role", "name": self.name, "role": fields}


def user_of(encoded: bytes) -> User:
    """Read the stored item of a user."""
    item = json.loads(encoded)
    fields = item["user"]
    return User(
        name=item["name"],
        id=fields["id"],
        type=UserType(fields["type"]),
        is_enabled=fields["enabled"],
        secrets=tuple([_secret_of(secret) for secret in fields["secrets"]]),
        entries=tuple([entry_of(entry) for entry in fields["entries"]]),
        roles=tuple(fields["roles"]),
        service_accounts=tuple(fields.get(ACCOUNTS, ())),
        certificates=tuple(fields.get(CERTIFICATES, ())),
        created_at_ms=fields["createdAtMs"],
        changed_at_ms=fields["changedAtMs"],
        changed_by=intern(fields["changedBy"]),
        version=item.get("version", 0),
    )


def _secret_of(item: dict[str, Any]) -> SealedSecret:
    return SealedSecret(
        id=item["id"],
        key_id=intern(item["keyId"]),
        sealed=base64.b64decode(item["sealed"]),
        created_at_ms=item["createdAtMs"],
        not_after_ms=item["notAfterMs"],
    )


def role_of(encoded: bytes) -> AccessRole:
    """Read the stored item of a role."""
    item = json.loads(encoded)
    fields = item["role"]
    return AccessRole(
        name=item["name"],
        entries=tuple([entry_of(entry) for entry in fields["entries"]]),
        changed_at_ms=fields["changedAtMs"],
        changed_by=fields["changedBy"],
        version=item.get("version", 0),
    )


def check_user_name(name: str) -> str:
    """Return the name of a user or a role. Raises BadRequest."""
    if not _NAME.fullmatch(name):
        raise BadRequest(
            f"{name!r} is no name of a user or a role: it has 1 to {USER_NAME_CHARS_MAX} characters"
            f" of A-Z a-z 0-9 . _ @ -"
        )
    return name


def new_secret() -> str:
    """Return a random secret."""
    return token_urlsafe(SECRET_BYTES)


def check_secret(secret: str, *, is_weak_allowed: bool = False) -> str:
    """Return a secret that a user chose. Raises BadRequest, without the secret in the text."""
    chars_min = WEAK_SECRET_CHARS_MIN if is_weak_allowed else SECRET_CHARS_MIN
    is_long_enough = chars_min <= len(secret) <= SECRET_CHARS_MAX
    if not is_long_enough or not _PRINTABLE.fullmatch(secret):
        raise BadRequest(
            f"a secret has {chars_min} to {SECRET_CHARS_MAX} printable ASCII characters"
            f" without blanks, and this one has {len(secret)} characters"
        )
    return secret


def check_account(account: str) -> str:
    """Return the name of a service account, NAMESPACE/NAME. Raises BadRequest."""
    if not _ACCOUNT.fullmatch(account):
        raise BadRequest(
            f"{account!r} is not a service account; write NAMESPACE/NAME, such as shop/orders"
        )
    return account


def check_certificate(name: str) -> str:
    """Return a name in a certificate. Raises BadRequest."""
    if not _CERTIFICATE.fullmatch(name):
        raise BadRequest(
            f"{name!r} is not a name of a certificate: it has 1 to {CERTIFICATE_CHARS_MAX}"
            " printable ASCII characters, and no blank at its ends"
        )
    return name


def check_entries(entries: tuple[AccessEntry, ...]) -> tuple[AccessEntry, ...]:
    """Return the entries of one subject. Raises BadRequest."""
    if len(entries) > ENTRIES_MAX:
        raise BadRequest(
            f"a user or a role has at most {ENTRIES_MAX} entries, not {len(entries)}; use a prefix"
            f" such as Topic:orders*, or more roles"
        )
    return entries


# ---------------------------------------------------------------- ready-made roles and templates

_AREAS_OF_OPERATION = ("broker-groups", "replicas", "clients", "quotas")


def _entries(resources: tuple[str, ...], *actions: str) -> tuple[AccessEntry, ...]:
    return tuple([parse_entry(resource, actions) for resource in resources])


_NAMED = ("Topic:*", "Group:*", *(f"Cluster:{area}" for area in _AREAS_OF_OPERATION))

READY_MADE_ROLES: Final[Mapping[str, AccessRole]] = {
    role.name: role
    for role in (
        AccessRole(name="viewer", entries=_entries(_NAMED, "Get", "List")),
        AccessRole(
            name="operator",
            entries=(
                *_entries(_NAMED, "Get", "List", "Update"),
                *_entries(("Cluster:audit", "Cluster:processes"), "Get"),
            ),
        ),
        AccessRole(name="admin", entries=_entries(("Topic:*", "Group:*", "Cluster:*"), "All")),
    )
}


def producer_entries(topic: str) -> tuple[AccessEntry, ...]:
    """Return the entries of a producer to a topic."""
    return _entries((f"Topic:{topic}",), "Pub")


def consumer_entries(group: str, topic: str) -> tuple[AccessEntry, ...]:
    """Return the entries of a consumer of a topic in a consumer group."""
    return _entries((f"Group:{group}", f"Topic:{topic}"), "Sub")


def pipeline_entries(group: str, topic: str) -> tuple[AccessEntry, ...]:
    """Return the entries of a pipeline that reads a topic in a consumer group."""
    return (
        *_entries((f"Group:{group}", f"Topic:{topic}"), "Get", "Sub"),
        *_entries(("Cluster:pipeline",), "Get"),
    )
