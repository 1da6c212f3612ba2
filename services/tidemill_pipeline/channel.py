"""gRPC channels to proxies and the credentials of their calls."""

from __future__ import annotations

import hashlib
import hmac
from datetime import UTC, datetime
from pathlib import Path

import grpc

from tidemill_pipeline.errors import BadOption
from tidemill_pipeline.options import ConnectionOptions


class Credentials:
    """Credentials of calls, from files. The secrets stay in this process."""

    def __init__(self, connection: ConnectionOptions) -> None:
        self._connection = connection

    def headers(self) -> list[tuple[str, str]]:
        """Return the headers of a call. Each call reads the files, since they may be renewed."""
        headers = []
        if self._connection.access_key:
            now = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
            path = self._connection.secret_key_file
            secret = _read("auth.secretKeyFile", path).decode().strip()
            signature = hmac.new(secret.encode(), now.encode(), hashlib.sha1).hexdigest()
            proof = (
                f"MQv2-HMAC-SHA1 Credential={self._connection.access_key},"
                f" SignedHeaders=x-mq-date-time, Signature={signature}"
            )
            headers += [("x-mq-date-time", now), ("authorization", proof)]
        if self._connection.token_file:
            token = _read("auth.tokenFile", self._connection.token_file).decode().strip()
            headers.append(("x-mq-session-token", token))
        return headers


def open_channel(connection: ConnectionOptions, endpoint: str) -> grpc.Channel:
    """Open a channel to one proxy. Raises BadOption for a file that cannot be read."""
    options = (
        # No limit: a body has up to 4 MiB, a page of events more.
        ("grpc.max_receive_message_length", -1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        # A replaced proxy may have another address, which gRPC asks for every 30 s by default.
        ("grpc.dns_min_time_between_resolutions_ms", 500),
        ("grpc.use_local_subchannel_pool", 1),
    )
    if not connection.is_tls:
        return grpc.insecure_channel(endpoint, options=options)
    certificates = {
        name: _read(option, path) if path else None
        for name, option, path in (
            ("root_certificates", "tls.caFile", connection.ca_file),
            ("certificate_chain", "tls.certificateFile", connection.certificate_file),
            ("private_key", "tls.keyFile", connection.key_file),
        )
    }
    return grpc.secure_channel(
        endpoint, grpc.ssl_channel_credentials(**certificates), options=options
    )


def _read(option: str, path: str) -> bytes:
    """Return the content of the file that an option names. Raises BadOption."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        why = f"cannot read the file: {error.strerror}"
        raise BadOption(f"option {option} = {path}: {why}") from error
