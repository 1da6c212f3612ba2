"""Independent programs check the server: h2spec every rule of HTTP/2, grpcurl common use."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2

from tests.support.clients.client_process import needs
from tests.support.clients.rpc_server import SERVICE, WAIT_S, rpc_server
from tidemill.transport.aio import health as health_service
from tidemill.transport.aio import reflection
from tidemill.transport.aio.health import HealthService

BUILD = Path(__file__).parent / "h2spec" / "build"
H2SPEC, GRPCURL = BUILD / "h2spec", BUILD / "grpcurl"

pytestmark = needs("go", H2SPEC, GRPCURL)


@pytest.mark.parametrize("section", ["generic", "http2", "hpack"])
def test_every_rule_of_the_protocol_is_kept(section: str) -> None:
    with rpc_server() as running:
        ended = subprocess.run(
            [
                H2SPEC,
                section,
                "--strict",
                "-h",
                "127.0.0.1",
                "-p",
                str(running.port),
                "-P",
                f"/{SERVICE}/Echo",
            ],
            capture_output=True,
            text=True,
            check=False,
            timeout=10 * WAIT_S,
        )
    found = re.search(r"(\d+) tests, (\d+) passed, (\d+) skipped, (\d+) failed", ended.stdout)
    assert found is not None, ended.stdout + ended.stderr
    total, passed, skipped, failed = map(int, found.groups())
    assert (skipped, failed) == (0, 0), ended.stdout
    assert passed == total > 5


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    health = HealthService([SERVICE])
    methods = {**health.methods(), **reflection.reflection_methods([health_service.SERVICE])}
    with rpc_server(more_methods=methods) as running:
        yield running.address


def grpcurl(*arguments: str) -> str:
    ended = subprocess.run(
        [GRPCURL, "-plaintext", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_S,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_grpcurl_lists_and_describes_the_services(address: str) -> None:
    assert health_service.SERVICE in grpcurl(address, "list").split()
    assert grpcurl(address, "list", health_service.SERVICE).split() == [
        f"{health_service.SERVICE}.{method.name}"
        for method in health_pb2.DESCRIPTOR.services_by_name["Health"].methods
        if method.name in ("Check", "List", "Watch")
    ]
    assert "rpc Check" in grpcurl(address, "describe", health_service.SERVICE)


def test_grpcurl_calls_a_method_from_reflection(address: str) -> None:
    answer = grpcurl("-d", "{}", address, f"{health_service.SERVICE}/Check")
    assert json.loads(answer) == {"status": "SERVING"}
