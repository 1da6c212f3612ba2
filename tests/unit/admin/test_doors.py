"""Addresses that other machines reach: flags of open doors, and callers behind balancers."""

from __future__ import annotations

import json

import pytest
from structlog.testing import capture_logs

from tests.unit.admin.test_rights import Door
from tidemill.admin.http.access import AccessControl
from tidemill.admin.http.forwarded import HOPS_MAX, find_caller, parse_networks
from tidemill.admin.process import warn_about_open_doors
from tidemill.admin.settings import AdminSettings
from tidemill.security.acl import parse_entry
from tidemill.standalone.settings import StandaloneSettings

TLS = ["--admin-tls-certificate-file=a", "--admin-tls-key-file=b"]
TOKEN = ["--admin-token-file=token"]
BALANCERS = parse_networks(["10.0.0.0/24", "fd00::/64"])


# ---------------------------------------------------------------- start


@pytest.mark.parametrize(
    ("flags", "missing"),
    [
        (["--host=127.0.0.1"], ""),
        (["--host=::1"], ""),
        (["--host=localhost"], ""),
        (["--host=0.0.0.0"], "admin_open"),
        (["--host=::"], "admin_open"),
        (["--host=10.1.2.3", *TLS], "admin_open"),
        (["--host=admin.example", *TLS, "--security-floor=permissive"], "admin_open"),
        (["--host=0.0.0.0", *TLS, "--security-floor=on"], ""),
        (["--host=0.0.0.0", *TLS, *TOKEN], ""),
        (["--host=0.0.0.0", *TLS, "--admin-open"], ""),
        (["--host=0.0.0.0", *TOKEN], "admin_plain"),
        (["--host=0.0.0.0", "--admin-open"], "admin_plain"),
        (["--host=0.0.0.0", "--admin-plain"], "admin_open"),
        (["--host=0.0.0.0", *TOKEN, "--admin-plain"], ""),
        (["--host=0.0.0.0", "--admin-open", "--admin-plain"], ""),
    ],
)
def test_an_open_door_needs_its_flag(
    flags: list[str], missing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    of_standalone = [flag.replace("--host", "--admin-host") for flag in flags]
    for settings, given in ((AdminSettings, flags), (StandaloneSettings, of_standalone)):
        if not missing:
            settings.load(given)
            continue
        with pytest.raises(SystemExit) as caught:
            settings.load(given)
        assert caught.value.code == 2
        assert f"set {missing}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "is_refused"),
    [
        ([], False),
        (["--scaler-port=0"], False),
        (["--scaler-host=0.0.0.0"], False),
        (["--scaler-host=0.0.0.0", "--scaler-port=0"], True),
        (["--scaler-host=0.0.0.0", "--scaler-port=0", "--scaler-open"], False),
        (
            [
                "--scaler-host=0.0.0.0",
                "--scaler-port=0",
                "--scaler-tls-certificate-file=a",
                "--scaler-tls-key-file=b",
                "--scaler-tls-client-ca-file=c",
            ],
            False,
        ),
        (
            [
                "--scaler-host=0.0.0.0",
                "--scaler-port=0",
                "--scaler-tls-certificate-file=a",
                "--scaler-tls-key-file=b",
            ],
            True,
        ),
    ],
)
def test_an_open_scaler_needs_its_flag(
    flags: list[str], is_refused: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    for settings in (AdminSettings, StandaloneSettings):
        if not is_refused:
            settings.load(flags)
            continue
        with pytest.raises(SystemExit):
            settings.load(flags)
        assert "set scaler_open" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "count"),
    [
        ([], 0),
        (["--host=0.0.0.0", "--admin-open", "--admin-plain"], 2),
        (["--host=0.0.0.0", *TOKEN, "--admin-plain"], 1),
        (["--host=0.0.0.0", *TLS, "--admin-open"], 1),
        (["--host=0.0.0.0", *TLS, *TOKEN, "--admin-open", "--admin-plain"], 0),
    ],
)
def test_a_start_logs_its_open_doors(flags: list[str], count: int) -> None:
    with capture_logs() as lines:
        warn_about_open_doors(AdminSettings.load(flags), "http://0.0.0.0:8080")
    assert [line["log_level"] for line in lines] == ["warning"] * count


# ---------------------------------------------------------------- callers behind balancers


@pytest.mark.parametrize(
    ("connected", "header", "caller"),
    [
        ("203.0.113.5", "1.2.3.4", "203.0.113.5"),
        ("10.0.0.7", "", "10.0.0.7"),
        ("10.0.0.7", "1.2.3.4", "1.2.3.4"),
        ("10.0.0.7", "6.6.6.6, 1.2.3.4", "1.2.3.4"),
        ("10.0.0.7", "6.6.6.6, 1.2.3.4, 10.0.0.8", "1.2.3.4"),
        ("10.0.0.7", "10.0.0.9, 10.0.0.8", "10.0.0.9"),
        ("10.0.0.7", "1.2.3.4, x", "10.0.0.7"),
        ("10.0.0.7", "1.2.3.4, x, 10.0.0.8", "10.0.0.8"),
        ("10.0.0.7", "1.2.3.4,", "10.0.0.7"),
        ("10.0.0.7", "[2001:db8::1]", "2001:db8::1"),
        ("fd00::7", "::ffff:1.2.3.4", "1.2.3.4"),
        ("unknown", "1.2.3.4", "unknown"),
        ("10.0.0.7", ",".join(["1.2.3.4"] + ["10.0.0.8"] * HOPS_MAX), "10.0.0.8"),
        ("10.0.0.7", ",".join(["1.2.3.4"] + ["10.0.0.8"] * (HOPS_MAX - 1)), "1.2.3.4"),
    ],
)
def test_the_caller_is_the_rightmost_address_that_is_not_a_balancer(
    connected: str, header: str, caller: str
) -> None:
    assert find_caller(connected, header.split(","), BALANCERS) == caller


@pytest.mark.parametrize(("balancers", "status"), [([], 403), (["127.0.0.1"], 502)])
def test_entries_use_the_forwarded_address_of_a_balancer_alone(
    balancers: list[str], status: int
) -> None:
    door = Door()
    door.items.put_user(parse_entry("Cluster:security", ["Get"], sources=["1.2.3.4"]))
    door.served = AccessControl(
        door.app,
        body_bytes_max=10_000,
        identities=door.identities,
        balancers=parse_networks(balancers),
    )
    answer = door.ask("GET /users", headers={"X-Forwarded-For": "6.6.6.6, 1.2.3.4"})
    assert answer.status_code == status
    if status == 403:
        assert "from 127.0.0.1" in json.loads(answer.text)["detail"]
