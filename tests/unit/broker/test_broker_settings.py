"""A setting of the engine reaches it by its name; one that is misspelt would reach nobody."""

from __future__ import annotations

from dataclasses import fields

from tidemill.broker.engine.config import EngineConfig
from tidemill.broker.engine.timer.config import TimerConfig
from tidemill.broker.settings import BrokerSettings
from tidemill.common.settings import ProcessSettings

OF_THE_SHELL = {
    "data_dir",
    "drain_timeout_ms",
    "grpc_host",
    "grpc_port",
    "grpc_reuse_port",
    "parked_max",
    "pending_bytes_max",
    "timer_clock_hold_ms",
}


def test_every_setting_is_the_engines_or_the_shells() -> None:
    of_the_engine = {one.name for one in fields(EngineConfig)}
    of_the_engine |= {f"timer_{one.name}" for one in fields(TimerConfig)}
    own = set(BrokerSettings.model_fields) - set(ProcessSettings.model_fields)
    assert own - of_the_engine == OF_THE_SHELL
