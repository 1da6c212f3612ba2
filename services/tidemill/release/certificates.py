"""The Secrets of a release that the release job makes: certificates, a token, users. Pure.

    authority   ca.crt, ca.key         the current authority, which signs
                next.crt, next.key     the next authority; processes trust it before it signs
                previous.crt           the previous authority; trusted until it expires
    process     tls.crt, tls.key       signed by the authority, for the names of the process
                ca.crt                 all authorities above, which the process trusts
    key file    keys                   the keys that encrypt the secrets of users, the newest first
    administrator   credentials        name and secret of the first user, a line each
    users of jobs   check, roll, ...   the secret of the user of each job

Each run returns the Secrets to write, on most days none. A certificate is renewed when a third of
its lifetime is left, or when it lacks a name. A new authority signs nothing before TRUSTED_AFTER,
because some process may not trust it yet. If the authority is lost, the certificates that it signed
stay valid for this time, and `ca.crt` of the processes still contains it.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tidemill.security.secret_keys import new_key_line, parse_keys

# Kubelet passes a changed Secret on within two minutes, and processes read it within seconds.
TRUSTED_AFTER: Final = timedelta(hours=1)
BACKDATED: Final = timedelta(minutes=5)  # for machines whose clock is behind
KEPT_AT_LEAST: Final = timedelta(days=2)  # The job runs each night: once more before that.
RENEWED_IN_LAST: Final = 3  # renewal when one third of the lifetime is left
SECRET_BYTES: Final = 32  # of tokens and of the secrets of users
KEY_FILE: Final = "keys"  # keys in the data of the Secrets
CREDENTIALS: Final = "credentials"
FIRST_ADMIN: Final = "admin"

Data = Mapping[str, bytes]  # the data of a Secret


class ForeignSecret(Exception):
    """A Secret of the plan has content that this job did not make; the message names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificatePlan:
    """The Secrets of a release."""

    authority: str
    certificates: Mapping[str, tuple[str, ...]]  # DNS names by Secret
    tokens: Mapping[str, str]  # key in the data by Secret; a token never changes
    key_files: Mapping[str, int]  # number of the newest key by Secret
    administrators: Sequence[str]
    job_users: Mapping[str, Sequence[str]]  # names of jobs by Secret
    days: int
    authority_days: int


class _Signer(NamedTuple):
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def secrets_to_write(
    plan: CertificatePlan, existing: Mapping[str, Data], now: datetime
) -> dict[str, dict[str, bytes]]:
    """Return the Secrets to write, with all their data; `existing` has the current Secrets.

    Raises ForeignSecret.
    """
    trusted = b"".join(existing.get(name, {}).get("ca.crt", b"") for name in plan.certificates)
    authority = _update_authority(plan, existing.get(plan.authority, {}), trusted, now)
    changed = {}
    if authority != existing.get(plan.authority):
        changed[plan.authority] = authority
    signer = _signer(authority, "ca")
    authorities = b"".join(
        authority[name] for name in ("ca.crt", "next.crt", "previous.crt") if name in authority
    )
    for name, dns_names in plan.certificates.items():
        known = existing.get(name, {})
        data = dict(known)
        if _is_due(known, dns_names, signer.certificate, authority.get("previous.crt", b""), now):
            lifetime = timedelta(days=plan.days)
            data |= _issue(signer, dns_names, now, lifetime)
        data["ca.crt"] = authorities
        if data != known:
            changed[name] = data
    for name, newest in plan.key_files.items():
        _check_not_lost(name, plan, existing)
        keys = existing.get(name, {}).get(KEY_FILE, b"")
        if newest > _newest_key(keys):
            changed[name] = {**existing.get(name, {}), KEY_FILE: _with_key(name, newest, keys)}
    # The administrators come after the keys: a job that was killed leaves none without keys.
    for name, key, content in _made_once(plan):
        if key not in existing.get(name, {}):
            data = changed.get(name) or dict(existing.get(name, {}))
            changed[name] = {**data, key: content.encode()}
    return changed


def _check_not_lost(name: str, plan: CertificatePlan, existing: Mapping[str, Data]) -> None:
    """Raise ForeignSecret if the keys are missing, and users have secrets under them."""
    made_with_it = [one for one in plan.administrators if CREDENTIALS in existing.get(one, {})]
    if made_with_it and KEY_FILE not in existing.get(name, {}):
        raise ForeignSecret(
            f"the Secret {name} with the keys of users is missing; restore it from your"
            f" copy. If the copy is lost, delete the Secret {made_with_it[0]}, too: then this job"
            " makes new keys and a new administrator, and every user needs a new secret"
        )


def _newest_key(keys: bytes) -> int:
    """Return the largest number of the keys k1, k2 and so on; 0 for an empty file.

    Keys with other ids count as the first one.
    """
    numbers = re.findall(rb"(?m)^\s*k([0-9]{1,6}) ", keys)
    return max(map(int, numbers), default=1 if keys.strip() else 0)


def _with_key(name: str, number: int, keys: bytes) -> bytes:
    """Return a key file with a new first key. Raises ForeignSecret if it is full or malformed."""
    text = new_key_line(f"k{number}") + keys.decode("ascii", errors="replace")
    try:
        parse_keys(text)
    except ValueError as error:
        raise ForeignSecret(
            f"the Secret {name} gets no key k{number}: with it, {error}; edit the Secret, or lower"
            " security.keyRotation"
        ) from None
    return text.encode()


def _made_once(plan: CertificatePlan) -> Iterator[tuple[str, str, str]]:
    """Yield the Secret, the key in its data, and new content of what never changes."""
    for name, key in plan.tokens.items():
        yield name, key, secrets.token_urlsafe(SECRET_BYTES)
    for name in plan.administrators:
        yield name, CREDENTIALS, f"{FIRST_ADMIN}\n{secrets.token_urlsafe(SECRET_BYTES)}\n"
    for name, jobs in plan.job_users.items():
        for job in jobs:
            yield name, job, secrets.token_urlsafe(SECRET_BYTES)


def _update_authority(
    plan: CertificatePlan, known: Data, trusted: bytes, now: datetime
) -> dict[str, bytes]:
    """Return the new data of the authority's Secret; processes trust the authorities `trusted`."""
    data = dict(known)
    lifetime = timedelta(days=plan.authority_days)
    if not data:
        data = _authority("ca", now, lifetime)
        if previous := _not_expired(trusted, now):
            data["previous.crt"] = previous
        return data
    for kind in ("ca", "next") if "next.crt" in data or "next.key" in data else ("ca",):
        if not {f"{kind}.crt", f"{kind}.key"} <= data.keys():
            raise ForeignSecret(
                f"the Secret {plan.authority} has {', '.join(sorted(data))}, but not {kind}.crt and"
                f" {kind}.key, so another tool made it; if nothing needs it, delete it, and this"
                " job creates new certificates"
            )
    if "next.crt" in data:
        following = x509.load_pem_x509_certificate(data["next.crt"])
        if now - following.not_valid_before_utc >= TRUSTED_AFTER:
            data["previous.crt"] = data["ca.crt"]
            data["ca.crt"], data["ca.key"] = data.pop("next.crt"), data.pop("next.key")
    elif _is_old(x509.load_pem_x509_certificate(data["ca.crt"]), now):
        data |= _authority("next", now, lifetime)
    if "previous.crt" in data:
        data["previous.crt"] = _not_expired(data["previous.crt"], now)
        if not data["previous.crt"]:
            del data["previous.crt"]
    return data


def _not_expired(certificates: bytes, now: datetime) -> bytes:
    """Return the certificates that have not expired, without duplicates."""
    if not certificates:
        return b""
    valid = [
        _pem(one)
        for one in x509.load_pem_x509_certificates(certificates)
        if one.not_valid_after_utc > now
    ]
    return b"".join(dict.fromkeys(valid))


def _is_due(
    known: Data,
    dns_names: tuple[str, ...],
    authority: x509.Certificate,
    previous: bytes,
    now: datetime,
) -> bool:
    if "tls.crt" not in known or "tls.key" not in known:
        return True
    certificate = x509.load_pem_x509_certificate(known["tls.crt"])
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return True
    if set(names.get_values_for_type(x509.DNSName)) != set(dns_names):
        return True
    # Not every process trusts a new authority yet, so certificates of a lost authority stay.
    if (
        now - authority.not_valid_before_utc < TRUSTED_AFTER
        and certificate.not_valid_after_utc - now > KEPT_AT_LEAST
        and previous
        and any(_has_issued(one, certificate) for one in x509.load_pem_x509_certificates(previous))
    ):
        return False
    return _is_old(certificate, now) or not _is_signed_by(certificate, authority)


def _has_issued(authority: x509.Certificate, certificate: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (InvalidSignature, ValueError, TypeError):
        return False
    return True


def _is_signed_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    """Return whether the key of `authority` has signed; all authorities have the same name."""
    signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(_public_key(authority))
    try:
        issuer = certificate.extensions.get_extension_for_class(x509.AuthorityKeyIdentifier).value
    except x509.ExtensionNotFound:
        return False
    return issuer.key_identifier == signer.key_identifier


def _public_key(certificate: x509.Certificate) -> ec.EllipticCurvePublicKey:
    key = certificate.public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey), "authorities have elliptic-curve keys"
    return key


def _is_old(certificate: x509.Certificate, now: datetime) -> bool:
    lifetime = certificate.not_valid_after_utc - certificate.not_valid_before_utc
    return certificate.not_valid_after_utc - now <= lifetime / RENEWED_IN_LAST


def _signer(data: Data, name: str) -> _Signer:
    key = serialization.load_pem_private_key(data[f"{name}.key"], password=None)
    assert isinstance(key, ec.EllipticCurvePrivateKey), "authorities have elliptic-curve keys"
    return _Signer(x509.load_pem_x509_certificate(data[f"{name}.crt"]), key)


def _authority(name: str, now: datetime, lifetime: timedelta) -> dict[str, bytes]:
    """Return a new authority under `name`."""
    key = ec.generate_private_key(ec.SECP256R1())
    own = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Tidemill internal authority")])
    usage = x509.KeyUsage(
        key_cert_sign=True,
        crl_sign=True,
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    builder = (
        _builder(own, own, key.public_key(), now, lifetime)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
    )
    return {f"{name}.crt": _pem(builder.sign(key, hashes.SHA256())), f"{name}.key": _key_pem(key)}


def _issue(
    signer: _Signer, dns_names: tuple[str, ...], now: datetime, lifetime: timedelta
) -> dict[str, bytes]:
    """Return a certificate for these names, for both ends of a connection, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    # Clients ignore the common name, because the certificate has alternative names.
    own = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Tidemill")])
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    authority_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(
        _public_key(signer.certificate)
    )
    builder = (
        _builder(own, signer.certificate.subject, key.public_key(), now, lifetime)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(authority_key, critical=False)
        .add_extension(
            x509.SubjectAlternativeName([x509.DNSName(name) for name in dns_names]), critical=False
        )
    )
    return {"tls.crt": _pem(builder.sign(signer.key, hashes.SHA256())), "tls.key": _key_pem(key)}


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    now: datetime,
    lifetime: timedelta,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(now + lifetime)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
