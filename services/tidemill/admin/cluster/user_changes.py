"""Changes of users: the new state of a user, from the present one and a request."""

from __future__ import annotations

import hmac
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, final

from tidemill.admin.cluster.security_client import SecurityClient
from tidemill.common.errors import BadRequest, Conflict, KeyMissing, UserNotFound
from tidemill.security.acl import AccessEntry, check_names
from tidemill.security.identities import (
    SECRET_CHARS_MIN,
    SECRETS_MAX,
    SealedSecret,
    User,
    UserType,
    check_account,
    check_certificate,
    check_entries,
    check_secret,
    check_user_name,
    new_secret,
)
from tidemill.security.listed_identities import ACCOUNTS, CERTIFICATES, NOUNS, listed_by
from tidemill.security.secret_keys import SecretKeys, UnknownKey
from tidemill.security.table import MODE, USER, SealingKey, sealing_key_of

ENTRIES_BYTES_MAX: Final = 48 << 10  # as JSON; with secrets and roles, an item has at most 60 KiB


@dataclass(frozen=True, slots=True, kw_only=True)
class UserChange:
    """The given fields of a change; None keeps the present value, or sets the default."""

    type: UserType | None = None
    is_enabled: bool | None = None
    entries: tuple[AccessEntry, ...] | None = None
    roles: tuple[str, ...] | None = None
    service_accounts: Sequence[str] | None = None
    certificates: Sequence[str] | None = None
    secret: str | None = None
    is_weak_secret_allowed: bool = False
    if_version: int | None = None

    @property
    def may_lock_out(self) -> bool:
        """Whether the change may take the rights of an administrator."""
        return self.type is UserType.NORMAL or self.is_enabled is False or bool(self.certificates)


@final
class UserChanges:
    """Decides on changes of users, at one time and for one caller."""

    def __init__(self, keys: Callable[[], SecretKeys | None], now_ms: int, caller: str) -> None:
        """`keys` returns the keys of the secrets; None without a key file."""
        self._keys = keys
        # The key of new secrets in the whole cluster; None before the first rotation.
        self.sealing_key: SealingKey | None = None
        self._now_ms = now_ms
        self._caller = caller

    def put(
        self, name: str, old: User | None, change: UserChange, *, table_version: int
    ) -> tuple[User, str]:
        """Return the new state of a user, and the secret that was made or "".

        The id of a new user is the version of the table with it, so no other user ever has it.
        Raises BadRequest, Conflict.
        """
        check_version(name, None if old is None else old.version, change.if_version)
        secret = ""
        if old is None:
            check_user_name(name)
            secret = new_secret()
            if change.secret is not None:
                secret = check_secret(change.secret, is_weak_allowed=True)
                if len(secret) < SECRET_CHARS_MIN and not change.is_weak_secret_allowed:
                    raise Conflict(
                        f"a secret has at least {SECRET_CHARS_MIN} characters, and this one has"
                        f" {len(secret)}; allowWeakSecret accepts it"
                    )
            user = self._with_secret(
                User(name=name, id=table_version + 1, created_at_ms=self._now_ms), secret
            )
        elif change.secret is not None:
            raise Conflict(
                f"user {name} exists, and its secret changes by rotation alone: tidemill user"
                f" rotate {name}"
            )
        else:
            user = old
        if change.type is not None:
            user = replace(user, type=change.type)
        if change.is_enabled is not None:
            user = replace(user, is_enabled=change.is_enabled)
        if change.entries is not None:
            check_names(change.entries, () if old is None else old.entries)
            user = replace(user, entries=check_entries(change.entries))
        if change.roles is not None:
            user = replace(user, roles=tuple(sorted(set(change.roles))))
        if change.service_accounts is not None:
            accounts = sorted({check_account(each) for each in change.service_accounts})
            user = replace(user, service_accounts=tuple(accounts))
        if change.certificates is not None:
            certificates = sorted({check_certificate(each) for each in change.certificates})
            user = replace(user, certificates=tuple(certificates))
        if user == old:
            return user, ""
        fields = user.to_item()[USER]
        check_size(name, [fields["entries"], listed_by(fields)])
        return self._signed(user), secret

    def rotate(self, user: User, *, retire_after_ms: int, force: bool = False) -> tuple[User, str]:
        """Return the user with a new secret, and that secret. The newest old one stays for a time.

        A secret that is to end later does not end at once, except by `force` or a rotation that
        ends all others. Raises Conflict.
        """
        left = [each for each in user.secrets if not each.is_over(self._now_ms)]
        left.sort(key=lambda each: each.id)
        dropped, left = left[: -(SECRETS_MAX - 1)], left[-(SECRETS_MAX - 1) :]
        if dropped and retire_after_ms and not force:
            raise Conflict(
                f"user {user.name} has {SECRETS_MAX} secrets already, and the older one is valid"
                f" {dropped[-1].end_text}; rotate after its end, or end it now with"
                " force (--force)"
            )
        ends_ms = self._now_ms + retire_after_ms
        kept = [_ending(each, ends_ms) for each in left if retire_after_ms]
        secret = new_secret()
        # The id of a removed secret is not used again.
        next_id = user.next_secret_id
        user = replace(user, secrets=tuple(kept))
        return self._signed(self._with_secret(user, secret, secret_id=next_id)), secret

    def set_super(self, name: str, old: User | None, secret: str, *, table_version: int) -> User:
        """Return an enabled super user with this secret alone; `old` if it is one already.

        The user lists no certificates, because the REST API refuses users that do. Raises Conflict.
        """
        user = old or User(name=name, id=table_version + 1, created_at_ms=self._now_ms)
        if not self._has_only(user, secret):
            next_id = user.next_secret_id
            user = self._with_secret(replace(user, secrets=()), secret, secret_id=next_id)
        user = replace(user, type=UserType.SUPER, is_enabled=True, certificates=())
        return user if user == old else self._signed(user)

    def set_job_user(
        self,
        name: str,
        old: User | None,
        *,
        entries: tuple[AccessEntry, ...],
        secret: str,
        retire_after_ms: int,
        table_version: int,
    ) -> User:
        """Return a user with these rights alone and this secret; `old` if it has both already.

        The former secret stays valid for a time. A disabled user stays disabled. Raises Conflict.
        """
        user = old or User(name=name, id=table_version + 1, created_at_ms=self._now_ms)
        newest = max(user.secrets, key=lambda each: each.id, default=None)
        if newest is None or newest.not_after_ms or not self._is_secret(user, newest, secret):
            next_id = user.next_secret_id
            kept = () if newest is None or newest.is_over(self._now_ms) else (newest,)
            ending = [_ending(each, self._now_ms + retire_after_ms) for each in kept]
            user = self._with_secret(
                replace(user, secrets=tuple(ending)), secret, secret_id=next_id
            )
        user = replace(
            user,
            type=UserType.NORMAL,
            entries=entries,
            roles=(),
            service_accounts=(),
            certificates=(),
        )
        return user if user == old else self._signed(user)

    def _has_only(self, user: User, secret: str) -> bool:
        """Whether a user has this secret without an end, and no other one."""
        if len(user.secrets) != 1 or user.secrets[0].not_after_ms:
            return False
        return self._is_secret(user, user.secrets[0], secret)

    def _is_secret(self, user: User, sealed: SealedSecret, secret: str) -> bool:
        """Whether a secret of a user is this one; False if its key is unknown."""
        keys = self._keys()
        if keys is None:
            return False
        try:
            opened = keys.open(sealed, user_id=user.id)
        except UnknownKey:
            return False
        return hmac.compare_digest(opened, secret.encode())

    def _with_secret(self, user: User, secret: str, *, secret_id: int = 1) -> User:
        keys = self._keys()
        if keys is None:
            raise Conflict(
                "this admin process has no security_key_file, so it makes no secrets; set it here"
                " and in all proxies"
            )
        sealed = keys.seal(
            secret.encode(),
            user_id=user.id,
            secret_id=secret_id,
            created_at_ms=self._now_ms,
            key_id=_checked(keys, self.sealing_key),
        )
        return replace(user, secrets=(*user.secrets, sealed))

    def _signed(self, user: User) -> User:
        return replace(user, changed_at_ms=self._now_ms, changed_by=self._caller)


async def check_listed(items: SecurityClient, name: str, change: UserChange) -> None:
    """Check that no other user lists an identity of the change. Raises Conflict."""
    wanted = {(ACCOUNTS, each) for each in change.service_accounts or ()}
    wanted |= {(CERTIFICATES, each) for each in change.certificates or ()}
    if not wanted:
        return
    async for encoded in items.all(USER):
        item = json.loads(encoded)
        if item["name"] != name and (common := wanted.intersection(listed_by(item[USER]))):
            field, value = min(common)
            raise Conflict(
                f"user {item['name']} lists the {NOUNS[field]} {value}, and only one user may list"
                " it; remove it there first"
            )


def check_size(name: str, entries: Sequence[object]) -> None:
    """Raise BadRequest for entries that leave no room for secrets in the item of a subject."""
    size = len(json.dumps(entries).encode())
    if size > ENTRIES_BYTES_MAX:
        raise BadRequest(
            f"the entries and identities of {name} have {size} bytes; at most {ENTRIES_BYTES_MAX}"
            " are allowed: use prefixes, or move entries into roles"
        )


def check_version(name: str, present: int | None, expected: int | None) -> None:
    """Raise Conflict if an item does not have the expected version; 0: it must not exist."""
    if expected == 0 and present is not None:
        raise Conflict(f"{name} exists already; change it instead of creating it")
    if expected is not None and expected != (present or 0):
        known = "does not exist" if present is None else f"has version {present}"
        raise Conflict(f"{name} {known}, not {expected}; read it again and repeat the change")


def find_user(user: User | None, name: str) -> User:
    """Return a user that must exist. Raises UserNotFound."""
    if user is None:
        raise UserNotFound(f"there is no user {name!r}")
    return user


async def find_sealing_key(items: SecurityClient) -> SealingKey | None:
    """Return the key of new secrets in the whole cluster; None before the first rotation."""
    return sealing_key_of((await items.find(MODE, "")).encoded)


def _checked(keys: SecretKeys, wanted: SealingKey | None) -> str:
    """Return the id of the key of new secrets; "" for the first one of the file.

    Another admin process may have replaced the first key of this file, and its line is removed
    soon. Raises KeyMissing.
    """
    if wanted is None:
        return ""
    try:
        is_same = keys.check_of(wanted.id) == wanted.check
    except UnknownKey:
        is_same = False
    if not is_same:
        raise KeyMissing(
            f"the security_key_file of this admin process lacks the key {wanted.id}, under which"
            " new secrets are encrypted; add its line and try again, or use another admin process"
        )
    return wanted.id


def _ending(secret: SealedSecret, ends_ms: int) -> SealedSecret:
    """Return a secret that ends then, unless it ends earlier."""
    if 0 < secret.not_after_ms <= ends_ms:
        return secret
    return replace(secret, not_after_ms=ends_ms)
