"""The times at which the keys of an issuer are read, and their end."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.issuer import jwk, key_set, p256_key, rsa_key
from tidemill.common.lifecycle import StartError
from tidemill.proxy.settings import ProxySettings
from tidemill.security.issuer_keys import (
    AGE_MS_MAX,
    READ_PERIOD_MS,
    RETRY_PERIOD_MS,
    UNKNOWN_PERIOD_MS,
    IssuerKeys,
    KeyAges,
    KeySource,
)
from tidemill.security.json_web_keys import KeySet, parse_key_set

SOME, OTHER = (parse_key_set(key_set(jwk(key))) for key in (rsa_key(), p256_key()))


def keys_of(ages: KeyAges) -> KeySet | None:
    return ages.keys


def test_keys_are_read_at_once_and_each_ten_minutes() -> None:
    ages = KeyAges()
    assert ages.pause_ms(5) == 0
    assert ages.note_keys(SOME, 5)
    assert ages.pause_ms(5) == READ_PERIOD_MS == 600_000
    assert ages.pause_ms(5 + READ_PERIOD_MS + 1) == 0
    assert not ages.note_keys(SOME, 10), "the same keys"
    assert ages.note_keys(OTHER, 20)


def test_a_failed_read_is_repeated_each_minute() -> None:
    ages = KeyAges()
    assert not ages.note_failure("down", 5)
    assert ages.pause_ms(5) == RETRY_PERIOD_MS == 60_000
    ages.note_keys(SOME, 10)
    assert ages.pause_ms(10) == READ_PERIOD_MS


def test_the_time_since_the_first_failure_is_counted() -> None:
    ages = KeyAges()
    assert ages.failing_ms(5) == 0
    ages.note_failure("down", 5)
    assert ages.failing_ms(1_000) == 995
    ages.note_failure("down", 1_005)
    assert ages.failing_ms(2_005) == 2_000
    ages.note_keys(SOME, 3_000)
    assert ages.failing_ms(9_000) == 0


def test_keys_that_cannot_be_read_again_end_after_a_day() -> None:
    ages = KeyAges()
    ages.note_keys(SOME, 5)
    assert not ages.note_failure("down", 5 + AGE_MS_MAX - 1)
    assert ages.keys == SOME
    assert ages.note_failure("down", 5 + AGE_MS_MAX)
    assert keys_of(ages) is None
    assert not ages.note_failure("down", 6 + AGE_MS_MAX), "they have ended already"
    assert ages.note_keys(SOME, 7 + AGE_MS_MAX)


def test_the_first_unknown_key_causes_a_read_at_once() -> None:
    ages = KeyAges()
    ages.note_keys(SOME, 5)
    assert ages.note_unknown()
    assert not ages.note_unknown(), "the same read"
    assert ages.pause_ms(6) == 0
    ages.begin_read(6)
    ages.note_keys(SOME, 6)
    assert ages.pause_ms(6) == READ_PERIOD_MS


@pytest.mark.parametrize("is_failing", [False, True])
def test_any_number_of_unknown_keys_causes_a_read_every_ten_seconds(is_failing: bool) -> None:
    """So a new key of the issuer is known after ten seconds, whatever strangers send."""
    ages, reads_ms = KeyAges(), []
    ages.note_keys(SOME, 0)
    for now_ms in range(0, 60_000, 100):
        ages.note_unknown()
        if not ages.pause_ms(now_ms):
            ages.begin_read(now_ms)
            reads_ms.append(now_ms)
            if is_failing:
                ages.note_failure("down", now_ms)
            else:
                ages.note_keys(SOME, now_ms)
    assert reads_ms == list(range(0, 60_000, UNKNOWN_PERIOD_MS))
    assert UNKNOWN_PERIOD_MS == 10_000


def test_an_unknown_key_is_looked_for_without_another_call() -> None:
    ages = KeyAges()
    ages.note_unknown()
    ages.begin_read(5)
    ages.note_keys(SOME, 6)
    ages.note_unknown()
    assert ages.pause_ms(7) == UNKNOWN_PERIOD_MS - 2
    assert ages.pause_ms(5 + UNKNOWN_PERIOD_MS - 1) == 1
    assert ages.pause_ms(5 + UNKNOWN_PERIOD_MS) == 0


def test_the_usual_read_serves_unknown_keys() -> None:
    ages = KeyAges()
    ages.note_unknown()
    ages.begin_read(READ_PERIOD_MS - 5_000)
    ages.note_unknown()
    ages.note_keys(SOME, 0)
    assert ages.pause_ms(READ_PERIOD_MS) == 0
    ages.begin_read(READ_PERIOD_MS)
    ages.note_keys(SOME, READ_PERIOD_MS)
    assert ages.pause_ms(READ_PERIOD_MS) == READ_PERIOD_MS


@pytest.mark.parametrize("content", [None, b"{", b"{}"])
def test_a_start_needs_a_readable_file(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(StartError, match="oidc_keys"):
        IssuerKeys(KeySource(str(file)), lambda: 0)


URL = "https://api/keys"


@pytest.mark.parametrize(
    "settings",
    [
        {"oidc_issuer": "i"},
        {"oidc_keys": "keys.json"},
        {"oidc_issuer": "i", "oidc_keys": "http://api/keys"},
        {"oidc_issuer": "i", "oidc_keys": "file:///keys"},
        {"oidc_issuer": "i", "oidc_keys": "https:///keys"},
        {"oidc_issuer": "i", "oidc_keys": "https://user:secret@api/keys"},
        {"oidc_issuer": "i", "oidc_keys": "https://api:port/keys"},
        {"oidc_issuer": "i", "oidc_keys": "https://api/keys#1"},
        {"oidc_issuer": "i", "oidc_keys": "https://api/ke ys"},
        {"oidc_issuer": "i", "oidc_keys": "https://api/\nkeys"},
        {"oidc_issuer": "i", "oidc_keys": "keys.json", "oidc_ca_file": "ca.crt"},
        {"oidc_issuer": "i", "oidc_keys": "keys.json", "oidc_token_file": "token"},
        {"oidc_issuer": "i", "oidc_keys": URL, "oidc_audience": ""},
    ],
)
def test_settings_that_make_no_sense_are_rejected(settings: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"oidc|Kubernetes"):
        ProxySettings(**settings)  # type: ignore[arg-type]  # by name


def test_settings_of_a_url_and_of_a_file() -> None:
    of_url = {"oidc_issuer": "i", "oidc_keys": URL, "oidc_ca_file": "c", "oidc_token_file": "t"}
    assert ProxySettings(**of_url).oidc_audience == "tidemill"  # type: ignore[arg-type]  # by name
    assert ProxySettings(oidc_issuer="i", oidc_keys="/keys/jwks.json").oidc_keys
    assert ProxySettings().oidc_issuer == ""
