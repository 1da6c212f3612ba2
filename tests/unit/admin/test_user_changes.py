"""Changes of users: ids, secrets, rotations and expected versions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tidemill.admin.cluster.user_changes import UserChange, UserChanges
from tidemill.common.errors import BadRequest, Conflict
from tidemill.security.acl import ENTRIES_MAX, parse_entry
from tidemill.security.identities import User, UserType, producer_entries
from tidemill.security.rights import Rights
from tidemill.security.secret_keys import new_key_line, parse_keys
from tidemill.security.table import KnownUser

KEYS = parse_keys(new_key_line("k1"))
DAY_MS = 86_400_000


def changes(now_ms: int = 1_000, *, has_keys: bool = True) -> UserChanges:
    return UserChanges(lambda: KEYS if has_keys else None, now_ms, "root at 127.0.0.1")


def created(name: str = "orders", **fields: object) -> tuple[User, str]:
    return changes().put(name, None, UserChange(**fields), table_version=41)  # type: ignore[arg-type]


def opened(user: User) -> list[str]:
    return [KEYS.open(secret, user_id=user.id).decode() for secret in user.secrets]


def test_a_new_user_has_an_id_of_its_own_and_a_random_secret() -> None:
    user, secret = created(entries=producer_entries("orders"), type=UserType.SUPER)
    assert (user.id, user.type, user.is_enabled) == (42, UserType.SUPER, True)
    assert opened(user) == [secret]
    assert len(secret) == 43
    assert created()[1] != secret
    assert (user.changed_at_ms, user.changed_by) == (1_000, "root at 127.0.0.1")


def test_a_chosen_secret_of_a_new_user_is_checked() -> None:
    assert opened(created(secret="chosen by the user"[:16].replace(" ", "-"))[0])
    with pytest.raises(BadRequest):
        created(secret="short")
    with pytest.raises(BadRequest):
        created(name="two words")
    with pytest.raises(Conflict, match="security_key_file"):
        changes(has_keys=False).put("orders", None, UserChange(), table_version=1)


def test_fields_that_are_not_given_stay() -> None:
    user, _ = created(entries=producer_entries("orders"), roles=("viewer",))
    after, secret = changes(2_000).put(
        "orders", user, UserChange(is_enabled=False), table_version=50
    )
    assert secret == ""
    assert after == replace(user, is_enabled=False, changed_at_ms=2_000)
    same, _ = changes(3_000).put("orders", after, UserChange(is_enabled=False), table_version=51)
    assert same == after, "nothing changes"
    with pytest.raises(Conflict, match="rotation"):
        changes().put("orders", user, UserChange(secret="x" * 20), table_version=50)
    too_many = (parse_entry("Topic:a", ["Pub"]),) * (ENTRIES_MAX + 1)
    with pytest.raises(BadRequest):
        changes().put("orders", user, UserChange(entries=too_many), table_version=50)


def test_an_expected_version_is_compared() -> None:
    user = replace(created()[0], version=42)
    put = changes().put
    put("orders", user, UserChange(if_version=42, is_enabled=False), table_version=50)
    for old, expected in ((user, 41), (None, 42)):
        with pytest.raises(Conflict, match="read it again"):
            put("orders", old, UserChange(if_version=expected), table_version=50)
    with pytest.raises(Conflict, match="exists already; change it"):
        put("orders", user, UserChange(if_version=0), table_version=50)
    put("orders", None, UserChange(if_version=0), table_version=50)


def test_a_rotated_secret_ends_later_and_a_third_one_by_force_at_once() -> None:
    user, first = created()
    user, second = changes(2_000).rotate(user, retire_after_ms=DAY_MS)
    assert opened(user) == [first, second]
    assert [secret.not_after_ms for secret in user.secrets] == [2_000 + DAY_MS, 0]
    with pytest.raises(Conflict, match=r"is valid until 1970-01-02T00:00:02Z; .* with force"):
        changes(3_000).rotate(user, retire_after_ms=2 * DAY_MS)
    user, third = changes(3_000).rotate(user, retire_after_ms=2 * DAY_MS, force=True)
    assert opened(user) == [second, third]
    assert [secret.id for secret in user.secrets] == [2, 3]
    user, fourth = changes(4_000).rotate(user, retire_after_ms=0)
    assert opened(user) == [fourth]
    assert user.secrets[0].id == 4, "no id is used again"


def test_a_second_rotation_waits_for_the_end_of_the_older_secret() -> None:
    user, _ = created()
    user, second = changes(2_000).rotate(user, retire_after_ms=DAY_MS)
    with pytest.raises(Conflict):
        changes(2_000 + DAY_MS).rotate(user, retire_after_ms=DAY_MS)
    user, third = changes(2_000 + DAY_MS + 1).rotate(user, retire_after_ms=DAY_MS)
    assert opened(user) == [second, third]


def test_a_rotation_does_not_prolong_a_secret() -> None:
    user, _ = created()
    user = replace(user, secrets=(replace(user.secrets[0], not_after_ms=5_000),))
    after, _ = changes(2_000).rotate(user, retire_after_ms=DAY_MS)
    assert after.secrets[0].not_after_ms == 5_000
    ended, second = changes(6_000).rotate(user, retire_after_ms=DAY_MS)
    assert opened(ended) == [second], "it has ended already"


def test_the_first_administrator_can_call_the_rest_api() -> None:
    """The REST API refuses users that list certificates, so they are a lock-out, too."""
    admin = changes().set_super("admin", None, "a-secret-of-the-admin", table_version=1)
    locked_out, _ = changes().put(
        "admin", admin, UserChange(certificates=["wrong"]), table_version=2
    )
    again = changes().set_super("admin", locked_out, "a-secret-of-the-admin", table_version=3)
    KnownUser(again, Rights([])).check_certificate(())
