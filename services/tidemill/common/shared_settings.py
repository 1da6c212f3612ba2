"""Settings that several processes share: TLS between processes, clients' TLS, access to admin."""

from __future__ import annotations

from typing import ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from tidemill.common.addresses import is_loopback
from tidemill.common.feature_level import FEATURE_LEVEL
from tidemill.common.item_bytes import DELIVERY_BYTES, ITEM_BYTES_MAX, ITEM_BYTES_MAX_OF_ALL
from tidemill.common.setting_types import Flag, Names, Networks, Port
from tidemill.common.settings import ProcessSettings


class FrontSettings(ProcessSettings):
    """Settings of the connections of clients; the standalone passes them to its proxies."""

    panels: ClassVar[dict[str, str]] = {"": "Connections of clients"}

    tls: Literal["off", "optional", "required"] = Field(
        "off",
        description="TLS for clients; optional: the port accepts clients with and without TLS.",
    )
    tls_certificate_file: str = Field("", description="Certificate chain of the server (PEM).")
    tls_key_file: str = Field("", description="Private key of the server (PEM).")
    tls_client_ca_file: str = Field(
        "",
        description="Certificate authorities (PEM). If set, clients must present a certificate that"
        " one of them signed.",
    )

    proxy_protocol_from: Networks = Field(
        [],
        description="Addresses or networks of load balancers. They must begin each connection with"
        " a PROXY protocol 2 header; its client address counts.",
    )

    @model_validator(mode="after")
    def check_tls(self) -> Self:
        """Reject TLS without its files, and files without TLS."""
        files = self.tls_certificate_file or self.tls_key_file or self.tls_client_ca_file
        if self.tls == "off" and files:
            raise ValueError("TLS files are set and tls is off; set tls to optional or required")
        if self.tls == "optional" and self.tls_client_ca_file:
            raise ValueError(
                "tls_client_ca_file has no effect while tls is optional; set tls to required"
            )
        if self.tls != "off" and not (self.tls_certificate_file and self.tls_key_file):
            raise ValueError("TLS needs both tls_certificate_file and tls_key_file")
        return self


class MessageSettings(ProcessSettings):
    """Settings of the messages that are accepted; the standalone passes them on."""

    panels: ClassVar[dict[str, str]] = {"message_": "Limits"}

    message_item_bytes_max: int = Field(
        ITEM_BYTES_MAX,
        ge=1 << 16,
        le=ITEM_BYTES_MAX_OF_ALL,
        description="Largest message that a send may bring, in bytes as a client receives it:"
        f" body, properties, and {DELIVERY_BYTES} bytes for handle and names. The default is the"
        " most that Node.js, C# and Rust clients receive. Without such consumers,"
        f" {ITEM_BYTES_MAX_OF_ALL} allows bodies of 4 MiB.",
    )


class AdminFrontSettings(ProcessSettings):
    """Settings of access to the admin process; the standalone passes them on."""

    panels: ClassVar[dict[str, str]] = {
        "admin_": "REST API",
        "scaler_": "Scaler for KEDA",
        "security_": "Users and rights",
    }

    admin_hosts: Names = Field(
        [],
        description="Host names of the REST API besides loopback names, its host and the address of"
        " the connection. Requests for other names get 421.",
    )
    admin_token_file: str = Field(
        "",
        description="File with the bearer token of the REST API; read again when it changes. No"
        " other user of the machine may read it. Default: no token.",
    )
    admin_body_bytes_max: int = Field(
        8 << 20,
        ge=1 << 10,
        le=1 << 30,
        description="Maximum request with a message at the REST API in bytes; a larger one gets"
        " 413. The largest message takes 6 MiB as base64. Other requests: 64 KiB.",
    )
    admin_tls_certificate_file: str = Field(
        "", description="Certificate chain of the REST API (PEM). Default: no TLS."
    )
    admin_tls_key_file: str = Field("", description="Private key of the REST API (PEM).")
    admin_open: Flag = Field(
        False,
        description="Start the REST API on an address that other machines reach without"
        " credentials: without admin_token_file, and with a security_floor below on.",
    )
    admin_plain: Flag = Field(
        False, description="Start the REST API on an address that other machines reach without TLS."
    )
    admin_forwarded_from: Networks = Field(
        [],
        description="Addresses or networks of load balancers of the REST API. In their requests,"
        " the caller is the rightmost other address in the header X-Forwarded-For.",
    )

    admin_grpc_port: Port | None = Field(
        None,
        description="Port of the gRPC service Admin, with the address, TLS and credentials of the"
        " REST API; 0: a free port. Default: the service is not served.",
    )

    scaler_host: str = Field("127.0.0.1", description="Address of the external scaler for KEDA.")
    scaler_port: Port | None = Field(
        None,
        description="Port of the external scaler (gRPC); 0: a free port. Default: no scaler. Its"
        " clients can read the backlog of consumer groups.",
    )
    scaler_open: Flag = Field(
        False,
        description="Start the scaler on an address that other machines reach without"
        " scaler_tls_client_ca_file: they read the backlog of consumer groups.",
    )
    scaler_tls_certificate_file: str = Field(
        "", description="Certificate chain of the scaler (PEM). Default: no TLS."
    )
    scaler_tls_key_file: str = Field("", description="Private key of the scaler (PEM).")
    scaler_tls_client_ca_file: str = Field(
        "",
        description="Certificate authorities (PEM). If set, KEDA must present a certificate that"
        " one of them signed. Do not use those of the processes, whose certificates open brokers.",
    )

    security_bootstrap_file: str = Field(
        "",
        description="File with two lines, the name and the secret of the first super user. No other"
        " user of the machine may read it. Default: none.",
    )
    security_bootstrap_policy: Literal["once", "always"] = Field(
        "once",
        description="once: create the user of security_bootstrap_file if the cluster has no super"
        " user. always: set its secret, its type and its enabled flag, and delete its ban and its"
        " certificates at each start, against a lock-out.",
    )
    security_job_users_dir: str = Field(
        "",
        description="Folder with one secret per release job, in the files check, provision, roll,"
        " volumes and trial. The admin process keeps the users of these jobs up to date. No other"
        " user of the machine may read the files. Default: none.",
    )

    @model_validator(mode="after")
    def check_admin_tls(self) -> Self:
        """Reject one of the files without the other."""
        if bool(self.admin_tls_certificate_file) != bool(self.admin_tls_key_file):
            raise ValueError(
                "TLS of the REST API needs both admin_tls_certificate_file and admin_tls_key_file"
            )
        return self

    def check_door(self, name: str, host: str, *, floor: str) -> None:
        """Refuse a door of the REST API that is open to other machines. Raises ValueError."""
        if is_loopback(host):
            return
        if not (self.admin_token_file or floor == "on" or self.admin_open):
            raise ValueError(
                f"{name} {host} is not a loopback address and the REST API needs no credentials;"
                " set admin_token_file or security_floor=on, or set admin_open in a network without"
                " other machines"
            )
        if not (self.admin_tls_certificate_file or self.admin_plain):
            raise ValueError(
                f"{name} {host} is not a loopback address and the REST API has no TLS; set"
                " admin_tls_certificate_file and admin_tls_key_file, or set admin_plain if TLS ends"
                " before it, or in a network without other machines"
            )

    @model_validator(mode="after")
    def check_scaler_tls(self) -> Self:
        """Reject one of the files without the other, and a scaler that is open unasked."""
        has_both = bool(self.scaler_tls_certificate_file and self.scaler_tls_key_file)
        files = (
            self.scaler_tls_certificate_file,
            self.scaler_tls_key_file,
            self.scaler_tls_client_ca_file,
        )
        if any(files) and not has_both:
            raise ValueError(
                "TLS of the scaler needs both scaler_tls_certificate_file and scaler_tls_key_file"
            )
        is_open = not (is_loopback(self.scaler_host) or self.scaler_tls_client_ca_file)
        if self.scaler_port is not None and is_open and not self.scaler_open:
            raise ValueError(
                f"scaler_host {self.scaler_host} is not a loopback address and the scaler needs no"
                " client certificate; set scaler_tls_client_ca_file, or set scaler_open in a"
                " network whose policies admit only KEDA"
            )
        return self


class SecuritySettings(ProcessSettings):
    """Users and rights, in the processes that check them: proxies and admin."""

    panels: ClassVar[dict[str, str]] = {
        "security_": "Users and rights",
        "oidc_": "Users and rights",
    }

    security_key_file: str = Field(
        "",
        description="File with the keys of the users' secrets, one line `KEYID HEX64` each; the"
        " first one encrypts. It is read again when it changes. No other user of the machine may"
        " read it. Without it, no signature is verified and no secret is made. The standalone makes"
        " `security.key` in data_dir.",
    )
    security_floor: Literal["off", "permissive", "on"] = Field(
        "off",
        description="The least mode of this process, whatever `tidemill security` sets. off: calls"
        " need no credentials; permissive: refusals are counted, and the calls pass; on: a call"
        " needs a user with the right.",
    )
    oidc_issuer: str = Field(
        "",
        max_length=2_048,
        description="Issuer of the tokens of Kubernetes service accounts, as their claim `iss` has"
        " it: `kubectl get --raw /.well-known/openid-configuration`. Default: none; session tokens"
        " of clients are then ignored.",
    )
    oidc_keys: str = Field(
        "",
        max_length=2_048,
        description="Keys of the issuer (a JSON Web Key Set): a URL that begins with https://, or"
        " a file. They are read at the start, every ten minutes, and at most every ten seconds for"
        " tokens with unknown keys.",
    )
    oidc_audience: str = Field(
        "tidemill",
        min_length=1,
        max_length=256,
        description="Audience that the tokens of Kubernetes service accounts must have.",
    )
    oidc_ca_file: str = Field(
        "",
        description="Certificate authorities (PEM) of the server of oidc_keys. Default: those of"
        " the system.",
    )
    oidc_token_file: str = Field(
        "",
        description="File with a bearer token for the server of oidc_keys; read each time. Default:"
        " none.",
    )

    @model_validator(mode="after")
    def check_oidc(self) -> Self:
        """Reject an issuer without keys, keys without an issuer, and keys over plain HTTP."""
        if bool(self.oidc_issuer) != bool(self.oidc_keys):
            raise ValueError("Kubernetes tokens need both oidc_issuer and oidc_keys")
        scheme, separator, _ = self.oidc_keys.partition("://")
        if separator and scheme != "https":
            raise ValueError(
                f"oidc_keys {self.oidc_keys} is not a file and does not begin with https://;"
                " over another protocol, the network could replace the keys"
            )
        if separator and not _is_https_address(self.oidc_keys):
            raise ValueError(f"oidc_keys {self.oidc_keys} is not https://HOST[:PORT]/PATH")
        if not separator and (self.oidc_ca_file or self.oidc_token_file):
            raise ValueError(
                "oidc_ca_file and oidc_token_file have no effect, because oidc_keys is not a URL"
            )
        return self


def _is_https_address(url: str) -> bool:
    """Whether a URL has a host, no user, no fragment, and printable ASCII characters alone."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # Raises ValueError if it is not a number.
    except ValueError:
        return False
    is_plain = url.isascii() and url.isprintable() and " " not in url
    return bool(parts.hostname) and is_plain and "@" not in parts.netloc and not parts.fragment


class FeatureLevelSettings(ProcessSettings):
    """The cap of the feature level, in brokers and controllers."""

    panels: ClassVar[dict[str, str]] = {"feature_level_max": "Upgrades"}

    feature_level_max: int = Field(
        0,
        ge=0,
        le=FEATURE_LEVEL,
        description="Highest feature level of records in the log. Set it to the level of the former"
        " version before an upgrade that you may take back; the level never falls. 0: no cap. A"
        " broker with replicas follows the cap of its controllers.",
    )


class ClusterTlsSettings(ProcessSettings):
    """TLS between the processes: three files in each process."""

    panels: ClassVar[dict[str, str]] = {"": "TLS between processes"}

    cluster_tls_ca_file: str = Field(
        "",
        description="Certificate authorities (PEM) that signed the certificates of the processes of"
        " this cluster. For TLS between the processes, set this file and the next two in all.",
    )
    cluster_tls_certificate_file: str = Field(
        "",
        description="Certificate chain of this process (PEM), for both ends of a connection. That"
        " of a broker must contain the address at which other processes reach it.",
    )
    cluster_tls_key_file: str = Field("", description="Private key of this process (PEM).")

    @model_validator(mode="after")
    def check_cluster_tls(self) -> Self:
        """Reject some of the files without the others."""
        files = (
            self.cluster_tls_ca_file,
            self.cluster_tls_certificate_file,
            self.cluster_tls_key_file,
        )
        if any(files) and not all(files):
            raise ValueError(
                "TLS between the processes needs cluster_tls_ca_file, cluster_tls_certificate_file"
                " and cluster_tls_key_file"
            )
        return self
