"""Secrets of the namespace in which a job runs, read and written through the Kubernetes API."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import httpx

from tidemill.release.kubernetes_api import checked


class SecretChanged(Exception):
    """Somebody else has written a Secret in between: look again."""


class Secrets:
    """The Secrets of one namespace."""

    def __init__(self, client: httpx.Client, namespace: str) -> None:
        self._client = client
        self._path = f"/api/v1/namespaces/{namespace}/secrets"
        self._versions: dict[str, str] = {}

    def find(self, name: str) -> dict[str, bytes] | None:
        """Return the data of a Secret; None where there is none."""
        response = self._client.get(f"{self._path}/{name}")
        if response.status_code == HTTPStatus.NOT_FOUND:
            self._versions.pop(name, None)
            return None
        secret = checked(response).json()
        self._versions[name] = secret["metadata"]["resourceVersion"]
        return {key: base64.b64decode(value) for key, value in secret.get("data", {}).items()}

    def write(self, name: str, data: Mapping[str, bytes], labels: Mapping[str, str]) -> None:
        """Make a Secret, or replace the one that `find` has returned; raises SecretChanged."""
        is_tls = "tls.crt" in data
        metadata: dict[str, Any] = {"name": name, "labels": dict(labels)}
        secret = {
            "apiVersion": "v1",
            "kind": "Secret",
            "type": "kubernetes.io/tls" if is_tls else "Opaque",
            "metadata": metadata,
            "data": {key: base64.b64encode(value).decode() for key, value in data.items()},
        }
        if name in self._versions:
            metadata["resourceVersion"] = self._versions[name]
            response = self._client.put(f"{self._path}/{name}", json=secret)
        else:
            response = self._client.post(self._path, json=secret)
        if response.status_code == HTTPStatus.CONFLICT:
            raise SecretChanged(name)
        checked(response)
