"""The release job creates, keeps and renews certificates that both ends always trust."""

from __future__ import annotations

import ssl
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509

from tidemill.release.certificates import (
    TRUSTED_AFTER,
    CertificatePlan,
    Data,
    ForeignSecret,
    secrets_to_write,
)
from tidemill.security.secret_keys import KEYS_MAX, parse_keys

NOW = datetime(2026, 3, 1, tzinfo=UTC)
DAY = timedelta(days=1)
PLAN = CertificatePlan(
    authority="ca",
    certificates={"broker-tls": ("pod-0.broker", "pod-1.broker"), "proxy-tls": ("proxy",)},
    tokens={"token": "key"},
    key_files={"security-key": 1},
    administrators=("admin-user",),
    job_users={"job-users": ("check", "roll")},
    days=90,
    authority_days=3650,
)

World = dict[str, Data]


def run(world: World, now: datetime, plan: CertificatePlan = PLAN) -> set[str]:
    """Run the job, and return the names of the Secrets that it wrote."""
    secrets = secrets_to_write(plan, world, now)
    world.update(secrets)
    return set(secrets)


def first_world() -> World:
    world: World = {}
    run(world, NOW)
    return world


def certificate(world: World, name: str) -> x509.Certificate:
    return x509.load_pem_x509_certificate(world[name]["tls.crt"])


def issuers(world: World, name: str) -> list[x509.Certificate]:
    return x509.load_pem_x509_certificates(world[name]["ca.crt"])


def is_trusted(world: World, name: str, *, by: Data) -> bool:
    """Return whether an authority that the process with `by` trusts has signed a certificate."""
    own = certificate(world, name)
    for authority in x509.load_pem_x509_certificates(by["ca.crt"]):
        try:
            own.verify_directly_issued_by(authority)
        except Exception:  # noqa: BLE001  # Several kinds of mismatch raise.
            continue
        return True
    return False


def test_the_first_run_creates_all_secrets_and_the_next_run_none() -> None:
    world = first_world()
    users = {"security-key", "admin-user", "job-users"}
    assert set(world) == {"ca", "broker-tls", "proxy-tls", "token", *users}
    assert run(world, NOW + DAY) == set()


def test_each_job_has_a_secret_of_its_own_that_stays() -> None:
    world = first_world()
    made = dict(world["job-users"])
    assert made.keys() == {"check", "roll"}
    assert len(set(made.values())) == 2
    plan = replace(PLAN, job_users={"job-users": ("check", "roll", "trial")})
    assert run(world, NOW + DAY, plan) == {"job-users"}
    assert made.items() < world["job-users"].items()
    assert world["job-users"].keys() == {"check", "roll", "trial"}


def test_a_certificate_has_the_names_of_its_process_for_both_ends(tmp_path: Path) -> None:
    world = first_world()
    own = certificate(world, "broker-tls")
    names = own.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["pod-0.broker", "pod-1.broker"]
    usages = own.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert {usage.dotted_string for usage in usages} == {"1.3.6.1.5.5.7.3.1", "1.3.6.1.5.5.7.3.2"}
    for file in ("ca.crt", "tls.crt", "tls.key"):
        (tmp_path / file).write_bytes(world["broker-tls"][file])
    context = ssl.create_default_context(cafile=tmp_path / "ca.crt")
    context.load_cert_chain(tmp_path / "tls.crt", tmp_path / "tls.key")


def test_a_certificate_is_renewed_in_the_last_third_of_its_lifetime() -> None:
    world = first_world()
    assert run(world, NOW + 59 * DAY) == set()
    assert run(world, NOW + 61 * DAY) == {"broker-tls", "proxy-tls"}
    assert certificate(world, "proxy-tls").not_valid_after_utc == NOW + 151 * DAY


def test_only_a_certificate_with_new_names_is_created_again() -> None:
    world = first_world()
    more = {**PLAN.certificates, "proxy-tls": ("proxy", "other")}
    assert run(world, NOW, replace(PLAN, certificates=more)) == {"proxy-tls"}


def test_a_lost_certificate_is_created_again() -> None:
    world = first_world()
    del world["proxy-tls"]
    assert run(world, NOW) == {"proxy-tls"}
    assert is_trusted(world, "proxy-tls", by=world["broker-tls"])


def test_certificates_of_another_authority_are_created_again() -> None:
    world = first_world()
    del world["ca"]
    assert run(world, NOW) == {"ca", "broker-tls", "proxy-tls"}
    assert is_trusted(world, "proxy-tls", by=world["broker-tls"])
    assert run(world, NOW) == set()


def test_tokens_keys_and_users_are_created_once() -> None:
    world = first_world()
    made = {name: dict(world[name]) for name in ("token", "security-key", "admin-user")}
    assert len(made["token"]["key"]) == 43
    assert parse_keys(made["security-key"]["keys"].decode()).ids == ["k1"]
    name, secret = made["admin-user"]["credentials"].decode().splitlines()
    assert (name, len(secret)) == ("admin", 43)
    run(world, NOW + 4000 * DAY)
    assert {name: world[name] for name in made} == made


def rotation(newest: int) -> CertificatePlan:
    return replace(PLAN, key_files={"security-key": newest})


def test_a_higher_rotation_adds_one_first_key() -> None:
    world = first_world()
    before = world["security-key"]["keys"]
    assert run(world, NOW, rotation(2)) == {"security-key"}
    keys = world["security-key"]["keys"]
    assert keys.endswith(before)
    assert parse_keys(keys.decode()).ids == ["k2", "k1"]
    assert run(world, NOW, rotation(2)) == set()
    assert run(world, NOW, rotation(1)) == set(), "a rollback removes no key"
    world["security-key"] = {"keys": keys.splitlines(keepends=True)[0]}
    assert run(world, NOW, rotation(1)) == set(), "an id is not used twice"
    run(world, NOW, rotation(7))
    assert parse_keys(world["security-key"]["keys"].decode()).ids == ["k7", "k2"]


def test_lost_keys_are_not_replaced() -> None:
    """The secrets of all users are encrypted under them."""
    world = first_world()
    copy = world.pop("security-key")
    with pytest.raises(ForeignSecret, match="restore it from your copy"):
        run(world, NOW)
    assert "security-key" not in world
    del world["admin-user"]
    assert run(world, NOW) == {"security-key", "admin-user"}
    assert world["security-key"] != copy
    order = list(secrets_to_write(PLAN, {}, NOW))
    assert order[-3:] == ["token", "admin-user", "job-users"], "keys come first"


def test_keys_of_an_operator_stay() -> None:
    world = first_world()
    own = f"mine {64 * 'a'}\n".encode()
    world["security-key"] = {"keys": own, "other": b"x"}
    assert run(world, NOW) == set()
    assert run(world, NOW, rotation(2)) == {"security-key"}
    assert world["security-key"]["keys"].endswith(own)
    assert world["security-key"]["other"] == b"x"


@pytest.mark.parametrize(
    "keys", ["nonsense", "".join(f"o{n} {64 * '0'}\n" for n in range(KEYS_MAX))]
)
def test_a_malformed_or_full_key_file_is_not_changed(keys: str) -> None:
    world = first_world()
    world["security-key"] = {"keys": keys.encode()}
    with pytest.raises(ForeignSecret, match="security-key gets no key k2"):
        run(world, NOW, rotation(2))


def test_processes_trust_a_new_authority_before_it_signs() -> None:
    """Processes trust each other even if some have the Secret of the run before."""
    world = first_world()
    old = NOW + 2500 * DAY
    run(world, old)
    assert "next.crt" in world["ca"]
    assert len(issuers(world, "broker-tls")) == 2
    before = dict(world)
    assert run(world, old + TRUSTED_AFTER / 2) == set()
    run(world, old + TRUSTED_AFTER)
    assert "next.crt" not in world["ca"]
    for name in PLAN.certificates:
        assert is_trusted(world, name, by=before["proxy-tls"])
        assert is_trusted(before, name, by=world["proxy-tls"])
    assert run(world, old + DAY) == set()


def test_an_expired_authority_is_removed() -> None:
    world = first_world()
    now = NOW
    while now < NOW + 3700 * DAY:
        run(world, now)
        now += 20 * DAY
    assert "previous.crt" not in world["ca"]
    assert len(issuers(world, "proxy-tls")) == 1


@pytest.mark.parametrize("lost", ["tls.key", "tls.crt"])
def test_an_incomplete_certificate_is_created_again(lost: str) -> None:
    world = first_world()
    world["proxy-tls"] = {name: data for name, data in world["proxy-tls"].items() if name != lost}
    assert run(world, NOW) == {"proxy-tls"}


def test_a_lost_authority_stays_trusted_until_processes_trust_the_new_one() -> None:
    world = first_world()
    before = dict(world)
    del world["ca"]
    run(world, NOW + DAY)
    for name in PLAN.certificates:
        assert world[name]["tls.crt"] == before[name]["tls.crt"]
        assert is_trusted(world, name, by=world["proxy-tls"])
    # The new authority signs the certificates that its processes trust by now.
    run(world, NOW + 2 * DAY)
    for name in PLAN.certificates:
        assert world[name]["tls.crt"] != before[name]["tls.crt"]
        assert is_trusted(world, name, by=world["broker-tls"])
        assert is_trusted(before, name, by=world[name])
    assert not run(world, NOW + 3 * DAY)


def test_an_authority_secret_of_another_tool_is_an_error() -> None:
    """For example a Secret of cert-manager."""
    world: World = {"ca": {"tls.crt": b"", "tls.key": b"", "ca.crt": b""}}
    with pytest.raises(ForeignSecret, match=r"the Secret ca has ca.crt, tls.crt, tls.key, but not"):
        run(world, NOW)
