"""Valid triggers, and the errors of invalid ones."""

from __future__ import annotations

import pytest

from tidemill.admin.scaling.trigger import HORIZON_S_DEFAULT, DemandQuery, Trigger, read_trigger
from tidemill.common.errors import BadRequest, IllegalGroup, IllegalTopic, RequestError

LEAST = {"group": "billing", "messagesPerReplica": "100"}


def test_a_trigger_with_all_keys() -> None:
    trigger = read_trigger(
        {
            **LEAST,
            "topic": "orders",
            "scheduledHorizonSeconds": "120",
            "activationMessages": "5",
            "inFlight": "ignore",
        }
    )
    assert trigger == Trigger(
        query=DemandQuery("billing", "orders", 120),
        messages_per_replica=100,
        activation_messages=5,
        counts_in_flight=False,
    )


def test_a_trigger_with_the_required_keys_and_keys_of_keda() -> None:
    trigger = read_trigger({**LEAST, "scalerAddress": "admin:9090", "enableTLS": "true"})
    assert trigger.query == DemandQuery("billing", "", HORIZON_S_DEFAULT)
    assert (trigger.activation_messages, trigger.counts_in_flight) == (0, True)


def test_a_value_may_come_from_the_environment_of_the_workload() -> None:
    trigger = read_trigger({"groupFromEnv": "billing", "messagesPerReplica": "1"})
    assert trigger.query.group == "billing"
    with pytest.raises(BadRequest, match="twice"):
        read_trigger({**LEAST, "groupFromEnv": "billing"})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"messagesPerPod": "1"}, "did you mean messagesPerReplica?"),
        ({"scheduledHorizonSecond": "1"}, "did you mean scheduledHorizonSeconds?"),
        ({"Topic": "orders"}, "did you mean topic?"),
        ({"zzz": "1"}, "known are group, topic"),
        ({"messagesPerReplica": "0"}, "from 1 to"),
        ({"messagesPerReplica": "1.5"}, "whole number"),
        ({"messagesPerReplica": "٣"}, "whole number"),
        ({"messagesPerReplica": "9" * 5_000}, "whole number"),
        ({"scheduledHorizonSeconds": "-1"}, "whole number"),
        ({"scheduledHorizonSeconds": "86401"}, "from 0 to 86400"),
        ({"activationMessages": ""}, "whole number"),
        ({"inFlight": "yes"}, "count or ignore"),
        ({"group": ""}, "consumer group"),
    ],
)
def test_the_error_names_the_problem(changes: dict[str, str], reason: str) -> None:
    with pytest.raises(BadRequest, match=reason) as refused:
        read_trigger({**LEAST, **changes})
    assert len(refused.value.message) < 300


def test_a_target_has_no_default() -> None:
    with pytest.raises(BadRequest, match="the trigger has no messagesPerReplica"):
        read_trigger({"group": "billing"})


@pytest.mark.parametrize(
    ("changes", "error"),
    [({"group": "no spaces"}, IllegalGroup), ({"topic": "%SYS%TIMER"}, IllegalTopic)],
)
def test_invalid_names_are_rejected(changes: dict[str, str], error: type[RequestError]) -> None:
    with pytest.raises(error):
        read_trigger({**LEAST, **changes})
