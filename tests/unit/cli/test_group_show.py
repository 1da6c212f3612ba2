"""`tidemill group show`: its lines while the numbers are older than the progress."""

from __future__ import annotations

from typing import Any

from typer.testing import CliRunner

from tests.support.scripted_api import ApiAnswer, ApiRequest, scripted_api
from tidemill.cli.app import app

GROUP = {
    "name": "billing",
    "deliveryOrder": "FIFO",
    "maxAttempts": 17,
    "retry": {"customized": {"nextMs": [1_000]}},
    "startFrom": "earliest",
}
NO_PROGRESS = {"lag": 0, "ready": 0, "blocked": 0, "inFlight": 0}


def show(group: dict[str, Any], lag: int, *, topics: tuple[str, ...] = ("orders",)) -> str:
    """Show a consumer group that reads the topics."""
    progress = NO_PROGRESS | {"lag": lag, "ready": lag}
    answers: dict[str, Any] = {
        "/groups/billing": GROUP | group,
        "/groups/billing/progress": {
            "total": progress,
            "topics": [{"topic": each} | progress for each in topics],
            "locks": [],
        },
        "/groups/billing/diagnosis": {"findings": []},
        "/clients": {"clients": []},
    }

    def answer(request: ApiRequest) -> ApiAnswer:
        return ApiAnswer(answers[request.path.partition("?")[0]])

    with scripted_api(answer) as address:
        result = CliRunner().invoke(app, ["--admin", address, "group", "show", "billing"])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_group_with_progress_is_not_shown_as_never_polled() -> None:
    shown = show({"state": "NEVER_POLLED"}, lag=0)
    assert "NEVER_POLLED" not in shown
    assert "from before the first poll" in shown
    polled = [{"topic": "orders", "expression": "*", "clientId": "c", "polledMs": 2}]
    assert "NEVER_POLLED" not in show({"state": "NEVER_POLLED", "filters": polled}, 0, topics=())
    assert "NEVER_POLLED" in show({"state": "NEVER_POLLED"}, 0, topics=())


def test_only_a_group_with_a_lag_has_a_time_to_catch_up() -> None:
    assert "never at this pace" in show({"state": "ACTIVE", "lag": 3}, lag=3)
    assert "caught up in" not in show({"state": "ACTIVE", "lag": 3}, lag=0)
    assert "caught up in" not in show({"state": "ACTIVE", "lag": 0}, lag=0)
