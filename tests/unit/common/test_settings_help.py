"""`--help` of the processes."""

from __future__ import annotations

import pytest

from tidemill.admin.settings import AdminSettings
from tidemill.broker.settings import BrokerSettings
from tidemill.common.settings import ProcessSettings
from tidemill.common.settings_help import panel_of
from tidemill.controller.settings import ControllerSettings
from tidemill.proxy.settings import ProxySettings
from tidemill.standalone.settings import StandaloneSettings

PROCESSES = (AdminSettings, BrokerSettings, ControllerSettings, ProxySettings, StandaloneSettings)
HIDDEN = {"supervisor_fd", "keeper_fd", "controllers_fd"}


def shown_by(settings: type[ProcessSettings], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        settings.load(["--help"])
    assert ended.value.code == 0
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("settings", PROCESSES, ids=lambda each: each.command)
def test_the_help_shows_each_setting_but_internal_ones(
    settings: type[ProcessSettings],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shown = shown_by(settings, capsys)
    for name in settings.model_fields:
        assert (f"--{name.replace('_', '-')} " in f"{shown} ") == (name not in HIDDEN), name


@pytest.mark.parametrize("settings", PROCESSES, ids=lambda each: each.command)
def test_each_setting_has_a_panel(settings: type[ProcessSettings]) -> None:
    assert all(panel_of(settings, name) for name in settings.model_fields)


def test_a_panel_is_chosen_by_the_longest_prefix() -> None:
    assert panel_of(BrokerSettings, "timer_max_rate") == "Delayed messages"
    assert panel_of(BrokerSettings, "metrics_port") == "Logs and metrics"
    assert panel_of(BrokerSettings, "checkpoint_log_bytes") == "Store"


def test_the_help_names_defaults_and_variables(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shown = shown_by(StandaloneSettings, capsys)
    assert "Delayed messages" not in shown
    assert "TIDEMILL_GRPC_PORT" in shown
    assert "[default: 8081]" in shown
