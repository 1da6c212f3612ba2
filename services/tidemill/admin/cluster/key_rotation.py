"""Rotation of the key that encrypts the secrets of users (ADR 0080)."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Final, NamedTuple

from tidemill.admin.cluster.security_client import ATTEMPTS_MAX, Item, SecurityClient
from tidemill.common.errors import Conflict
from tidemill.security.identities import SealedSecret, User, user_of
from tidemill.security.secret_keys import SecretKeys, UnknownKey
from tidemill.security.table import USER
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

# Users that one change encrypts again. Their secrets take some milliseconds.
PAGE_USERS: Final = 100


class EncryptedPage(NamedTuple):
    """The result of one page of users."""

    encrypted: int  # secrets under another key before
    undecryptable: list[str]  # users with a secret without a key; the secret stays
    last_name: str | None  # None: this was the last page


async def count_secrets(items: SecurityClient) -> Counter[str]:
    """Return the number of secrets by the id of their key."""
    counts: Counter[str] = Counter()
    async for encoded in items.all(USER, page_items=PAGE_USERS):
        counts.update(secret.key_id for secret in user_of(encoded).secrets)
    return counts


async def encrypt_page(
    items: SecurityClient, keys: SecretKeys, after_name: str, *, caller: str, audit: pb.ChangeAuthor
) -> EncryptedPage:
    """Encrypt the secrets of the next users under the first key.

    After a change by another administrator, the page is read again. Raises Conflict after
    ATTEMPTS_MAX of them.
    """
    attempt = 0
    while True:
        planned = await _plan_page(items, keys, after_name)
        if not planned.changed:
            return planned.result
        attempt += 1
        try:
            await items.put(planned.changed, planned.version, caller=caller, audit=audit)
        except Conflict:
            if attempt == ATTEMPTS_MAX:
                raise
        else:
            return planned.result


async def plan_page(items: SecurityClient, keys: SecretKeys, after_name: str) -> EncryptedPage:
    """Return the result of `encrypt_page` without the change."""
    return (await _plan_page(items, keys, after_name)).result


class _PlannedPage(NamedTuple):
    """The next users, with their secrets under the first key."""

    result: EncryptedPage
    changed: list[Item]
    version: int  # of the security items that were read


async def _plan_page(items: SecurityClient, keys: SecretKeys, after_name: str) -> _PlannedPage:
    page = await items.page(USER, after_name, PAGE_USERS)
    users = [user_of(encoded) for encoded in page.encoded]
    results = [_encrypted(user, keys) for user in users]
    result = EncryptedPage(
        encrypted=sum(one.encrypted for one in results),
        undecryptable=[one.user.name for one in results if one.is_lost],
        last_name=users[-1].name if page.has_more else None,
    )
    changed: list[Item] = [one.user.to_item() for one in results if one.encrypted]
    return _PlannedPage(result, changed, page.version)


class _EncryptedUser(NamedTuple):
    """A user with its secrets under the first key."""

    user: User
    encrypted: int  # secrets
    is_lost: bool  # a secret cannot be decrypted, and stays as it is


def _encrypted(user: User, keys: SecretKeys) -> _EncryptedUser:
    secrets: list[SealedSecret] = []
    is_lost = False
    for old in user.secrets:
        try:
            new = keys.seal_again(old, user_id=user.id)
        except UnknownKey:
            is_lost, new = True, old
        secrets.append(new)
    encrypted = sum(new is not old for new, old in zip(secrets, user.secrets, strict=True))
    return _EncryptedUser(replace(user, secrets=tuple(secrets)), encrypted, is_lost)
