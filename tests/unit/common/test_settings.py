"""The sources of settings, and the errors for invalid ones."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
from pydantic import Field, ValidationError

from tidemill.common.setting_types import Addresses, Flag, Names
from tidemill.common.settings import ProcessSettings
from tidemill.common.shared_settings import FrontSettings


class Settings(ProcessSettings):
    """A process for tests."""

    command: ClassVar[str] = "test"

    brokers: Names = Field(["default:1"], description="Some names.")
    is_on: Flag = Field(True, description="A switch.")
    limit: int = Field(5, ge=1, description="A number.")


class LinkedSettings(ProcessSettings):
    """A process with peers, for tests."""

    command: ClassVar[str] = "linked"

    peers: Addresses = Field([], description="Some addresses.")


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CONFIG", "LIMIT", "BROKERS", "IS_ON"):
        monkeypatch.delenv(f"TIDEMILL_{name}", raising=False)


def test_flags_override_environment_and_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "tidemill.yaml"
    file.write_text("limit: 1\nbrokers: [file:1]\nis_on: false\n")
    assert Settings.load([f"--config={file}"]).limit == 1
    monkeypatch.setenv("TIDEMILL_LIMIT", "2")
    assert Settings.load(["--config", str(file)]).limit == 2
    settings = Settings.load(["--config", str(file), "--limit", "3"])
    assert (settings.limit, settings.brokers, settings.is_on) == (3, ["file:1"], False)


def test_the_environment_may_name_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "tidemill.yaml"
    file.write_text("limit: 7\n")
    monkeypatch.setenv("TIDEMILL_CONFIG", str(file))
    assert Settings.load([]).limit == 7


def test_a_file_may_have_settings_of_other_processes(tmp_path: Path) -> None:
    file = tmp_path / "tidemill.yaml"
    file.write_text("long_polling_max_ms: 1\nlimit: 2\n")
    assert Settings.load([f"--config={file}"]).limit == 2


def test_names_are_separated_by_commas_or_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Settings.load(["--brokers=a:1,b:2"]).brokers == ["a:1", "b:2"]
    assert Settings.load(["--brokers=a:1", "--brokers=b:2"]).brokers == ["a:1", "b:2"]
    monkeypatch.setenv("TIDEMILL_BROKERS", "a:1, b:2")
    assert Settings.load([]).brokers == ["a:1", "b:2"]


def test_a_flag_has_a_negative() -> None:
    assert Settings.load(["--no-is-on"]).is_on is False


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--limit=0"], "limit"),
        (["--limit=many"], "limit"),
        (["--limits=1"], "unrecognized arguments"),
        (["--config=/nowhere.yaml"], "does not exist"),
    ],
)
def test_an_invalid_setting_ends_the_start_with_a_reason(
    capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str
) -> None:
    with pytest.raises(SystemExit) as refusal:
        Settings.load(arguments)
    assert refusal.value.code == 2
    assert reason in capsys.readouterr().err


def test_settings_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Settings.load([]).limit = 6  # type: ignore[misc]  # The point of the test.


@pytest.mark.parametrize("address", ["nowhere", "host:", "host:0", "host:65536", "http://host:1"])
def test_an_address_is_a_host_and_a_port(capsys: pytest.CaptureFixture[str], address: str) -> None:
    with pytest.raises(SystemExit):
        LinkedSettings.load([f"--peers={address}"])
    assert repr(address) in capsys.readouterr().err


def test_the_host_of_an_address_may_be_a_name_or_an_ip_address() -> None:
    addresses = ["broker-0.broker:10911", "127.0.0.1:1", "[::1]:65535"]
    assert LinkedSettings.load([f"--peers={','.join(addresses)}"]).peers == addresses


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("limit: [", "is not valid YAML"),
        ("- limit", "pairs"),
        ("limit", "pairs"),
        ("\0", "is not valid YAML"),
    ],
)
def test_a_file_without_settings_ends_the_start_with_a_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, reason: str
) -> None:
    file = tmp_path / "tidemill.yaml"
    file.write_text(content)
    with pytest.raises(SystemExit) as refusal:
        Settings.load([f"--config={file}"])
    assert refusal.value.code == 2
    assert reason in capsys.readouterr().err


def test_a_folder_is_not_a_file_of_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        Settings.load([f"--config={tmp_path}"])
    assert "cannot be read" in capsys.readouterr().err


def test_an_empty_file_has_no_settings(tmp_path: Path) -> None:
    (tmp_path / "tidemill.yaml").touch()
    assert Settings.load([f"--config={tmp_path / 'tidemill.yaml'}"]).limit == 5


def test_unknown_names_are_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tidemill.yaml"
    file.write_text("limit: 2\nretention_mss: 1\nretention_ms: 1\nzzz: 1\n")
    monkeypatch.setenv("TIDEMILL_DATADIR", "x")
    monkeypatch.setenv("TIDEMILL_DATA_DIR", "x")
    with pytest.raises(SystemExit) as refusal:
        Settings.load([f"--config={file}"])
    assert refusal.value.code == 2
    assert capsys.readouterr().err.splitlines() == [
        "tidemill test: unknown settings (to start anyway, add --allow-unknown-settings):",
        f"  retention_mss in {file}; did you mean retention_ms?",
        f"  zzz in {file}",
        "  TIDEMILL_DATADIR in the environment; did you mean TIDEMILL_DATA_DIR?",
    ]
    assert Settings.load([f"--config={file}", "--allow-unknown-settings"]).limit == 2
    monkeypatch.setenv("TIDEMILL_ALLOW_UNKNOWN_SETTINGS", "true")
    assert Settings.load([f"--config={file}"]).limit == 2
    assert not capsys.readouterr().err


def test_a_setting_that_others_replaced_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tidemill.yaml"
    file.write_text("limit: 2\nauto_create: true\n")
    monkeypatch.setenv("TIDEMILL_AUTO_CREATE", "true")
    variables = "TIDEMILL_AUTO_CREATE_TOPICS", "TIDEMILL_AUTO_CREATE_GROUPS"
    with pytest.raises(SystemExit):
        Settings.load([f"--config={file}"])
    assert capsys.readouterr().err.splitlines()[1:] == [
        f"  auto_create in {file}; use auto_create_topics and auto_create_groups instead",
        f"  TIDEMILL_AUTO_CREATE in the environment; use {' and '.join(variables)} instead",
    ]
    with pytest.raises(SystemExit):
        Settings.load(["--no-auto-create"])
    assert capsys.readouterr().err == (
        "tidemill test: --no-auto-create does not exist; use --auto-create-topics and"
        " --auto-create-groups instead\n"
    )


def test_the_file_itself_may_allow_unknown_names(tmp_path: Path) -> None:
    file = tmp_path / "tidemill.yaml"
    file.write_text("zzz: 1\nallow_unknown_settings: true\n")
    assert Settings.load([f"--config={file}"]).limit == 5


def test_a_misspelt_name_is_reported_beside_other_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tidemill.yaml"
    file.write_text("limit: x\nlimitt: 2\n")
    with pytest.raises(SystemExit):
        Settings.load([f"--config={file}"])
    assert f"  limitt in {file}; did you mean limit?" in capsys.readouterr().err


@pytest.mark.parametrize("service", ["TIDEMILL", "TIDEMILL_BROKER"])
def test_variables_that_kubernetes_sets_for_services_are_ignored(
    service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"{service}_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv(f"{service}_SERVICE_PORT", "8081")
    monkeypatch.setenv(f"{service}_SERVICE_PORT_GRPC", "8081")
    monkeypatch.setenv(f"{service}_PORT", "tcp://10.0.0.1:8081")
    monkeypatch.setenv(f"{service}_PORT_8081_TCP", "tcp://10.0.0.1:8081")
    monkeypatch.setenv(f"{service}_PORT_8081_TCP_PROTO", "tcp")
    monkeypatch.setenv(f"{service}_PORT_8081_TCP_PORT", "8081")
    monkeypatch.setenv(f"{service}_PORT_8081_TCP_ADDR", "10.0.0.1")
    monkeypatch.setenv("TIDEMILL_METRICS_PORT", "tcp://10.0.0.1:1")
    assert Settings.load([]).metrics_port == 5557


def test_a_child_leaves_unknown_names_to_its_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEMILL_DATADIR", "x")
    assert Settings.load(["--supervisor-fd=3"]).limit == 5


class BalancedSettings(FrontSettings):
    """A process behind a load balancer, for tests."""

    command: ClassVar[str] = "behind"


def test_balancers_are_addresses_or_networks(capsys: pytest.CaptureFixture[str]) -> None:
    settings = BalancedSettings.load(["--proxy-protocol-from=10.0.0.0/8,192.0.2.1,2001:db8::/32"])
    assert settings.proxy_protocol_from == ["10.0.0.0/8", "192.0.2.1", "2001:db8::/32"]
    for wrong in ("10.1.2.3/8", "balancer.example", "10.0.0.0/40"):
        with pytest.raises(SystemExit):
            BalancedSettings.load([f"--proxy-protocol-from={wrong}"])
        assert "proxy_protocol_from" in capsys.readouterr().err
