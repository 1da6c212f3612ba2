"""Release jobs read and write Secrets, and do not overwrite the changes of others."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from http import HTTPStatus

import pytest
from kubernetes.client import ApiException

from tests.support.worlds.memory_kubernetes import MemoryKubernetes
from tidemill.common.kubernetes_access import open_client
from tidemill.release.kubernetes_secrets import SecretChanged, Secrets

SECRETS = "/api/v1/namespaces/messages/secrets"


@pytest.fixture
def server() -> Iterator[MemoryKubernetes]:
    with MemoryKubernetes().serving() as server:
        yield server


def secrets_of(server: MemoryKubernetes) -> Secrets:
    return Secrets(open_client(server.access()), "messages")


def test_find_returns_the_written_data(server: MemoryKubernetes) -> None:
    secrets = secrets_of(server)
    assert secrets.find("a") is None
    secrets.write("a", {"k": b"\x00v"}, {"l": "m"})
    assert secrets_of(server).find("a") == {"k": b"\x00v"}
    stored = server.objects[f"{SECRETS}/a"]
    assert stored["type"] == "Opaque"
    assert stored["metadata"]["labels"] == {"l": "m"}


def test_a_certificate_becomes_a_secret_of_type_tls(server: MemoryKubernetes) -> None:
    secrets_of(server).write("t", {"tls.crt": b"c", "tls.key": b"k"}, {})
    stored = server.objects[f"{SECRETS}/t"]
    assert stored["type"] == "kubernetes.io/tls"
    assert base64.b64decode(stored["data"]["tls.key"]) == b"k"


def test_a_write_fails_after_a_change_of_another_writer(server: MemoryKubernetes) -> None:
    ours, theirs = secrets_of(server), secrets_of(server)
    assert ours.find("a") is None
    theirs.write("a", {"k": b"theirs"}, {})
    with pytest.raises(SecretChanged):
        ours.write("a", {"k": b"ours"}, {})
    assert ours.find("a") == {"k": b"theirs"}
    ours.write("a", {"k": b"ours"}, {})
    assert theirs.find("a") == {"k": b"ours"}


def test_an_error_contains_the_text_of_the_server(server: MemoryKubernetes) -> None:
    server.failure = HTTPStatus.FORBIDDEN
    with pytest.raises(ApiException, match=r"403(.|\n)*as the test wants it"):
        secrets_of(server).write("a", {"k": b""}, {})
