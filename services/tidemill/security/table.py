"""The security items of a cluster as a process uses them: users with their rights, and the mode.

Items stay encoded until a user makes a call, because most of ten thousand users make none here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from enum import IntEnum
from typing import Final, NamedTuple, final

from tidemill.common.errors import Unauthorized
from tidemill.security.acl import Action, Resource, ResourceType, Subject
from tidemill.security.bans import BAN, BanTable
from tidemill.security.identities import (
    READY_MADE_ROLES,
    AccessRole,
    User,
    UserType,
    role_of,
    user_of,
)
from tidemill.security.item_counts import ItemCounts
from tidemill.security.listed_identities import ACCOUNTS, CERTIFICATES, only_user
from tidemill.security.quotas import QUOTA, QuotaTable
from tidemill.security.rights import AddressFinder, Rights
from tidemill.security.signatures import Signer
from tidemill.security.tokens import NamedToken, ShownToken, has_secret, token_of

DECODED_USERS_MAX: Final = 10_000  # about 2 KB each, and 100 bytes of an entry
DECODED_ENTRIES_MAX: Final = 262_144  # of these users and of their roles, about 25 MB
DECODED_TOKENS_MAX: Final = 2_000  # about 2 KB each

USER: Final = "user"
ROLE: Final = "role"
TOKEN: Final = "token"  # noqa: S105  # The kind of an item.
MODE: Final = "security"  # the one item of this kind has no name

VIA_ACCOUNT: Final = "serviceaccount"
VIA_CERTIFICATE: Final = "certificate"
VIA_TOKEN: Final = "token"  # noqa: S105  # The kind of a credential.

_VIAS: Final = {ACCOUNTS: VIA_ACCOUNT, CERTIFICATES: VIA_CERTIFICATE}


class Mode(IntEnum):
    """What happens to credentials. A higher mode is stricter."""

    OFF = 0  # credentials are ignored
    PERMISSIVE = 1  # everything is evaluated; refusals are counted and let through
    ON = 2

    @property
    def text(self) -> str:
        """Return the name that users write."""
        return self.name.lower()


def parse_mode(text: str) -> Mode:
    """Read the name of a mode. Raises ValueError."""
    try:
        return Mode[text.upper()]
    except KeyError:
        raise ValueError(f"{text!r} is not off, permissive or on") from None


class SealingKey(NamedTuple):
    """The key that encrypts new secrets in the whole cluster, since the last rotation."""

    id: str
    check: str  # tells it from another key with its id


def mode_item(mode: Mode, key: SealingKey | None = None) -> dict[str, object]:
    """Return the configuration item that sets the mode and the key of new secrets."""
    settings: dict[str, object] = {"mode": mode.text}
    if key is not None:
        settings["sealingKey"] = key._asdict()
    return {"op": MODE, "security": settings}


def sealing_key_of(encoded: bytes | None) -> SealingKey | None:
    """Return the key in the item of the mode; None before the first rotation."""
    key = json.loads(encoded)["security"].get("sealingKey") if encoded else None
    return None if key is None else SealingKey(key["id"], key["check"])


class KnownToken(NamedTuple):
    """A token with the rights of its roles, each on its own. It lasts as a `KnownUser` does."""

    token: NamedToken
    limits: tuple[Rights, ...] | None  # None: all rights of the user


@final
class KnownUser:
    """A user with its rights. An object lasts until an item changes that it depends on."""

    __slots__ = (
        "_limits",
        "_rights",
        "_skips_acl",
        "_via",
        "entry_count",
        "generation",
        "is_super",
        "signers",
        "token",
        "user",
    )

    def __init__(self, user: User, rights: Rights, token: KnownToken | None = None) -> None:
        """`token` is the credential of the user, which may limit the rights.

        The rights have the entries, so `user` needs none.
        """
        self.user = user
        # Of the table that has read this object: its state, and the entries of user and roles.
        self.generation = self.entry_count = 0
        self._rights = rights
        self.token = None if token is None else token.token
        self._limits = None if token is None else token.limits
        self._skips_acl = user.type is UserType.SUPER
        # Whether everything is allowed: a super user without a limit.
        self.is_super = self._skips_acl and self._limits is None
        self._via = ""  # kind and name of the credential, if the user lists it
        # One per secret, in the order of `user.secrets`, and random ones for those that the user
        # has not; None until the first signed call.
        self.signers: tuple[Signer, ...] | None = None

    def with_token(self, token: KnownToken) -> KnownUser:
        """Return this user as the caller with one of its tokens."""
        return KnownUser(self.user, self._rights, token)

    def with_identity(self, kind: str, name: str) -> KnownUser:
        """Return this user as the caller with an identity that the user lists."""
        known = KnownUser(self.user, self._rights)
        known._via = identity_text(kind, name)
        return known

    def check_certificate(self, names: Collection[str]) -> None:
        """Check the certificate of a connection, by its names, if the user lists certificates.

        Raises Unauthorized.
        """
        listed = self.user.certificates
        if listed and not any(name in listed for name in names):
            raise self._refusal(
                f"user {self.user.name} needs one of its certificates, and this connection has"
                " another one or none"
            )

    def _refusal(self, text: str) -> Unauthorized:
        """Return the refusal of a credential that is correct."""
        return self.name_in(Unauthorized(text))

    def name_in(self, error: Unauthorized) -> Unauthorized:
        """Return the refusal of correct credentials with its user."""
        error.user_id, error.user_name, error.via = self.user.id, self.user.name, self.via
        return error

    @property
    def identity(self) -> str:
        """The credential, if its holder can prove it without the user; otherwise empty.

        It is the kind and the name of one that the user lists, or the hash of a named token.
        """
        return self._via if self.token is None else token_identity(self.token.sha256)

    @property
    def via(self) -> str:
        """The credential, if it is not a secret of the user; otherwise empty."""
        if self.token is not None:
            return self.token.via
        return self._via

    @property
    def not_after_ms(self) -> int:
        """The end of the named token; 0: none."""
        return 0 if self.token is None else self.token.not_after_ms

    def check_token(self, now_ms: int) -> None:
        """Check that the token has not ended, and that its user is enabled. Raises Unauthorized."""
        if self.token is not None and self.token.is_over(now_ms):
            raise self._refusal(f"the token {self.token.name} of user {self.user.name} has ended")
        if not self.user.is_enabled:
            raise self._refusal(f"user {self.user.name} is disabled")

    def decide(self, action: Action, resource: Resource, find_address: AddressFinder) -> bool:
        """Decide about one action on one resource."""
        is_allowed = self._skips_acl or self._rights.decide(action, resource, find_address)
        if self._limits is None or not is_allowed:
            return is_allowed
        return any(role.decide(action, resource, find_address) for role in self._limits)

    def allows_all(self, action: Action, type_: ResourceType, find_address: AddressFinder) -> bool:
        """Whether one action is allowed on each resource of a type."""
        allows = self._skips_acl or self._rights.allows_all(action, type_, find_address)
        if self._limits is None or not allows:
            return allows
        return any(role.allows_all(action, type_, find_address) for role in self._limits)


def identity_text(kind: str, name: str) -> str:
    """Return the text of an identity that a user can list: serviceaccount:shop/orders."""
    return f"{kind}:{name}"


def token_identity(sha256: str) -> str:
    """Return the text of a named token that may be deleted: only its holder knows the secret."""
    return identity_text(VIA_TOKEN, sha256)


@final
class SecurityTable:
    """Users, roles and the mode, read from encoded items."""

    def __init__(
        self,
        find_item: Callable[[str, str], bytes | None],
        find_counts: Callable[[], ItemCounts] = ItemCounts,
        list_users: Callable[[str, str], Collection[str]] = lambda _field, _value: (),
        *,
        floor: Mode = Mode.OFF,
    ) -> None:
        """`find_item` returns an item by kind and name; `floor` is the least mode.

        `list_users` returns the names of the users that list a value in a field of their items.

        `find_counts` returns the counts of all items; without it there are no bans and quotas. The
        owner of the items calls `note_change` after each change of one.
        """
        self._find_item = find_item
        self._list_users = list_users
        self._floor = floor
        # The oldest one first. One of an older generation is read again at its next use: to free
        # 10,000 users at once takes longer than a turn.
        self._users: dict[str, KnownUser] = {}
        self._generation = 0
        self._entry_count = 0  # of the decoded users and their roles
        self._roles: dict[str, AccessRole] = {}
        self._tokens: dict[str, KnownToken] = {}
        self._recorded_mode: Mode | None = None
        self.bans = BanTable(find_item, find_counts)
        self.quotas = QuotaTable(find_item, find_counts)
        self.on_change: Callable[[], None] = lambda: None

    def note_change(self, kind: str, name: str) -> None:
        """Forget what depends on an item that was changed or deleted."""
        if kind == USER:
            self._forget_user(name)
        elif kind == ROLE:
            self._roles.pop(name, None)
            self._generation += 1  # Any user may have the role.
            self._tokens.clear()
        elif kind == TOKEN:
            self._tokens.pop(name, None)
        elif kind == MODE:
            self._recorded_mode = None
        elif kind == BAN:
            self.bans.note_change(name)
        elif kind == QUOTA:
            self.quotas.note_change(name)
        self.on_change()

    def note_all_changed(self) -> None:
        """Forget everything that was read from the items."""
        self._generation += 1
        self._roles.clear()
        self._tokens.clear()
        self._recorded_mode = None
        self.bans.note_all_changed()
        self.quotas.note_change()
        self.on_change()

    @property
    def recorded_mode(self) -> Mode:
        """The mode of the configuration."""
        if self._recorded_mode is None:
            encoded = self._find_item(MODE, "")
            text = json.loads(encoded)["security"]["mode"] if encoded else Mode.OFF.text
            try:
                self._recorded_mode = parse_mode(text)
            except ValueError:
                self._recorded_mode = Mode.ON  # A mode that this program does not know is not less.
        return self._recorded_mode

    @property
    def mode(self) -> Mode:
        """The mode in force: the stricter one of the configuration and the floor."""
        return max(self.recorded_mode, self._floor)

    def user(self, name: str) -> KnownUser | None:
        """Return a user by its name; None if there is none."""
        known = self._users.get(name)
        if known is not None and known.generation == self._generation:
            return known
        self._forget_user(name)
        encoded = self._find_item(USER, name)
        if encoded is None:
            return None
        known = self._users[name] = self._read_user(encoded)
        self._entry_count += known.entry_count
        while len(self._users) > 1 and (
            len(self._users) > DECODED_USERS_MAX or self._entry_count > DECODED_ENTRIES_MAX
        ):
            self._forget_user(next(iter(self._users)))
        return known

    def _forget_user(self, name: str) -> None:
        known = self._users.pop(name, None)
        if known is not None:
            self._entry_count -= known.entry_count

    def role(self, name: str) -> AccessRole | None:
        """Return a role by its name; None if there is none."""
        if (ready := READY_MADE_ROLES.get(name)) is not None:
            return ready
        role = self._roles.get(name)
        if role is None and (encoded := self._find_item(ROLE, name)) is not None:
            role = self._roles[name] = role_of(encoded)
        return role

    def find_token(self, token_id: str) -> NamedToken | None:
        """Return a token by its id; None if there is none."""
        known = self._token(token_id)
        return None if known is None else known.token

    def token_user(self, shown: ShownToken) -> KnownUser | None:
        """Return the user of a shown token; None if the token is unknown or wrong.

        The user may be disabled, and the token may have ended.
        """
        known = self._token(shown.id)
        if not has_secret(None if known is None else known.token, shown) or known is None:
            return None
        user = self.user(known.token.user)
        if user is None or user.user.id != known.token.user_id:
            return None
        return user.with_token(known)

    def account_user(self, account: str) -> KnownUser:
        """Return the user that lists a service account. It may be disabled. Raises Unauthorized."""
        return self._listing_user(ACCOUNTS, account)

    def certificate_user(self, names: Iterable[str]) -> KnownUser | None:
        """Return the user of a certificate by the first name that a user lists; None without one.

        The user may be disabled. Raises Unauthorized.
        """
        for name in names:
            if self._list_users(CERTIFICATES, name):
                return self._listing_user(CERTIFICATES, name)
        return None

    def _listing_user(self, field: str, value: str) -> KnownUser:
        kind = _VIAS[field]
        try:
            name = only_user(self._list_users(field, value), field, value)
        except Unauthorized as error:
            error.identities = (identity_text(kind, value),)
            raise
        known = self.user(name)
        assert known is not None, "users are listed with their items"
        return known.with_identity(kind, value)

    def _token(self, token_id: str) -> KnownToken | None:
        known = self._tokens.get(token_id)
        if known is None and (encoded := self._find_item(TOKEN, token_id)) is not None:
            token = token_of(encoded)
            known = KnownToken(token, self._limits_of(token))
            if len(self._tokens) >= DECODED_TOKENS_MAX:
                del self._tokens[next(iter(self._tokens))]  # the oldest one
            self._tokens[token_id] = known
        return known

    def _limits_of(self, token: NamedToken) -> tuple[Rights, ...] | None:
        """Return the rights of the roles. A missing role allows nothing."""
        if not token.roles:
            return None
        roles = [role for name in token.roles if (role := self.role(name)) is not None]
        return tuple([Rights([role.subject]) for role in roles])

    def _read_user(self, encoded: bytes) -> KnownUser:
        user = user_of(encoded)
        subjects = self.subjects_of(user)
        known = KnownUser(replace(user, entries=()), Rights(subjects))
        known.generation = self._generation
        known.entry_count = sum([len(subject.entries) for subject in subjects])
        return known

    def subjects_of(self, user: User) -> list[Subject]:
        """Return a user, as `user_of` has read it, and its roles with their entries."""
        roles = [role for name in user.roles if (role := self.role(name)) is not None]
        return [Subject(user.subject, user.entries), *[role.subject for role in roles]]
