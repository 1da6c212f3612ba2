"""The users that list a service account."""

from __future__ import annotations

from random import Random

import pytest

from tests.support.seeds import seeds
from tidemill.common.errors import Unauthorized
from tidemill.security.listed_identities import ACCOUNTS, ListedIdentities, only_user


@pytest.mark.parametrize("seed", seeds("listed identities", 20))
def test_look_ups_equal_a_scan_of_all_users(seed: int) -> None:
    random, listed = Random(seed), ListedIdentities()
    model: dict[str, list[str]] = {}
    for _ in range(300):
        user = f"u{random.randrange(8)}"
        if random.random() < 0.3:
            model.pop(user, None)
            listed.remove(user)
        else:
            model[user] = random.sample(["a/a", "a/b", "b/a", "b/b"], random.randrange(4))
            listed.put(user, {ACCOUNTS: model[user]} if model[user] else {})
        for account in ("a/a", "a/b", "b/a", "b/b", "c/c"):
            expected = {name for name, accounts in model.items() if account in accounts}
            assert set(listed.find(ACCOUNTS, account)) == expected


def test_exactly_one_user_lists_an_account() -> None:
    assert only_user({"a"}, ACCOUNTS, "shop/x") == "a"
    with pytest.raises(Unauthorized, match="no user lists the service account shop/x"):
        only_user((), ACCOUNTS, "shop/x")
    with pytest.raises(Unauthorized, match="the users a, b list the service account shop/x"):
        only_user({"b", "a"}, ACCOUNTS, "shop/x")
