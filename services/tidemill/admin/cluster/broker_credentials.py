"""TLS credentials for connections to brokers and controllers, from files that may be renewed."""

from __future__ import annotations

import functools
from pathlib import Path

import grpc

from tidemill.admin.settings import AdminSettings
from tidemill.common.lifecycle import StartError
from tidemill.transport.aio.tls import (
    ReloadableCredentials,
    TlsFiles,
    client_context,
    cluster_files,
)


def broker_credentials(
    settings: AdminSettings,
) -> ReloadableCredentials[grpc.ChannelCredentials] | None:
    """Return the credentials for a channel, or None without TLS. Raises StartError."""
    files = cluster_files(settings)
    if files is None:
        return None
    return ReloadableCredentials("cluster", files, functools.partial(_read, files), is_server=False)


def _read(files: TlsFiles) -> grpc.ChannelCredentials:
    client_context(files)  # Check the files: gRPC accepts invalid ones and fails when it connects.
    try:
        authorities, key, certificate = [
            Path(file).read_bytes() for file in (files.authorities, files.key, files.certificate)
        ]
    except OSError as error:
        raise StartError(f"cannot read the cluster_tls_* files: {error}") from error
    return grpc.ssl_channel_credentials(authorities, key, certificate)
