"""The last uses of secrets at one process."""

from __future__ import annotations

import pytest

from tidemill.security import secret_uses
from tidemill.security.identities import SealedSecret
from tidemill.security.secret_uses import KnownUse, SecretUses


class World:
    """The uses, with clocks that a test moves."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.uses = SecretUses(lambda: self.now_s, self.wall_ms)

    def wall_ms(self) -> int:
        return 1_000_000 + round(self.now_s * 1_000)


def secret(number: int, created_at_ms: int = 0) -> SealedSecret:
    return SealedSecret(id=number, key_id="k1", sealed=b"", created_at_ms=created_at_ms)


def test_the_last_use_of_each_secret_of_a_user_is_known() -> None:
    world = World()
    world.uses.note(1, secret(1), 100.0)
    second = world.uses.note(1, secret(2), 100.0)
    world.uses.note(2, secret(1), 101.0)
    world.now_s = 105.0
    world.uses.note_now(1, secret(1))
    second.at_s = 103.0
    assert world.uses.of_user(1) == [KnownUse(1, 0, 1_105_000), KnownUse(2, 0, 1_103_000)]
    assert world.uses.of_user(3) == []
    assert world.uses.since_ms == 1_100_000


def test_a_later_secret_with_the_same_id_has_no_use_of_the_former_one() -> None:
    world = World()
    world.uses.note_now(1, secret(1, created_at_ms=5))
    assert [use.created_at_ms for use in world.uses.of_user(1)] == [5]
    world.uses.note_now(1, secret(1, created_at_ms=6))
    assert [use.created_at_ms for use in world.uses.of_user(1)] == [5, 6]


def test_beyond_the_limit_the_oldest_uses_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secret_uses, "SECRETS_MAX", 8)
    world = World()
    for user_id in range(1, 9):
        world.now_s += 1
        world.uses.note_now(user_id, secret(1))
    world.uses.note_now(1, secret(1))
    world.uses.note_now(9, secret(1))
    kept = [user_id for user_id in range(1, 10) if world.uses.of_user(user_id)]
    assert kept == [1, 4, 5, 6, 7, 8, 9]
    assert world.uses.since_ms == 1_103_000, "the use of user 3 is the last dropped one"
