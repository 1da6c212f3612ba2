"""`tidemill operation wait` while a broker group or the API does not answer."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner, Result

from tests.support.scripted_api import LOST, ApiAnswer, refusal, scripted_api
from tidemill.cli import operations as module
from tidemill.cli.app import app

DONE = ApiAnswer(
    {"id": "broker-0:5", "state": "DONE", "done": 2, "failed": 0, "total": 2, "brokers": []}
)
DOWN = refusal("broker-0 cannot be reached; retry later", 503)


def wait(*answers: ApiAnswer, options: tuple[str, ...] = ()) -> tuple[Result, int]:
    """Run the command; return its result and the number of calls. The last answer is repeated."""
    left = list(answers)
    count = 0

    def answer(_request: object) -> ApiAnswer:
        nonlocal count
        count += 1
        return left.pop(0) if len(left) > 1 else left[0]

    with scripted_api(answer) as address:
        command = ["--admin", address, "operation", "wait", "broker-0:5", *options]
        return CliRunner().invoke(app, command), count


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_S", 0.01)


@pytest.mark.parametrize("failed", [DOWN, refusal("no reply within 5 s", 504), LOST])
def test_a_wait_goes_on_after_failed_looks(failed: ApiAnswer) -> None:
    result, count = wait(failed, failed, DONE)
    assert (result.exit_code, count) == (0, 3)
    assert "broker-0:5: done, 2 of 2 items" in result.stdout


@pytest.mark.parametrize("failed", [DOWN, LOST])
def test_a_wait_ends_with_3_if_the_state_stays_unknown(
    failed: ApiAnswer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.05)
    result, _ = wait(failed)
    assert result.exit_code == 3
    assert "the state of operation broker-0:5 is unknown" in result.stderr
    monkeypatch.undo()
    result, _ = wait(failed, options=("--timeout", "1s"))
    assert result.exit_code == 3


def test_a_wait_ends_at_once_if_the_api_rejects_the_look() -> None:
    result, _ = wait(refusal("there is no operation broker-0:5", 404))
    assert result.exit_code == 1
    assert "there is no operation" in result.stderr
