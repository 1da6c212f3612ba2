"""`tidemill user show` shows the last uses of secrets."""

from __future__ import annotations

from typing import Any

from typer.testing import CliRunner

from tests.support.scripted_api import ApiAnswer, scripted_api
from tidemill.cli.app import app

CREATED_MS = 1_796_133_600_000  # 2026-12-01T14:00:00Z
HOUR_MS = 3_600_000


def shown(secrets: list[dict[str, Any]], **fields: Any) -> str:
    """Return the output for a user with these secrets."""
    complete = [
        {"id": n, "keyId": "k1", "createdAtMs": CREATED_MS, "notAfterMs": 0, **secret}
        for n, secret in enumerate(secrets, 1)
    ]
    with scripted_api(lambda _: ApiAnswer({"secrets": complete, **fields})) as address:
        ended = CliRunner().invoke(app, ["--admin", address, "user", "show", "orders"])
    assert ended.exit_code == 0, ended.output
    return ended.output


def test_each_secret_has_its_last_use() -> None:
    output = shown([{"usedAtMs": CREATED_MS + 2 * HOUR_MS}, {}], usesSinceMs=CREATED_MS - 1)
    first, second = output.splitlines()[-2:]
    assert first.rstrip().endswith("never  2026-12-01 16:00:00.000Z")
    assert second.rstrip().endswith("none since 2026-12-01 14:00:00.000Z"), "its creation is later"


def test_a_restarted_process_knows_no_earlier_uses() -> None:
    output = shown([{}], usesSinceMs=CREATED_MS + HOUR_MS)
    assert output.rstrip().endswith("none since 2026-12-01 15:00:00.000Z")


def test_an_older_admin_process_knows_no_uses() -> None:
    assert shown([{}]).rstrip().endswith("unknown")


def test_processes_without_an_answer_are_named() -> None:
    output = shown([{}], usesSinceMs=CREATED_MS, unreachable=["proxy-1: down"])
    assert "the uses at these processes are unknown: proxy-1: down" in output
