"""The checks of `tidemill doctor` on answers of the REST API."""

from __future__ import annotations

from typing import Any

import pytest

from tidemill.admin.settings import AdminSettings
from tidemill.broker.settings import BrokerSettings
from tidemill.cli.doctor_checks import (
    CLOCK_SKEW_MS_MAX,
    DAY_MS,
    NO_POLL_MS,
    OWN_SETTINGS,
    CheckState,
    Unanswered,
    check_answer,
    check_broker_groups,
    check_certificates,
    check_clocks,
    check_consumers,
    check_dead_letters,
    check_disks,
    check_readiness,
    check_replicas,
    check_settings,
    check_versions,
    find_stalled,
)
from tidemill.controller.settings import ControllerSettings
from tidemill.proxy.settings import ProxySettings

OK, PROBLEM, UNKNOWN = CheckState.OK, CheckState.PROBLEM, CheckState.UNKNOWN
GIB = 1 << 30


def process(name: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "version": "0.2.0", "ready": True, "clockSkewMs": 3} | fields


def processes(*items: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"items": list(items), **fields}


def test_different_versions_and_commits_are_a_problem() -> None:
    equal = processes(process("admin"), process("proxy-0"))
    assert check_versions(equal).state is OK
    older = processes(process("admin"), process("proxy-0", version="0.1.0"))
    found = check_versions(older)
    assert (found.state, found.text) == (PROBLEM, "0.1.0: proxy-0, 0.2.0: admin")
    other = processes(process("admin", commit="a" * 40), process("proxy-0", commit="b" * 40))
    assert check_versions(other).state is PROBLEM


def test_a_clock_beyond_the_limit_is_a_problem() -> None:
    at_limit = processes(process("admin", clockSkewMs=-CLOCK_SKEW_MS_MAX))
    assert check_clocks(at_limit).state is OK
    beyond = processes(process("broker-1", clockSkewMs=-CLOCK_SKEW_MS_MAX - 1))
    assert (check_clocks(beyond).state, check_clocks(beyond).text) == (PROBLEM, "broker-1 -501 ms")


def test_an_unreachable_process_is_a_problem_and_its_version_is_unknown() -> None:
    partial = processes(process("admin"), unreachable=["proxy-0"])
    assert check_readiness(partial).text == "proxy-0 is unreachable"
    assert check_readiness(partial).state is PROBLEM
    assert (check_versions(partial).state, check_clocks(partial).state) == (UNKNOWN, UNKNOWN)
    assert check_readiness(processes(process("proxy-0", ready=False))).state is PROBLEM


def test_an_unreachable_broker_group_is_a_problem() -> None:
    group = {"name": "broker-1", "reachable": True}
    assert check_broker_groups({"items": [group]}).state is OK
    silent = check_broker_groups({"items": [group | {"reachable": False, "unreachableMs": 61_000}]})
    assert (silent.state, silent.text) == (PROBLEM, "broker-1 is unreachable for 1 m 1 s")
    assert check_broker_groups({"items": [group | {"reason": "no master"}]}).state is PROBLEM


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"role": "learner"}, "broker-0-2 is not in sync"),
        ({"role": "in-sync", "full": True}, "broker-0-2 has a full disk"),
        ({"role": "learner", "diverged": True}, "broker-0-2 is not in sync and is diverged"),
        ({"role": "retired"}, None),
    ],
)
def test_a_replica_that_cannot_take_over_is_a_problem(
    fields: dict[str, Any], text: str | None
) -> None:
    replica = {"replica": 2, "diverged": False, "unclean": False, "full": False} | fields
    found = check_replicas({"items": [{"name": "broker-0", "replicas": [replica]}]})
    assert list(found.objects) == ([] if text is None else [text])
    alarm = {"name": "broker-0", "replicas": [], "alarm": "it has no master"}
    assert check_replicas({"items": [alarm]}).text == "broker-0: it has no master"


def test_a_full_or_nearly_full_disk_is_a_problem() -> None:
    disk = {"broker": "broker-0", "isFull": False, "totalBytes": 100 * GIB, "freeBytes": 20 * GIB}
    assert check_disks({"brokerGroups": [disk]}).text == "at most 80% of a disk are used"
    nearly = check_disks({"brokerGroups": [disk | {"freeBytes": 10 * GIB}]})
    assert (nearly.state, nearly.text) == (PROBLEM, "broker-0 is used to 90%")
    assert check_disks({"brokerGroups": [disk | {"isFull": True}]}).state is PROBLEM
    assert check_disks({"brokerGroups": [], "unreachable": ["broker-0"]}).state is UNKNOWN


@pytest.mark.parametrize(
    ("left_ms", "state"), [(14 * DAY_MS, OK), (14 * DAY_MS - 1, PROBLEM), (-1, PROBLEM)]
)
def test_a_certificate_near_its_end_is_a_problem(left_ms: int, state: CheckState) -> None:
    now_ms = 1_800_000_000_000
    plain = processes(process("admin", certificates=[]))
    assert check_certificates(now_ms + left_ms, plain, now_ms=now_ms).state is state
    assert check_certificates(None, plain, now_ms=now_ms).state is OK
    used = [
        {"use": "clients", "expiresAtMs": now_ms + 61 * DAY_MS},
        {"use": "cluster", "expiresAtMs": now_ms + left_ms},
    ]
    found = check_certificates(
        None, processes(process("proxy-0", certificates=used)), now_ms=now_ms
    )
    assert found.state is state
    if state is OK:
        assert found.text == "the first certificate expires in 14 days"
    else:
        [text] = found.objects
        assert text.startswith("the certificate cluster of proxy-0 ")


def test_a_certificate_without_a_known_end_is_unknown() -> None:
    hidden = [{"use": "clients", "unknown": "it cannot be read"}]
    partial = processes(
        process("admin"), process("proxy-0", certificates=hidden), unreachable=["broker-0"]
    )
    found = check_certificates(Unanswered("the admin API: refused"), partial, now_ms=0)
    assert found.state is UNKNOWN
    assert found.text == (
        "unknown: the admin API: refused, certificates of broker-0, certificates of admin (an older"
        " version), the certificate clients of proxy-0 (it cannot be read)"
    )
    assert check_certificates(None, Unanswered("timeout"), now_ms=0).state is UNKNOWN


def test_a_consumer_group_with_a_backlog_and_no_consumer_is_a_problem() -> None:
    served = {"name": "a", "lag": 9, "consumers": 1}
    paused = {"name": "b", "lag": 9, "consumers": 0, "state": "PAUSED"}
    empty = {"name": "c", "lag": 0, "consumers": 0}
    never_polled = {"name": "d", "consumers": 0, "state": "NEVER_POLLED"}
    assert check_consumers([served, paused, empty, never_polled]).state is OK
    few, many = ({"name": name, "lag": lag, "consumers": 0} for name, lag in (("e", 1), ("f", 2)))
    found = check_consumers([few, many])
    assert found.text == "f has 2 messages and no consumer, e has 1 messages and no consumer"
    assert found.command == "tidemill group show f"
    assert check_consumers([{"name": "g", "unknown": "it is too new"}]).state is UNKNOWN


def stalled(**fields: Any) -> dict[str, Any]:
    """Return the row of a group whose consumers take no message."""
    row = {"name": "a", "lag": 20, "ready": 20, "consumers": 1, "outPerSecond": 0.0}
    return row | {"state": "ACTIVE", "oldestUnackedAtMs": 0} | fields


@pytest.mark.parametrize(
    "fields",
    [
        {"ready": 0},
        {"consumers": 0},
        {"outPerSecond": 0.2},
        {"outPerSecond": None},
        {"state": "PAUSED"},
        {"oldestUnackedAtMs": 1},
    ],
)
def test_a_group_is_stalled_if_its_consumers_take_no_ready_message(fields: dict[str, Any]) -> None:
    assert find_stalled([stalled()], NO_POLL_MS + 1) == ["a"]
    assert find_stalled([stalled(**fields)], NO_POLL_MS + 1) == []


def test_consumers_that_do_not_poll_are_a_problem() -> None:
    answers = {"a": {"findings": [{"code": "NOT_POLLING"}]}, "b": {"findings": []}}
    found = check_consumers([stalled()], diagnoses=answers)
    assert (found.state, found.command) == (PROBLEM, "tidemill group show a")
    assert found.objects == ["a has ready messages, and no connected consumer polls"]
    assert check_consumers([stalled()], diagnoses={"a": Unanswered("late")}).state is UNKNOWN


def test_open_dead_letters_are_a_notice() -> None:
    settled = {"group": "a", "open": 0}
    assert check_dead_letters({"groups": [settled]}).state is OK
    found = check_dead_letters({"groups": [settled, {"group": "b", "open": 3}]})
    assert (found.state, found.text) == (CheckState.NOTICE, "b has 3")
    late = {"groups": [{"group": "b", "open": 3}], "unreachable": ["broker-1"]}
    assert check_dead_letters(late).state is UNKNOWN, "there may be others"
    assert found.command == "tidemill dead-letter list --group b --state open"


def settings(**values: object) -> dict[str, Any]:
    return {"items": [{"name": name, "value": value} for name, value in values.items()]}


def test_a_setting_that_differs_within_a_kind_is_a_problem() -> None:
    kinds = {"proxy-0": "proxy", "proxy-1": "proxy", "broker-0": "broker"}
    given = {
        "proxy-0": settings(slow_call_ms=500, grpc_port=1),
        "proxy-1": settings(slow_call_ms=500, grpc_port=2),
        "broker-0": settings(slow_call_ms=900),
    }
    assert check_settings(kinds, given).state is OK
    given["proxy-1"] = settings(slow_call_ms=1)
    found = check_settings(kinds, given)
    assert found.text == "proxy slow_call_ms: 500 (proxy-0) or 1 (proxy-1)"
    assert found.command == "tidemill process settings proxy-0 --changed"
    unlisted = check_settings(kinds, {**given, "broker-1": Unanswered("no answer")})
    assert "broker-1 (no answer)" in unlisted.text  # A process that hangs has no known kind.
    silent = check_settings(kinds, {"proxy-0": Unanswered("it hangs")})
    assert (silent.state, silent.text) == (UNKNOWN, "unknown: proxy-0 (it hangs)")


def test_each_own_setting_exists() -> None:
    classes = BrokerSettings, ProxySettings, AdminSettings, ControllerSettings
    assert set(OWN_SETTINGS) <= {name for each in classes for name in each.model_fields}


def test_a_check_without_an_answer_is_unknown() -> None:
    found = check_answer("disks", "tidemill storage show", Unanswered("it hangs"), check_disks)
    assert (found.state, found.text) == (UNKNOWN, "unknown: it hangs")


def test_a_long_finding_counts_its_remaining_objects() -> None:
    many = processes(*(process(f"proxy-{n}", ready=False) for n in range(7)))
    found = check_readiness(many)
    assert found.text.endswith("proxy-4 is not ready and 2 more")
    assert len(found.objects) == 7
