"""Secrets through the Kubernetes API: what is asked, and that nobody's change is overwritten."""

from __future__ import annotations

import base64
import json
from http import HTTPStatus
from typing import Any

import httpx
import pytest

from tidemill.release.kubernetes_secrets import SecretChanged, Secrets


class ApiServer:
    """The Secrets of one namespace, each with a version."""

    def __init__(self) -> None:
        self.secrets: dict[str, dict[str, Any]] = {}
        self._version = 0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        name = request.url.path.removeprefix("/api/v1/namespaces/ns/secrets").lstrip("/")
        if request.method == "GET":
            found = self.secrets.get(name)
            return httpx.Response(200, json=found) if found else httpx.Response(404)
        secret = json.loads(request.content)
        metadata = secret["metadata"]
        known = self.secrets.get(metadata["name"])
        version = known["metadata"]["resourceVersion"] if known else None
        if metadata.get("resourceVersion") != version:
            return httpx.Response(HTTPStatus.CONFLICT)
        if metadata["name"] == "forbidden":
            return httpx.Response(403, text="secrets is forbidden")
        self._version += 1
        metadata["resourceVersion"] = str(self._version)
        self.secrets[metadata["name"]] = secret
        return httpx.Response(201, json=secret)

    def client(self) -> Secrets:
        transport = httpx.MockTransport(self)
        return Secrets(httpx.Client(base_url="https://api", transport=transport), "ns")


def test_what_was_written_is_found() -> None:
    server = ApiServer()
    assert server.client().find("a") is None
    server.client().write("a", {"k": b"\x00v"}, {"l": "m"})
    assert server.client().find("a") == {"k": b"\x00v"}
    assert server.secrets["a"]["type"] == "Opaque"
    assert server.secrets["a"]["metadata"]["labels"] == {"l": "m"}


def test_a_certificate_is_a_secret_of_type_tls() -> None:
    server = ApiServer()
    server.client().write("t", {"tls.crt": b"c", "tls.key": b"k"}, {})
    assert server.secrets["t"]["type"] == "kubernetes.io/tls"
    assert base64.b64decode(server.secrets["t"]["data"]["tls.key"]) == b"k"


def test_what_others_have_written_meanwhile_stays() -> None:
    server = ApiServer()
    ours, theirs = server.client(), server.client()
    assert ours.find("a") is None
    theirs.write("a", {"k": b"theirs"}, {})
    with pytest.raises(SecretChanged):
        ours.write("a", {"k": b"ours"}, {})
    assert ours.find("a") == {"k": b"theirs"}
    ours.write("a", {"k": b"ours"}, {})
    assert theirs.find("a") == {"k": b"ours"}


def test_a_right_that_is_missing_is_named() -> None:
    with pytest.raises(httpx.HTTPStatusError, match="403 secrets is forbidden"):
        ApiServer().client().write("forbidden", {"k": b""}, {})
