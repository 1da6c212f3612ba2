"""The key file and sealed secrets."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tidemill.security.identities import SealedSecret
from tidemill.security.secret_keys import SecretKeys, UnknownKey, new_key_line, parse_keys


def sealed(keys: SecretKeys, secret: bytes = b"a secret of mine") -> SealedSecret:
    return keys.seal(secret, user_id=7, secret_id=1, created_at_ms=5)


def test_a_sealed_secret_opens_for_its_user_alone() -> None:
    keys = parse_keys(new_key_line("k1"))
    one = sealed(keys)
    assert b"secret" not in one.sealed
    assert keys.open(one, user_id=7) == b"a secret of mine"
    for wrong in (
        replace(one, id=2),
        replace(one, sealed=one.sealed[:-1]),
        replace(one, sealed=b""),
    ):
        with pytest.raises(UnknownKey):
            keys.open(wrong, user_id=7)
    with pytest.raises(UnknownKey):
        keys.open(one, user_id=8)


def test_two_seals_of_one_secret_differ() -> None:
    keys = parse_keys(new_key_line("k1"))
    assert sealed(keys).sealed != sealed(keys).sealed


def test_the_first_key_encrypts_and_all_decrypt() -> None:
    old = new_key_line("k1")
    before = parse_keys(old)
    one = sealed(before)
    after = parse_keys(f"{new_key_line('k2')}\n{old}")
    assert after.ids == ["k2", "k1"]
    assert sealed(after).key_id == "k2"
    assert after.open(one, user_id=7) == b"a secret of mine"
    with pytest.raises(UnknownKey, match="has no key 'k2'"):
        before.open(sealed(after), user_id=7)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no key"),
        ("\n \n", "no key"),
        ("k1 00", "line 1"),
        (f"k1 {'0' * 64}\nk1 {'1' * 64}", "line 2 repeats"),
        (f"{'0' * 64}", "line 1"),
        ("\n".join(f"k{n} {'0' * 64}" for n in range(17)), "at most 16"),
    ],
)
def test_a_malformed_key_file_is_refused_without_its_content(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why) as error:
        parse_keys(text)
    assert "0000" not in str(error.value)
