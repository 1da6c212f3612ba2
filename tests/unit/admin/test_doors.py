"""Addresses that other machines reach: the flags of open doors."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from tidemill.admin.process import warn_about_open_doors
from tidemill.admin.settings import AdminSettings
from tidemill.standalone.settings import StandaloneSettings

TLS = ["--admin-tls-certificate-file=a", "--admin-tls-key-file=b"]
TOKEN = ["--admin-token-file=token"]


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
