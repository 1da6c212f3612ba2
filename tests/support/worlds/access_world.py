"""Users and a gate in memory. The clients sign their calls."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tests.support.issuer import AUDIENCE, ISSUER
from tidemill.proxy.server.access import AccessGate
from tidemill.proxy.server.service_accounts import ServiceAccounts
from tidemill.security.acl import AccessEntry
from tidemill.security.bans import Ban, BanKind
from tidemill.security.failure_buckets import SignatureChecks
from tidemill.security.identities import User, UserType
from tidemill.security.issuer_keys import IssuerKeys
from tidemill.security.item_counts import ItemCounts
from tidemill.security.kubernetes_tokens import KubernetesTokens
from tidemill.security.listed_identities import ListedIdentities
from tidemill.security.secret_keys import SecretKeys, new_key_line, parse_keys
from tidemill.security.table import USER, Mode, SecurityTable, mode_item

DATE = "20261129T140552Z"
SECRET = "a secret of sixteen"


def signed(user: str, secret: str = SECRET, date: str = DATE) -> dict[str, str]:
    """Return the headers of a call as the clients sign it."""
    digits = hmac.new(secret.encode(), date.encode(), hashlib.sha1).hexdigest()
    return {
        "authorization": (
            f"MQv2-HMAC-SHA1 Credential={user}//RocketMQ, SignedHeaders=x-mq-date-time,"
            f" Signature={digits}"
        ),
        "x-mq-date-time": date,
    }


class AccessWorld:
    """The table, the keys and the gate of one proxy."""

    def __init__(self, mode: Mode = Mode.ON, issuer_keys: IssuerKeys | None = None) -> None:
        self.items: dict[tuple[str, str], bytes] = {}
        self.identities = ListedIdentities()
        self.table = SecurityTable(
            lambda *key: self.items.get(key), self._count_items, self.identities.find
        )
        self.keys: SecretKeys | None = parse_keys(new_key_line("k1"))
        self.now_ms = 1_000_000
        accounts = None
        if issuer_keys is not None:
            limit = SignatureChecks(lambda: self.now_ms)
            tokens = KubernetesTokens(ISSUER, AUDIENCE, issuer_keys.present, limit)
            accounts = ServiceAccounts(self.table, tokens, issuer_keys)
        # Replaced by tests whose streams end by the clock of the event loop.
        self.find_wall_ms: Callable[[], int] = lambda: self.now_ms
        self.gate = AccessGate(self.table, lambda: self.keys, self._wall_ms, accounts)
        self._last_id = 0
        self._ids: dict[str, int] = {}  # by user
        self.set_mode(mode)

    def _wall_ms(self) -> int:
        return self.find_wall_ms()

    def _count_items(self) -> ItemCounts:
        counts = ItemCounts()
        for key in self.items:
            counts.add(*key)
        return counts

    def set_mode(self, mode: Mode) -> None:
        self.put_item(mode_item(mode))

    def put_item(self, item: dict[str, Any]) -> None:
        key = item["op"], item.get("name", "")
        self.items[key] = json.dumps(item).encode()
        if key[0] == USER:
            self.identities.put(key[1], item[USER])
        self.table.note_change(*key)

    def put_user(
        self,
        name: str,
        *entries: AccessEntry,
        secrets: Sequence[str] = (SECRET,),
        not_after_ms: int = 0,
        is_super: bool = False,
        is_enabled: bool = True,
        is_same: bool = False,
        accounts: Sequence[str] = (),
        certificates: Sequence[str] = (),
    ) -> User:
        """Put a user, or change it if it `is_same`; its secrets end at `not_after_ms` or never."""
        if not is_same:
            self._last_id += 1
            self._ids[name] = self._last_id
        user_id = self._ids[name]
        keys = self.keys
        assert keys is not None
        sealed = [
            keys.seal(secret.encode(), user_id=user_id, secret_id=number, created_at_ms=0)
            for number, secret in enumerate(secrets, 1)
        ]
        user = User(
            name=name,
            id=user_id,
            type=UserType.SUPER if is_super else UserType.NORMAL,
            is_enabled=is_enabled,
            secrets=tuple([replace(each, not_after_ms=not_after_ms) for each in sealed]),
            entries=entries,
            service_accounts=tuple(accounts),
            certificates=tuple(certificates),
        )
        self.put_item(user.to_item())
        return user

    def put_ban(self, kind: BanKind, value: str, *, user_id: int = 0, until_ms: int = 0) -> None:
        self.put_item(Ban(kind=kind, value=value, user_id=user_id, until_ms=until_ms).to_item())

    def delete_user(self, name: str) -> None:
        self.delete_item("user", name)

    def delete_item(self, kind: str, name: str) -> None:
        del self.items[kind, name]
        if kind == USER:
            self.identities.remove(name)
        self.table.note_change(kind, name)
