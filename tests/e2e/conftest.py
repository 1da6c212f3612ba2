"""Fixtures of tests with real processes: a standalone of each worker, and certificates."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import pytest

from tests.support.processes.processes import Standalone, standalone


class ListenerFiles(TypedDict):
    """The TLS settings of a listener."""

    tls_certificate_file: str
    tls_key_file: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificates:
    """Files of a server, of a client, and of the authority that signed both."""

    folder: Path

    @property
    def authority(self) -> str:
        return str(self.folder / "ca.crt")

    @property
    def served(self) -> ListenerFiles:
        """The TLS settings of a listener."""
        return {
            "tls_certificate_file": str(self.folder / "server.crt"),
            "tls_key_file": str(self.folder / "server.key"),
        }

    @property
    def client(self) -> tuple[str, str]:
        """Certificate and key of a client."""
        return str(self.folder / "client.crt"), str(self.folder / "client.key")


@pytest.fixture(scope="session")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    """Run a standalone for all files of a worker that need no options.

    A file names its topics and groups so that no other file uses them (checked by
    `tests/unit/tools/test_shared_names.py`), and leaves all processes
    alive. A file that needs more defines a fixture of the same name.
    """
    with standalone(tmp_path_factory.mktemp("shared") / "data") as started:
        yield started


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Make certificates for localhost."""
    folder = tmp_path_factory.mktemp("certificates")
    make_certificate(folder, "ca", is_authority=True)
    for name in ("server", "client"):
        make_certificate(folder, name)
    return Certificates(folder=folder)


def make_certificate(folder: Path, name: str, *, days: int = 2, is_authority: bool = False) -> None:
    """Make the files of a certificate for localhost, or of an authority; `ca` signs the others."""
    arguments = ["-subj", f"/CN={name}"]
    if not is_authority:
        arguments = [
            "-subj",
            "/CN=localhost",
            "-addext",
            "subjectAltName=DNS:localhost,IP:127.0.0.1",
            "-addext",
            "basicConstraints=critical,CA:FALSE",
            "-CA",
            "ca.crt",
            "-CAkey",
            "ca.key",
        ]
    subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-days",
            str(days),
            *arguments,
            "-keyout",
            f"{name}.key",
            "-out",
            f"{name}.crt",
        ],
        cwd=folder,
        check=True,
        capture_output=True,
    )
