"""The command lines of the children of the supervisor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, final

from tidemill.common.addresses import HostPort
from tidemill.standalone.broker_stores import CONTROLLER, group_store_of
from tidemill.standalone.key_file import key_file_of

if TYPE_CHECKING:
    from tidemill.standalone.broker_stores import StandaloneBroker
    from tidemill.standalone.child import Addresses
    from tidemill.standalone.settings import StandaloneSettings

MIN_IN_SYNC: Final = 2  # of the replicas of a broker group; with 1, one disk may hold the only copy


class ChildPorts(NamedTuple):
    """The ports of the children; 0: the child picks a free one."""

    grpc: int  # for clients
    brokers: Mapping[str, int]  # by the name of the broker process
    seeds: Sequence[int]  # of one broker per broker group; it knows the others of its group
    controller: int  # 0: there is no controller
    metrics: Mapping[str, int]  # by the name of the child


@final
class CommandLines:
    """The command line of each child, without `--supervisor-fd`.

    `addresses` are those at which the child served before. A restarted child asks for the same
    ports again.
    """

    def __init__(self, settings: StandaloneSettings, ports: ChildPorts) -> None:
        self._settings = settings
        self._ports = ports
        self._controllers = (
            [f"--controllers=127.0.0.1:{ports.controller}"] if ports.controller else []
        )

    def controller(self, addresses: Addresses) -> list[str]:
        """Return the command line of the controller."""
        return [
            "controller",
            *self._common(CONTROLLER, addresses),
            f"--name={CONTROLLER}",
            f"--group-store={group_store_of(self._settings)}",
            f"--min-in-sync={MIN_IN_SYNC}",
            "--grpc-host=127.0.0.1",
            f"--grpc-port={self._ports.controller}",
            "--grpc-reuse-port",
        ]

    def broker(self, broker: StandaloneBroker, addresses: Addresses) -> list[str]:
        """Return the command line of a broker."""
        return [
            "broker",
            *self._common(broker.name, addresses),
            f"--name={broker.group}",
            f"--data-dir={broker.data_dir}",
            "--grpc-host=127.0.0.1",
            f"--grpc-port={self._ports.brokers[broker.name]}",
            "--grpc-reuse-port",
            _flag("auto-create-topics", is_on=self._settings.auto_create_topics),
            _flag("auto-create-groups", is_on=self._settings.auto_create_groups),
            *self._replica_flags(broker),
        ]

    def _replica_flags(self, broker: StandaloneBroker) -> list[str]:
        if broker.replica < 0:
            return []
        names = f"--replica-name={broker.name}", f"--replica-id={broker.replica}"
        return [*names, *self._controllers]

    def proxy(self, name: str, addresses: Addresses) -> list[str]:
        """Return the command line of a proxy."""
        settings = self._settings
        return [
            "proxy",
            *self._common(name, addresses),
            f"--name={name}",
            *(f"--brokers=127.0.0.1:{port}" for port in self._ports.seeds),
            *self._controllers,
            f"--grpc-host={settings.grpc_host}",
            f"--grpc-port={port_of(addresses.get('grpc'), self._ports.grpc)}",
            "--drain-delay-ms=0",  # No load balancer has to notice the stop first.
            "--reuse-port" if settings.proxies > 1 else "--no-reuse-port",
            f"--message-item-bytes-max={settings.message_item_bytes_max}",
            f"--tls={settings.tls}",
            f"--tls-certificate-file={settings.tls_certificate_file}",
            f"--tls-key-file={settings.tls_key_file}",
            f"--tls-client-ca-file={settings.tls_client_ca_file}",
            *(f"--proxy-protocol-from={network}" for network in settings.proxy_protocol_from),
            *self._security_flags(),
        ]

    def admin(self, addresses: Addresses) -> list[str]:
        """Return the command line of the admin process."""
        settings = self._settings
        return [
            "admin",
            *self._common("admin", addresses),
            *(f"--broker=127.0.0.1:{port}" for port in self._ports.seeds),
            *self._controllers,
            "--drain-delay-ms=0",
            f"--host={settings.admin_host}",
            f"--port={port_of(addresses.get('admin'), settings.admin_port)}",
            *(f"--admin-hosts={host}" for host in settings.admin_hosts),
            f"--message-item-bytes-max={settings.message_item_bytes_max}",
            f"--admin-token-file={settings.admin_token_file}",
            f"--admin-body-bytes-max={settings.admin_body_bytes_max}",
            f"--admin-tls-certificate-file={settings.admin_tls_certificate_file}",
            f"--admin-tls-key-file={settings.admin_tls_key_file}",
            _flag("admin-open", is_on=settings.admin_open),
            _flag("admin-plain", is_on=settings.admin_plain),
            *(f"--admin-forwarded-from={network}" for network in settings.admin_forwarded_from),
            *self._admin_grpc_flags(addresses),
            *self._scaler_flags(addresses),
            *self._security_flags(),
            f"--security-bootstrap-file={settings.security_bootstrap_file}",
            f"--security-bootstrap-policy={settings.security_bootstrap_policy}",
            f"--security-job-users-dir={settings.security_job_users_dir}",
        ]

    def _security_flags(self) -> list[str]:
        settings = self._settings
        return [
            f"--security-key-file={key_file_of(settings)}",
            f"--security-floor={settings.security_floor}",
            f"--oidc-issuer={settings.oidc_issuer}",
            f"--oidc-keys={settings.oidc_keys}",
            f"--oidc-audience={settings.oidc_audience}",
            f"--oidc-ca-file={settings.oidc_ca_file}",
            f"--oidc-token-file={settings.oidc_token_file}",
        ]

    def _admin_grpc_flags(self, addresses: Addresses) -> list[str]:
        port = self._settings.admin_grpc_port
        if port is None:
            return []
        return [f"--admin-grpc-port={port_of(addresses.get('adminGrpc'), port)}"]

    def _scaler_flags(self, addresses: Addresses) -> list[str]:
        settings = self._settings
        if settings.scaler_port is None:
            return []
        return [
            f"--scaler-host={settings.scaler_host}",
            f"--scaler-port={port_of(addresses.get('scaler'), settings.scaler_port)}",
            _flag("scaler-open", is_on=settings.scaler_open),
            f"--scaler-tls-certificate-file={settings.scaler_tls_certificate_file}",
            f"--scaler-tls-key-file={settings.scaler_tls_key_file}",
            f"--scaler-tls-client-ca-file={settings.scaler_tls_client_ca_file}",
        ]

    def _common(self, name: str, addresses: Addresses) -> list[str]:
        settings = self._settings
        flags = [
            f"--cluster={settings.cluster}",
            f"--log-level={settings.log_level}",
            f"--log-format={settings.log_format}",
            f"--metrics-host={settings.metrics_host}",
            *(f"--metrics-hosts={host}" for host in settings.metrics_hosts),
            f"--metrics-token-file={settings.metrics_token_file}",
            f"--metrics-port={port_of(addresses.get('metrics'), self._ports.metrics[name])}",
        ]
        return [*flags, f"--config={settings.config}"] if settings.config else flags


def port_of(address: str | None, default: int) -> int:
    """Return the port in an address like host:port or http://host:port/path."""
    if address is None:
        return default
    host_and_port = address.partition("://")[2] or address
    return HostPort.parse(host_and_port.partition("/")[0]).port


def _flag(name: str, *, is_on: bool) -> str:
    return f"--{name}" if is_on else f"--no-{name}"
