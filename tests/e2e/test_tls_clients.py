"""One port for clients with TLS, as Go and Java use it unless told otherwise, and without."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import Certificates
from tests.support.clients.client_process import (
    GO_PROGRAM,
    JAVA_CLASSES,
    JAVA_LIBRARIES,
    NODE_PACKAGES,
    Facts,
    needs,
    run_go_client,
    run_java_client,
    run_node_client,
    run_python_client,
)
from tests.support.processes.processes import LARGEST_MESSAGES, Standalone, standalone


@pytest.fixture(scope="module")
def running(
    tmp_path_factory: pytest.TempPathFactory, certificates: Certificates
) -> Iterator[Standalone]:
    served = [f"--{name.replace('_', '-')}={file}" for name, file in certificates.served.items()]
    data_dir = tmp_path_factory.mktemp("tls") / "data"
    with standalone(data_dir, "--tls=optional", LARGEST_MESSAGES, *served) as started:
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


@needs("node", NODE_PACKAGES)
def test_a_node_client_with_tls_is_served(
    tmp_path: Path, running: Standalone, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The client has no option for an authority. Its gRPC library trusts those of this file.
    monkeypatch.setenv("GRPC_DEFAULT_SSL_ROOTS_FILE_PATH", certificates.authority)
    check_round_trip(
        run_node_client(tmp_path, "roundTrip", running.grpc, topic="node", group="node", tls=True)
    )


def test_a_python_client_with_tls_is_served(
    tmp_path: Path, running: Standalone, certificates: Certificates
) -> None:
    names = {"topic": "python", "group": "python", "authority": certificates.authority}
    check_round_trip(run_python_client(tmp_path, "tls_round_trip", running.grpc, **names))


def test_a_client_without_tls_is_served_on_the_same_port(
    tmp_path: Path, running: Standalone
) -> None:
    check_round_trip(
        run_python_client(tmp_path, "round_trip", running.grpc, topic="plain", group="plain")
    )
