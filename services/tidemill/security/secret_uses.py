"""The last use of each secret of users at one process, since its start.

An operator needs it to end the older secret of a user. The memory of the process is enough: a use
writes one number, and no record.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias, final

if TYPE_CHECKING:
    from tidemill.security.identities import SealedSecret

# All secrets of 10,000 users, about 4 MB. Beyond it, those of the oldest uses are dropped: former
# users may have some.
SECRETS_MAX: Final = 20_000
DROPPED_PART: Final = 4  # of the secrets, in one turn of some milliseconds

# The id of the user, and the id and the creation of the secret, which tell it from later ones.
_SecretKey: TypeAlias = tuple[int, int, int]


@final
class SecretUse:
    """The last use of one secret."""

    __slots__ = ("at_s",)

    def __init__(self, at_s: float) -> None:
        self.at_s = at_s  # monotonic


class KnownUse(NamedTuple):
    """The last use of a secret, as other processes see it."""

    secret_id: int
    created_at_ms: int
    used_at_ms: int


@final
class SecretUses:
    """The last uses of all secrets at this process."""

    def __init__(self, monotonic_s: Callable[[], float], wall_ms: Callable[[], int]) -> None:
        self._monotonic_s = monotonic_s
        self._wall_ms = wall_ms
        self._since_s = monotonic_s()
        self._uses: dict[_SecretKey, SecretUse] = {}

    @property
    def since_ms(self) -> int:
        """The time since which all uses are known, ms since 1970."""
        return self._wall_of(self._since_s)

    def note(self, user_id: int, secret: SealedSecret, at_s: float) -> SecretUse:
        """Note a use, by monotonic time. A caller may note later ones in the returned object."""
        key = user_id, secret.id, secret.created_at_ms
        use = self._uses.get(key)
        if use is None:
            if len(self._uses) >= SECRETS_MAX:
                self._drop_oldest()
            use = self._uses[key] = SecretUse(at_s)
        use.at_s = at_s
        return use

    def note_now(self, user_id: int, secret: SealedSecret) -> None:
        """Note a use at the present time."""
        self.note(user_id, secret, self._monotonic_s())

    def of_user(self, user_id: int) -> list[KnownUse]:
        """Return the known last uses of the secrets of a user."""
        return [
            KnownUse(key[1], key[2], self._wall_of(use.at_s))
            for key, use in self._uses.items()
            if key[0] == user_id
        ]

    def _drop_oldest(self) -> None:
        oldest = sorted(self._uses, key=lambda key: self._uses[key].at_s)
        for key in oldest[: max(len(oldest) // DROPPED_PART, 1)]:
            self._since_s = max(self._since_s, self._uses.pop(key).at_s)

    def _wall_of(self, at_s: float) -> int:
        return self._wall_ms() - round((self._monotonic_s() - at_s) * 1_000)
