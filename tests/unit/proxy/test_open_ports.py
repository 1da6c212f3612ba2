"""A proxy warns of a port that other machines reach without credentials or without TLS."""

from __future__ import annotations

from typing import Literal

import pytest
from structlog.testing import capture_logs

from tidemill.proxy.app import has_open_port, security_state_of, warn_of_open_port
from tidemill.proxy.settings import ProxySettings
from tidemill.security.secret_uses import SecretUses
from tidemill.security.table import Mode

Tls = Literal["off", "optional", "required"]
OPEN = "every host that reaches this port can read and send all messages"
PLAIN = "credentials and messages cross the network without TLS"


@pytest.mark.parametrize(
    ("host", "tls", "mode", "warnings"),
    [
        ("127.0.0.1", "off", Mode.OFF, []),
        ("127.0.0.1", "off", Mode.ON, []),
        ("0.0.0.0", "off", Mode.OFF, [OPEN]),
        ("0.0.0.0", "required", Mode.OFF, [OPEN]),
        ("0.0.0.0", "off", Mode.PERMISSIVE, [OPEN]),
        ("0.0.0.0", "off", Mode.ON, [PLAIN]),
        ("0.0.0.0", "optional", Mode.ON, [PLAIN]),
        ("0.0.0.0", "required", Mode.ON, []),
    ],
)
def test_a_port_is_warned_of(host: str, tls: Tls, mode: Mode, warnings: list[str]) -> None:
    settings = ProxySettings.model_construct(grpc_host=host, grpc_port=8081, tls=tls)
    with capture_logs() as logs:
        warn_of_open_port(settings, mode)
    assert [(line["event"], line["log_level"], line["port"]) for line in logs] == [
        (event, "warning", "0.0.0.0:8081") for event in warnings
    ]


@pytest.mark.parametrize(
    ("host", "tls", "is_open"),
    [
        ("127.0.0.1", "off", False),
        ("0.0.0.0", "off", True),
        ("0.0.0.0", "optional", True),
        ("0.0.0.0", "required", False),
    ],
)
def test_an_open_port_is_reported_to_operators(host: str, tls: Tls, is_open: bool) -> None:
    settings = ProxySettings.model_construct(grpc_host=host, grpc_port=8081, tls=tls)
    uses = SecretUses(lambda: 0.0, lambda: 0)
    state = security_state_of(
        1, Mode.ON, None, uses, has_open_port=has_open_port(settings), user_id=0
    )
    assert state.has_open_port is is_open
