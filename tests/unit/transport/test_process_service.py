"""Questions of operators to one process: its settings, its log level and its slow calls."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.support.clocks import ManualClock
from tidemill.broker.settings import BrokerSettings
from tidemill.common.log import LEVEL, change_level
from tidemill.common.slow_calls import SLOW_CALLS_MAX, SlowCalls
from tidemill.stubs.tidemill.process.v1 import process_pb2 as pb
from tidemill.transport.aio.process_service import LOG_LEVEL_MS_MAX, ProcessService
from tidemill.transport.aio.tls import Certificates


@pytest.fixture(autouse=True)
def level() -> Iterator[None]:
    """Begin and end each test with the level `info`."""
    change_level("info")
    yield
    change_level("info")


def service(
    settings: BrokerSettings | None = None, slow_calls: SlowCalls | None = None
) -> ProcessService:
    return ProcessService(
        "broker",
        "broker-7",
        settings or BrokerSettings(),
        ManualClock().wall_ms,
        is_ready=lambda: True,
        certificates=Certificates([]),
        slow_calls=slow_calls,
    )


def set_level(level: str, duration_ms: int, *, is_dry: bool = False) -> pb.ProcessQuestion:
    change = pb.SetLogLevel(level=level, duration_ms=duration_ms, dry_run=is_dry)
    return pb.ProcessQuestion(set_log_level=change)


async def after_timers_of(duration_ms: int) -> None:
    """Wait until timers of this duration have run: timers run in the order of their times."""
    ended = asyncio.Event()
    asyncio.get_running_loop().call_later((duration_ms + 1) / 1_000, ended.set)
    await ended.wait()


def test_settings_have_their_value_default_and_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEMILL_RETENTION_MS", "1000")
    asked = service(BrokerSettings.load(["--grpc-port", "7"]))
    found = asked.answer(pb.ProcessQuestion(get_settings=pb.GetSettings()))
    settings = {each.name: each for each in found.settings.settings}
    assert (settings["grpc_port"].value, settings["grpc_port"].source) == ("7", "FLAG")
    assert (settings["retention_ms"].value, settings["retention_ms"].source) == (
        "1000",
        "ENVIRONMENT",
    )
    policy = settings["timer_overload_policy"]
    assert (policy.value, policy.default_value, policy.source) == ('"accept"',) * 2 + ("DEFAULT",)
    assert list(settings) == sorted(settings)


def test_a_process_without_tls_reports_that_it_has_no_certificate() -> None:
    found = service().answer(pb.ProcessQuestion(describe=pb.DescribeProcess())).description
    assert found.HasField("certificates")
    assert not found.certificates.certificates


def test_settings_of_a_supervisor_are_left_out() -> None:
    found = service().answer(pb.ProcessQuestion(get_settings=pb.GetSettings()))
    names = {each.name for each in found.settings.settings}
    assert "supervisor_fd" not in names
    assert BrokerSettings.model_fields.keys() - names <= {"supervisor_fd", "controllers_fd"}


def test_a_changed_log_level_returns_to_that_of_the_settings() -> None:
    async def run() -> None:
        asked = service()
        changed = asked.answer(set_level("debug", 1)).log_levels
        assert (changed.before, changed.now, LEVEL.is_debug) == ("info", "debug", True)
        assert changed.until_ms > 0
        await after_timers_of(1)
        assert LEVEL.text == "info"
        described = asked.answer(pb.ProcessQuestion(describe=pb.DescribeProcess()))
        assert described.description.log_level_until_ms == 0

    asyncio.run(run())


def test_the_last_change_of_the_log_level_counts() -> None:
    async def run() -> None:
        asked = service()
        asked.answer(set_level("debug", 1))
        asked.answer(set_level("warning", LOG_LEVEL_MS_MAX))
        await after_timers_of(1)
        assert LEVEL.text == "warning"
        back = asked.answer(set_level("", 1)).log_levels
        assert (back.before, back.now, back.until_ms) == ("warning", "info", 0)

    asyncio.run(run())


def test_a_dry_run_changes_no_level() -> None:
    planned = service().answer(set_level("debug", 1_000, is_dry=True)).log_levels
    assert (planned.now, LEVEL.text) == ("debug", "info")


@pytest.mark.parametrize(
    ("level", "duration_ms"), [("loud", 1), ("debug", -1), ("debug", LOG_LEVEL_MS_MAX + 1)]
)
def test_a_wrong_level_is_rejected(level: str, duration_ms: int) -> None:
    answer = service().answer(set_level(level, duration_ms))
    assert answer.error == "BadRequest"
    assert LEVEL.text == "info"


def test_an_unknown_question_is_rejected() -> None:
    assert service().answer(pb.ProcessQuestion()).error == "BadRequest"


def test_slow_calls_are_found_by_each_filter_the_newest_first() -> None:
    calls = SlowCalls(500, ManualClock().wall_ms)
    for n, (method, topic, client) in enumerate(
        [("send_message", "t", "a"), ("ack_message", "t", "b"), ("send_message", "u", "b")]
    ):
        calls.note(method, 500 + n, topic=topic, client_id=client, code="OK")

    def found(**filters: object) -> list[int]:
        asked = pb.FindSlowCalls(**filters)  # type: ignore[arg-type]  # the fields of the message
        answer = service(slow_calls=calls).answer(pb.ProcessQuestion(find_slow_calls=asked))
        assert (answer.slow_calls.count, answer.slow_calls.slow_call_ms) == (3, 500)
        return [each.duration_ms for each in answer.slow_calls.calls]

    assert found() == [502, 501, 500]
    assert found(method="send_message") == [502, 500]
    assert found(topic="t") == [501, 500]
    assert found(client_id="b") == [502, 501]
    assert found(duration_ms_min=502) == [502]
    assert found(limit=1) == [502]


def test_the_number_of_kept_calls_is_bounded() -> None:
    calls = SlowCalls(1, ManualClock().wall_ms)
    for n in range(SLOW_CALLS_MAX + 1):
        calls.note("send_message", n)
    kept = [each.duration_ms for each in calls.newest_first()]
    assert (len(kept), kept[-1], calls.count) == (SLOW_CALLS_MAX, 1, SLOW_CALLS_MAX + 1)
