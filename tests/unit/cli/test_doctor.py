"""`tidemill doctor`: its output and exit status."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tests.support.scripted_api import ApiAnswer, ApiRequest, refusal, scripted_api
from tidemill.cli.app import app

FINE: dict[str, Any] = {
    "/session": {"isSuper": True},
    "/processes": {
        "items": [
            {
                "name": name,
                "kind": kind,
                "version": "0.2.0",
                "ready": True,
                "clockSkewMs": 0,
                "certificates": [],
            }
            for name, kind in (("admin", "admin"), ("proxy-0", "proxy"), ("proxy-1", "proxy"))
        ]
    },
    "/processes/admin/settings": {"items": [{"name": "tls_certificate_file", "value": ""}]},
    "/processes/proxy-0/settings": {"items": [{"name": "slow_call_ms", "value": 500}]},
    "/processes/proxy-1/settings": {"items": [{"name": "slow_call_ms", "value": 500}]},
    "/broker-groups": {"items": [{"name": "broker-0", "reachable": True}]},
    "/storage": {"brokerGroups": []},
    "/groups": {"groups": []},
    "/dead-letters/summary": {"groups": []},
}


def examine(changes: dict[str, Any]) -> Result:
    """Run the command against an API without controllers."""
    answers = FINE | changes

    def answer(request: ApiRequest) -> ApiAnswer:
        assert request.method == "GET"
        found = answers.get(request.path.partition("?")[0])
        if found is None:
            return refusal("it has no controllers")
        return found if isinstance(found, ApiAnswer) else ApiAnswer(found)

    with scripted_api(answer) as address:
        return CliRunner().invoke(app, ["--admin", address, "-o", "json", "doctor"])


def states(result: Result) -> dict[str, str]:
    return {each["check"]: each["state"] for each in json.loads(result.stdout)["checks"]}


def test_a_healthy_cluster_exits_with_0() -> None:
    result = examine({})
    assert set(states(result).values()) == {"ok"}
    assert result.exit_code == 0


def test_a_problem_exits_with_4_even_if_a_part_is_unknown() -> None:
    result = examine(
        {
            "/processes/proxy-1/settings": {"items": [{"name": "slow_call_ms", "value": 1}]},
            "/storage": refusal("it hangs", 503),
        }
    )
    found = states(result)
    assert (found["settings"], found["disks"]) == ("problem", "unknown")
    assert result.exit_code == 4


@pytest.mark.parametrize("path", ["/processes", "/storage", "/groups", "/dead-letters/summary"])
def test_an_answer_that_is_missing_exits_with_5(path: str) -> None:
    result = examine({path: refusal("it hangs", 503)})
    assert "unknown" in states(result).values()
    assert result.exit_code == 5


def test_consumer_groups_that_the_user_may_not_see_are_unknown() -> None:
    result = examine({"/session": {"isSuper": False, "hidden": ["consumer groups"]}})
    found = states(result)
    assert (found["consumers"], found["dead letters"]) == ("unknown", "unknown")
    assert result.exit_code == 5


def test_a_certificate_without_a_known_end_exits_with_5() -> None:
    hidden = [{"use": "clients", "unknown": "it cannot be read"}]
    proxy = {"name": "proxy-0", "kind": "proxy", "version": "0.2.0", "ready": True}
    proxy |= {"clockSkewMs": 0, "certificates": hidden}
    result = examine({"/processes": {"items": [proxy]}})
    assert states(result)["certificates"] == "unknown"
    assert "the certificate clients of proxy-0 (it cannot be read)" in result.stdout
    assert result.exit_code == 5


def test_replicas_are_checked_if_there_are_controllers() -> None:
    group = {"name": "broker-0", "replicas": [], "alarm": "it has no master"}
    result = examine({"/replicas": {"items": [group]}})
    assert states(result)["replicas"] == "problem"
    assert "replicas" not in states(examine({}))


def test_an_unreachable_admin_api_exits_with_3() -> None:
    result = CliRunner().invoke(app, ["--admin", "http://127.0.0.1:1", "doctor"])
    assert result.exit_code == 3
    assert "Is it running?" in result.output
