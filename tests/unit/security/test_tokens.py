"""Named tokens: their form, their hash, and the rights of their roles."""

from __future__ import annotations

import json

import pytest

from tests.unit.security.test_table import ORDERS, World, no_address
from tidemill.common.errors import Unauthorized
from tidemill.security import table as table_module
from tidemill.security.acl import Action, ResourceType, parse_entry
from tidemill.security.identities import AccessRole, User, UserType, producer_entries
from tidemill.security.table import KnownUser
from tidemill.security.tokens import (
    HEADER_CHARS_MAX,
    MadeToken,
    NamedToken,
    ShownToken,
    make_token,
    parse_bearer,
    token_of,
)

SENDERS = AccessRole(name="senders", entries=producer_entries("*"))
DENIAL = parse_entry("Topic:orders", ["Pub"], is_allowed=False)


def put_token(world: World, *roles: str, user_id: int = 1, not_after_ms: int = 0) -> MadeToken:
    made = make_token()
    token = NamedToken(
        id=made.id,
        name="ci",
        user="ops",
        user_id=user_id,
        sha256=made.sha256,
        roles=roles,
        not_after_ms=not_after_ms,
    )
    world.put(token.to_item())
    return made


def shown(made: MadeToken) -> ShownToken:
    found = parse_bearer(f"Bearer {made.text}")
    assert found is not None
    return found


def user_with(world: World, made: MadeToken) -> KnownUser:
    known = world.table.token_user(shown(made))
    assert known is not None
    return known


def may(known: KnownUser, action: Action = Action.PUB) -> bool:
    return known.decide(action, ORDERS, no_address)


# ---------------------------------------------------------------- the text


def test_a_token_has_an_id_and_a_random_secret() -> None:
    first, second = make_token(), make_token()
    assert first.text.startswith(f"tmk_{first.id}_")
    assert len(first.text) == 4 + 16 + 1 + 43
    assert len({first.text, second.text, first.id, second.id}) == 4
    assert first.text[-43:] not in repr(shown(first))
    assert first.sha256 not in first.text


@pytest.mark.parametrize("header", ["Bearer {}", "bearer  {} ", "Bearer tmk_x, Bearer {}"])
def test_a_header_shows_a_token(header: str) -> None:
    made = make_token()
    found = parse_bearer(header.format(made.text))
    assert found is not None
    assert found.id == made.id


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[:-1],
        lambda text: text + "x",
        lambda text: text.upper(),
        lambda text: text.replace("tmk_", "tmx_"),
        lambda text: f"{text} {text}",
        lambda text: text[:-1] + "é",
        lambda text: text + " " * HEADER_CHARS_MAX,
    ],
)
def test_a_malformed_token_is_none(change: object) -> None:
    text = change(make_token().text)  # type: ignore[operator]  # a function of the list above
    assert parse_bearer(f"Bearer {text}") is None
    assert parse_bearer(f"Basic {make_token().text}") is None


def test_a_stored_token_has_no_secret() -> None:
    world = World()
    made = put_token(world, "viewer", not_after_ms=5)
    encoded = world.items["token", made.id]
    assert made.text[-43:].encode() not in encoded
    token = token_of(encoded)
    assert (token.via, token.roles, token.user_id) == ("token:ci", ("viewer",), 1)
    assert [token.is_over(now_ms) for now_ms in (5, 6)] == [False, True]
    assert token.to_item() == json.loads(encoded)


# ---------------------------------------------------------------- the user


def test_a_token_counts_for_its_user_alone() -> None:
    world = World()
    made = put_token(world)
    assert world.table.token_user(shown(made)) is None, "no user"
    world.put(User(name="ops", id=1, entries=producer_entries("orders")).to_item())
    assert may(user_with(world, made))
    assert not may(user_with(world, made), Action.SUB)
    wrong = ShownToken(made.id, make_token().text[-43:])
    assert world.table.token_user(wrong) is None
    assert world.table.token_user(shown(make_token())) is None
    world.put(User(name="ops", id=2, type=UserType.SUPER).to_item())
    assert world.table.token_user(shown(made)) is None, "a later user of this name"


def test_a_deleted_token_is_unknown_at_once() -> None:
    world = World()
    world.put(User(name="ops", id=1).to_item())
    made = put_token(world)
    assert user_with(world, made).user.name == "ops"
    world.delete("token", made.id)
    assert world.table.token_user(shown(made)) is None
    assert world.table.find_token(made.id) is None


def test_user_and_one_role_must_allow() -> None:
    world = World()
    world.put(SENDERS.to_item())
    world.put(AccessRole(name="others", entries=(DENIAL,)).to_item())
    world.put(User(name="ops", id=1, entries=producer_entries("orders")).to_item())
    assert may(user_with(world, put_token(world, "senders")))
    assert not may(user_with(world, put_token(world, "viewer")))
    assert may(user_with(world, put_token(world, "others", "senders"))), "one role suffices"
    assert not may(user_with(world, put_token(world, "missing")))
    world.put(User(name="ops", id=1, entries=(DENIAL,)).to_item())
    assert not may(user_with(world, put_token(world, "senders"))), "the user must allow"


def test_roles_limit_a_super_user() -> None:
    world = World()
    world.put(User(name="ops", id=1, type=UserType.SUPER).to_item())
    limited, free = (user_with(world, put_token(world, *roles)) for roles in (("viewer",), ()))
    assert (limited.is_super, free.is_super) == (False, True)
    assert [may(limited, action) for action in (Action.GET, Action.PUB)] == [True, False]
    assert limited.allows_all(Action.GET, ResourceType.TOPIC, no_address)
    assert not limited.allows_all(Action.PUB, ResourceType.TOPIC, no_address)
    assert free.allows_all(Action.PUB, ResourceType.TOPIC, no_address)


def test_a_change_of_a_role_counts_for_tokens() -> None:
    world = World()
    world.put(User(name="ops", id=1, type=UserType.SUPER).to_item())
    made = put_token(world, "senders")
    assert not may(user_with(world, made))
    world.put(SENDERS.to_item())
    assert may(user_with(world, made))
    world.delete("role", "senders")
    assert not may(user_with(world, made))


def test_the_end_and_the_enabled_flag_are_checked() -> None:
    world = World()
    world.put(User(name="ops", id=1).to_item())
    known = user_with(world, put_token(world, not_after_ms=1_000))
    known.check_token(1_000)
    with pytest.raises(Unauthorized, match="token ci of user ops has ended"):
        known.check_token(1_001)
    world.put(User(name="ops", id=1, is_enabled=False).to_item())
    with pytest.raises(Unauthorized, match="disabled"):
        user_with(world, put_token(world)).check_token(0)


def test_decoded_tokens_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_module, "DECODED_TOKENS_MAX", 2)
    world = World()
    world.put(User(name="ops", id=1).to_item())
    for made in [put_token(world) for _ in range(4)]:
        assert user_with(world, made).user.name == "ops"
    assert len(world.table._tokens) == 2
