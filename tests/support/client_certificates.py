"""Certificates of clients with names of all kinds, and the authority that signs them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@final
class Authority:
    """A certificate authority with its files in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority")])
        constraints = x509.BasicConstraints(ca=True, path_length=None)
        builder = self._builder(self._name, self._key).add_extension(constraints, critical=True)
        self.certificate = _pem(builder.sign(self._key, hashes.SHA256()))
        (folder / "ca.crt").write_bytes(self.certificate)

    @property
    def file(self) -> str:
        """The file of its certificate."""
        return str(self.folder / "ca.crt")

    def issue(
        self,
        file: str,
        *,
        common_names: Sequence[str] = (),
        uris: Sequence[str] = (),
        dns_names: Sequence[str] = (),
    ) -> tuple[bytes, bytes]:
        """Write the certificate and the key of a client or of the server; return both."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, one) for one in common_names])
        names: list[x509.GeneralName] = [x509.DNSName(one) for one in dns_names]
        names += [x509.UniformResourceIdentifier(one) for one in uris]
        names.append(x509.IPAddress(ip_address("127.0.0.1")))
        builder = self._builder(subject, key)
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        certificate = _pem(builder.sign(self._key, hashes.SHA256()))
        encoded_key = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        (self.folder / f"{file}.crt").write_bytes(certificate)
        (self.folder / f"{file}.key").write_bytes(encoded_key)
        return certificate, encoded_key

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey
    ) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(hours=1))
            .not_valid_after(now + timedelta(days=1))
        )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
