"""One port for clients with TLS, as Go and Java use it unless told otherwise, and without."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.client_process import (
    GO_PROGRAM,
    JAVA_CLASSES,
    JAVA_LIBRARIES,
    Facts,
    needs,
    run_go_client,
    run_java_client,
    run_python_client,
)
from tests.support.processes import Standalone, standalone


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """Make a certificate that signs itself, as on a laptop."""
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1",
            "-subj", "/CN=localhost", "-keyout", str(key), "-out", str(certificate),
        ],
        check=True, capture_output=True,
    )  # fmt: skip
    return certificate, key


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = make_certificate(folder)
    with standalone(
        folder / "data",
        "--tls=optional",
        f"--tls-certificate-file={certificate}",
        f"--tls-key-file={key}",
    ) as started:
        yield started


def check_round_trip(facts: Facts) -> None:
    sent = {fact["id"]: fact["sha"] for fact in facts.of("sent")}
    assert sent
    assert {fact["id"]: fact["sha"] for fact in facts.of("received")} == sent


@needs("go", GO_PROGRAM)
def test_a_go_client_with_tls_is_served(tmp_path: Path, running: Standalone) -> None:
    check_round_trip(
        run_go_client(tmp_path, "roundTrip", running.grpc, topic="go", group="go", tls=True)
    )


@needs("java", JAVA_CLASSES, JAVA_LIBRARIES)
def test_a_java_client_with_tls_is_served(tmp_path: Path, running: Standalone) -> None:
    check_round_trip(
        run_java_client(tmp_path, "roundTrip", running.grpc, topic="java", group="java", tls=True)
    )


def test_a_client_without_tls_is_served_on_the_same_port(
    tmp_path: Path, running: Standalone
) -> None:
    check_round_trip(
        run_python_client(tmp_path, "round_trip", running.grpc, topic="plain", group="plain")
    )
