"""Secrets of the namespace in which a job runs."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from http import HTTPStatus
from typing import Final

from kubernetes.client import ApiClient, ApiException, CoreV1Api, V1ObjectMeta, V1Secret

TIMEOUT_S: Final = 10.0  # of one call; the API server answers in milliseconds


class SecretChanged(Exception):
    """Another writer has changed a Secret since it was read; read it again."""


class Secrets:
    """The Secrets of one namespace."""

    def __init__(self, client: ApiClient, namespace: str) -> None:
        self._api = CoreV1Api(client)
        self._namespace = namespace
        self._versions: dict[str, str | None] = {}

    def find(self, name: str) -> dict[str, bytes] | None:
        """Return the data of a Secret; None: it does not exist. Raises ApiException."""
        try:
            secret = self._api.read_namespaced_secret(
                name, self._namespace, _request_timeout=TIMEOUT_S
            )
        except ApiException as error:
            if error.status != HTTPStatus.NOT_FOUND:
                raise
            self._versions.pop(name, None)
            return None
        assert secret.metadata is not None, "each stored object has metadata"
        self._versions[name] = secret.metadata.resource_version
        return {key: base64.b64decode(value) for key, value in (secret.data or {}).items()}

    def write(self, name: str, data: Mapping[str, bytes], labels: Mapping[str, str]) -> None:
        """Create a Secret, or replace the one that `find` returned.

        Raises SecretChanged, ApiException.
        """
        secret = V1Secret(
            type="kubernetes.io/tls" if "tls.crt" in data else "Opaque",
            metadata=V1ObjectMeta(
                name=name, labels=dict(labels), resource_version=self._versions.get(name)
            ),
            data={key: base64.b64encode(value).decode() for key, value in data.items()},
        )
        try:
            if name in self._versions:
                self._api.replace_namespaced_secret(
                    name, self._namespace, secret, _request_timeout=TIMEOUT_S
                )
            else:
                self._api.create_namespaced_secret(
                    self._namespace, secret, _request_timeout=TIMEOUT_S
                )
        except ApiException as error:
            if error.status == HTTPStatus.CONFLICT:
                raise SecretChanged(name) from error
            raise
