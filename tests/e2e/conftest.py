"""What tests of real processes share: certificates made for one run."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import pytest


class Served(TypedDict):
    """The settings of a listener."""

    tls_certificate_file: str
    tls_key_file: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificates:
    """Files of a server, of a client, and of who signed both."""

    folder: Path

    @property
    def authority(self) -> str:
        return str(self.folder / "ca.crt")

    @property
    def served(self) -> Served:
        """The settings of a listener."""
        return {
            "tls_certificate_file": str(self.folder / "server.crt"),
            "tls_key_file": str(self.folder / "server.key"),
        }

    @property
    def client(self) -> tuple[str, str]:
        """Certificate and key of a client."""
        return str(self.folder / "client.crt"), str(self.folder / "client.key")


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Make certificates for localhost."""
    folder = tmp_path_factory.mktemp("certificates")
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]

    def openssl(*arguments: str) -> None:
        subprocess.run(
            ["openssl", "req", "-x509", *key, *arguments], cwd=folder, check=True,
            capture_output=True,
        )  # fmt: skip

    openssl("-subj", "/CN=authority", "-keyout", "ca.key", "-out", "ca.crt")
    for name in ("server", "client"):
        openssl(
            "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
            "-addext", "basicConstraints=critical,CA:FALSE", "-CA", "ca.crt", "-CAkey", "ca.key",
            "-keyout", f"{name}.key", "-out", f"{name}.crt",
        )  # fmt: skip
    return Certificates(folder=folder)
