"""Which certificates are made, kept and renewed, and that both ends believe them all the while."""

from __future__ import annotations

import ssl
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509

from tidemill.release.certificates import (
    TOLD_AFTER,
    CertificatePlan,
    Data,
    ForeignSecret,
    secrets_to_write,
)

NOW = datetime(2026, 3, 1, tzinfo=UTC)
DAY = timedelta(days=1)
PLAN = CertificatePlan(
    authority="ca",
    certificates={"broker-tls": ("pod-0.broker", "pod-1.broker"), "proxy-tls": ("proxy",)},
    tokens={"token": "key"},
    days=90,
    authority_days=3650,
)

World = dict[str, Data]


def run(world: World, now: datetime, plan: CertificatePlan = PLAN) -> set[str]:
    """Do what is due, and return the names of what was written."""
    written = secrets_to_write(plan, world, now)
    world.update(written)
    return set(written)


def made() -> World:
    world: World = {}
    run(world, NOW)
    return world


def certificate(world: World, name: str) -> x509.Certificate:
    return x509.load_pem_x509_certificate(world[name]["tls.crt"])


def issuers(world: World, name: str) -> list[x509.Certificate]:
    return x509.load_pem_x509_certificates(world[name]["ca.crt"])


def is_believed(world: World, name: str, *, by: Data) -> bool:
    """Whether a certificate is signed by somebody whom the holder of `by` believes."""
    own = certificate(world, name)
    for authority in x509.load_pem_x509_certificates(by["ca.crt"]):
        try:
            own.verify_directly_issued_by(authority)
        except Exception:  # noqa: BLE001  # Whatever is wrong with it.
            continue
        return True
    return False


def test_at_first_all_is_made_and_then_nothing_is_due() -> None:
    world = made()
    assert set(world) == {"ca", "broker-tls", "proxy-tls", "token"}
    assert run(world, NOW + DAY) == set()


def test_a_certificate_has_the_names_of_its_process_for_both_ends(tmp_path: Path) -> None:
    world = made()
    own = certificate(world, "broker-tls")
    names = own.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["pod-0.broker", "pod-1.broker"]
    usages = own.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert {usage.dotted_string for usage in usages} == {"1.3.6.1.5.5.7.3.1", "1.3.6.1.5.5.7.3.2"}
    for file in ("ca.crt", "tls.crt", "tls.key"):
        (tmp_path / file).write_bytes(world["broker-tls"][file])
    context = ssl.create_default_context(cafile=tmp_path / "ca.crt")
    context.load_cert_chain(tmp_path / "tls.crt", tmp_path / "tls.key")


def test_it_is_renewed_in_the_last_third_of_its_time() -> None:
    world = made()
    assert run(world, NOW + 59 * DAY) == set()
    assert run(world, NOW + 61 * DAY) == {"broker-tls", "proxy-tls"}
    assert certificate(world, "proxy-tls").not_valid_after_utc == NOW + 151 * DAY


def test_it_is_made_again_for_another_name_alone() -> None:
    world = made()
    more = {**PLAN.certificates, "proxy-tls": ("proxy", "other")}
    assert run(world, NOW, replace(PLAN, certificates=more)) == {"proxy-tls"}


def test_what_was_lost_is_made_again() -> None:
    world = made()
    del world["proxy-tls"]
    assert run(world, NOW) == {"proxy-tls"}
    assert is_believed(world, "proxy-tls", by=world["broker-tls"])


def test_what_another_authority_has_signed_is_made_again() -> None:
    world = made()
    del world["ca"]
    assert run(world, NOW) == {"ca", "broker-tls", "proxy-tls"}
    assert is_believed(world, "proxy-tls", by=world["broker-tls"])
    assert run(world, NOW) == set()


def test_a_token_is_made_once() -> None:
    world = made()
    token = world["token"]["key"]
    assert len(token) == 43
    run(world, NOW + 4000 * DAY)
    assert world["token"]["key"] == token


def test_everybody_is_told_of_a_new_authority_before_it_signs() -> None:
    """At no run is there a process with the Secret of the run before that believes nobody."""
    world = made()
    old = NOW + 2500 * DAY
    run(world, old)
    assert "next.crt" in world["ca"]
    assert len(issuers(world, "broker-tls")) == 2
    before = dict(world)
    assert run(world, old + TOLD_AFTER / 2) == set()
    run(world, old + TOLD_AFTER)
    assert "next.crt" not in world["ca"]
    for name in PLAN.certificates:
        assert is_believed(world, name, by=before["proxy-tls"])
        assert is_believed(before, name, by=world["proxy-tls"])
    assert run(world, old + DAY) == set()


def test_an_authority_that_has_expired_is_believed_no_more() -> None:
    world = made()
    now = NOW
    while now < NOW + 3700 * DAY:
        run(world, now)
        now += 20 * DAY
    assert "previous.crt" not in world["ca"]
    assert len(issuers(world, "proxy-tls")) == 1


@pytest.mark.parametrize("lost", ["tls.key", "tls.crt"])
def test_half_a_certificate_is_none(lost: str) -> None:
    world = made()
    world["proxy-tls"] = {name: data for name, data in world["proxy-tls"].items() if name != lost}
    assert run(world, NOW) == {"proxy-tls"}


def test_a_lost_authority_is_believed_until_everybody_was_told_of_the_new_one() -> None:
    world = made()
    before = dict(world)
    del world["ca"]
    run(world, NOW + DAY)
    for name in PLAN.certificates:
        assert world[name]["tls.crt"] == before[name]["tls.crt"]
        assert is_believed(world, name, by=world["proxy-tls"])
    # What is lost too is made by the new one, whom those believe who have heard of it.
    run(world, NOW + 2 * DAY)
    for name in PLAN.certificates:
        assert world[name]["tls.crt"] != before[name]["tls.crt"]
        assert is_believed(world, name, by=world["broker-tls"])
        assert is_believed(before, name, by=world[name])
    assert not run(world, NOW + 3 * DAY)


def test_a_secret_that_is_somebody_elses_is_named() -> None:
    """Such as one that cert-manager has made."""
    world: World = {"ca": {"tls.crt": b"", "tls.key": b"", "ca.crt": b""}}
    with pytest.raises(
        ForeignSecret, match=r"the Secret ca holds ca.crt, tls.crt, tls.key and not"
    ):
        run(world, NOW)
