"""The security items of a cluster as a process uses them: users with their rights, and the mode.

Items stay encoded until a user makes a call, because most of ten thousand users make none here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from enum import IntEnum
from typing import Final, final

from tidemill.security.acl import (
    Action,
    AddressFinder,
    Resource,
    ResourceType,
    Rights,
    Subject,
    Verdict,
)
from tidemill.security.identities import (
    READY_MADE_ROLES,
    AccessRole,
    User,
    UserType,
    role_of,
    user_of,
)
from tidemill.security.signatures import Signer

DECODED_USERS_MAX: Final = 2_000  # about 10 KB each, with 20 entries

USER: Final = "user"
ROLE: Final = "role"
MODE: Final = "security"  # the one item of this kind has no name

_ALLOWED: Final = Verdict(is_allowed=True)


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


def mode_item(mode: Mode) -> dict[str, object]:
    """Return the configuration item that sets the mode."""
    return {"op": MODE, "security": {"mode": mode.text}}


@final
class KnownUser:
    """A user with its rights. An object lasts until an item changes that it depends on."""

    __slots__ = ("_rights", "signers", "user")

    def __init__(self, user: User, rights: Rights) -> None:
        self.user = user
        self._rights = rights
        # One per secret, in the order of `user.secrets`; None until the first signed call.
        self.signers: tuple[Signer, ...] | None = None

    def decide(self, action: Action, resource: Resource, find_address: AddressFinder) -> Verdict:
        """Decide about one action on one resource."""
        if self.user.type is UserType.SUPER:
            return _ALLOWED
        return self._rights.decide(action, resource, find_address)

    def allows_all(self, action: Action, type_: ResourceType, find_address: AddressFinder) -> bool:
        """Whether one action is allowed on each resource of a type."""
        if self.user.type is UserType.SUPER:
            return True
        return self._rights.allows_all(action, type_, find_address)


@final
class SecurityTable:
    """Users, roles and the mode, read from encoded items."""

    def __init__(
        self, find_item: Callable[[str, str], bytes | None], *, floor: Mode = Mode.OFF
    ) -> None:
        """`find_item` returns an item by kind and name; `floor` is the least mode.

        The owner of the items calls `note_change` after each change of one.
        """
        self._find_item = find_item
        self._floor = floor
        self._users: dict[str, KnownUser] = {}
        self._roles: dict[str, AccessRole] = {}
        self._recorded_mode: Mode | None = None
        self.on_change: Callable[[], None] = lambda: None

    def note_change(self, kind: str, name: str) -> None:
        """Forget what depends on an item that was changed or deleted."""
        if kind == USER:
            self._users.pop(name, None)
        elif kind == ROLE:
            self._roles.pop(name, None)
            self._users.clear()  # Any of them may have the role.
        elif kind == MODE:
            self._recorded_mode = None
        self.on_change()

    def note_all_changed(self) -> None:
        """Forget everything that was read from the items."""
        self._users.clear()
        self._roles.clear()
        self._recorded_mode = None
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
        if known is None and (encoded := self._find_item(USER, name)) is not None:
            known = self._read_user(encoded)
            if len(self._users) >= DECODED_USERS_MAX:
                del self._users[next(iter(self._users))]  # the oldest one
            self._users[name] = known
        return known

    def role(self, name: str) -> AccessRole | None:
        """Return a role by its name; None if there is none."""
        if (ready := READY_MADE_ROLES.get(name)) is not None:
            return ready
        role = self._roles.get(name)
        if role is None and (encoded := self._find_item(ROLE, name)) is not None:
            role = self._roles[name] = role_of(encoded)
        return role

    def _read_user(self, encoded: bytes) -> KnownUser:
        user = user_of(encoded)
        subjects = [Subject(user.subject, user.entries)]
        subjects += [role.subject for name in user.roles if (role := self.role(name)) is not None]
        return KnownUser(user, Rights(subjects))
