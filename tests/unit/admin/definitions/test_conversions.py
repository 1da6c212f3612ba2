"""Definitions of RabbitMQ and RocketMQ become ours, with a report row for each object."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.unit.test_pages import refusal
from tidemill.admin.definitions.from_rabbitmq import converted_from_rabbitmq
from tidemill.admin.definitions.from_rocketmq import converted_from_rocketmq
from tidemill.admin.definitions.rabbitmq_entries import FILE_ENTRIES_MAX, ConvertedEntries
from tidemill.admin.json.definitions import ConversionOutcome, ConversionView
from tidemill.common.errors import Conflict
from tidemill.security.acl import ENTRIES_MAX

CONVERTED, CHANGED = ConversionOutcome.CONVERTED, ConversionOutcome.CHANGED
SKIPPED = ConversionOutcome.SKIPPED


def rows(view: ConversionView) -> dict[str, tuple[ConversionOutcome, str]]:
    return {row.source: (row.outcome, row.reason or row.target or "") for row in view.report}


def objects(view: ConversionView, kind: str) -> dict[str, dict[str, Any]]:
    listed = view.definitions.model_dump(by_alias=True, mode="json", exclude_unset=True)[kind]
    return {one.pop("name"): one for one in listed}


RABBITMQ: dict[str, Any] = {
    "rabbit_version": "4.1.0",
    "vhosts": [{"name": "/"}, {"name": "shop"}],
    "exchanges": [
        {"vhost": "/", "name": "orders", "type": "direct", "arguments": {}},
        {"vhost": "/", "name": "news", "type": "fanout"},
        {"vhost": "shop", "name": "events.v1", "type": "topic"},
        {"vhost": "/", "name": "by-header", "type": "headers"},
        {"vhost": "/", "name": "amq.direct", "type": "direct"},
        {
            "vhost": "/",
            "name": "later",
            "type": "x-delayed-message",
            "arguments": {"x-delayed-type": "direct"},
        },
    ],
    "queues": [
        {
            "vhost": "/",
            "name": "billing",
            "arguments": {"x-delivery-limit": 4, "x-message-ttl": 3_600_000},
        },
        {"vhost": "/", "name": "one", "arguments": {"x-single-active-consumer": True}},
        {"vhost": "/", "name": "lonely", "arguments": {"x-queue-type": "quorum", "x-expires": 5}},
        {"vhost": "shop", "name": "mail", "arguments": {"x-message-ttl": 5}},
    ],
    "bindings": [
        binding | {"destination_type": "queue", "routing_key": binding.get("routing_key", "")}
        for binding in (
            {"vhost": "/", "source": "orders", "destination": "billing", "routing_key": "paid"},
            {"vhost": "/", "source": "news", "destination": "billing", "routing_key": "any"},
            {"vhost": "shop", "source": "events.v1", "destination": "mail", "routing_key": "a.*"},
            {"vhost": "shop", "source": "events.v1", "destination": "mail", "routing_key": "a.b"},
            {"vhost": "/", "source": "by-header", "destination": "one"},
            {"vhost": "/", "source": "later", "destination": "one", "routing_key": "x y"},
        )
    ],
    "users": [
        {"name": "eve", "password_hash": "x", "tags": ["administrator"]},
        {"name": "bob", "password_hash": "x", "tags": ""},
    ],
    "permissions": [
        {"user": "eve", "vhost": "/", "configure": "^$", "write": "^orders$", "read": "^bil.*"},
        {"user": "bob", "vhost": "shop", "configure": ".*", "write": ".*", "read": "(a|b)+"},
        {"user": "zoe", "vhost": "/", "configure": "", "write": "", "read": ""},
    ],
    "policies": [{"vhost": "/", "name": "ttl", "pattern": "(", "definition": {"message-ttl": 1}}],
    "parameters": [{"name": "federation"}],
}


def test_objects_of_rabbitmq_become_topics_groups_and_users() -> None:
    view = converted_from_rabbitmq(RABBITMQ)
    assert objects(view, "topics") == {
        "later": {"messageType": "DELAY"},
        "lonely": {},
        "news": {"retention": {"ms": 3_600_000}},
        "orders": {"retention": {"ms": 3_600_000}},
        "shop%events-v1": {"retention": {"ms": 60_000}},
    }
    assert objects(view, "groups") == {
        "billing": {"maxAttempts": 5},
        "lonely": {},
        "one": {"deliveryOrder": "FIFO"},
        "shop%mail": {},
    }
    eve, bob = objects(view, "users")["eve"], objects(view, "users")["bob"]
    assert eve["enabled"] is bob["enabled"] is False
    granted = {entry["resource"]: entry["actions"] for entry in eve["entries"]}
    assert granted == {
        "Topic:orders": ["Sub", "Get"],
        "Topic:news": ["Sub", "Get"],
        "Group:bil*": ["Sub", "Get"],
    } | {"Topic:orders": granted["Topic:orders"]}
    assert ["Pub", "Get"] in [entry["actions"] for entry in eve["entries"]]
    assert {entry["resource"] for entry in bob["entries"]} == {"Topic:shop%*", "Group:shop%*"}


def test_each_object_of_rabbitmq_has_a_row() -> None:
    found = rows(converted_from_rabbitmq(RABBITMQ))
    assert len(found) == sum(len(value) for value in RABBITMQ.values() if isinstance(value, list))
    assert found["vhost /"][0] is CONVERTED
    assert found["vhost shop"] == (CHANGED, "clients set the namespace")
    assert found["exchange / orders"] == (CONVERTED, "topic orders")
    assert found["exchange shop events.v1"][0] is CHANGED
    for skipped in (
        "exchange / by-header",
        "exchange / amq.direct",
        "binding shop events.v1 -> mail a.*",
        "binding / by-header -> one",
        "binding / later -> one x y",
        "permission of zoe on /",
        "policy ttl",
        "parameters federation",
    ):
        assert found[skipped][0] is SKIPPED, skipped
    assert found["binding / orders -> billing paid"][1].endswith("with the tag paid")
    assert found["binding / news -> billing any"][1] == "group billing subscribes to topic news"
    assert "x-expires has no equivalent" in found["queue / lonely"][1]
    assert "60000" in found["queue shop mail"][1]
    assert "not read (a|b)+" in found["permission of bob on shop"][1]


def test_two_objects_with_one_name_of_ours_are_not_mixed() -> None:
    exchanges = [{"vhost": "/", "name": name, "type": "fanout"} for name in ("a.b", "a-b")]
    found = rows(converted_from_rabbitmq({"exchanges": exchanges}))
    assert (found["exchange / a.b"][0], found["exchange / a-b"][0]) == (CHANGED, SKIPPED)


ROCKETMQ: dict[str, Any] = {
    "topicConfigTable": {
        "orders": {"writeQueueNums": 16, "perm": 6, "attributes": {"message.type": "FIFO"}},
        "plain": {"writeQueueNums": 4, "perm": 4},
        "TBW102": {"writeQueueNums": 8},
        "%RETRY%billing": {"writeQueueNums": 1},
    },
    "subscriptionGroupTable": {
        "billing": {
            "retryMaxTimes": 16,
            "consumeMessageOrderly": True,
            "consumeFromMinEnable": False,
            "groupRetryPolicy": {"customizedRetryPolicy": {"next": [1_000, 5_000]}},
        },
        "mail": {"retryMaxTimes": -1, "consumeEnable": False},
        "CID_ONSAPI_OWNER": {},
    },
    "dataVersion": {"counter": 1},
}


def test_objects_of_rocketmq_become_topics_and_groups() -> None:
    view = converted_from_rocketmq(ROCKETMQ)
    assert objects(view, "topics") == {
        "orders": {"messageType": "FIFO", "queues": 16},
        "plain": {"queues": 4},
    }
    assert objects(view, "groups") == {
        "billing": {
            "deliveryOrder": "FIFO",
            "maxAttempts": 17,
            "startFrom": "latest",
            "retry": {"customized": {"nextMs": [1_000, 5_000]}},
        },
        "mail": {"deliveryOrder": "CONCURRENT", "maxAttempts": 17, "startFrom": "earliest"},
    }
    found = rows(view)
    assert found["topic orders"][0] is CONVERTED
    assert found["topic plain"][0] is CHANGED
    assert "tidemill group pause mail" in found["subscription group mail"][1]
    for skipped in ("topic TBW102", "topic %RETRY%billing", "dataVersion"):
        assert found[skipped][0] is SKIPPED
    assert found["subscription group CID_ONSAPI_OWNER"][0] is SKIPPED


def test_two_objects_of_rocketmq_with_one_name_of_ours_are_not_mixed() -> None:
    tables = {
        "topicConfigTable": {"a.b": {"writeQueueNums": 1}, "a-b": {"writeQueueNums": 9}},
        "subscriptionGroupTable": {"a.b": {"retryMaxTimes": 1}, "a-b": {"retryMaxTimes": 9}},
    }
    view = converted_from_rocketmq(tables)
    found = rows(view)
    for kind in ("topic", "subscription group"):
        assert (found[f"{kind} a.b"][0], found[f"{kind} a-b"][0]) == (CHANGED, SKIPPED)
    assert "became the topic a-b already" in found["topic a-b"][1]
    assert objects(view, "topics")["a-b"]["queues"] == 1
    assert objects(view, "groups")["a-b"]["maxAttempts"] == 2


@pytest.mark.parametrize(
    ("policy", "settings", "reason"),
    [
        (
            {"customizedRetryPolicy": {"next": [10_000] * 150}},
            {"customized": {"nextMs": [10_000] * 100}},
            "150 retry delays; a group has at most 100",
        ),
        (
            {"exponentialRetryPolicy": {"initial": 0, "max": 10}},
            {"exponential": {"initialMs": 1, "maxMs": 10, "multiplier": 2}},
            "initial of its retry policy was 0",
        ),
        (
            {"exponentialRetryPolicy": {"initial": 5, "max": 0, "multiplier": 0}},
            {"exponential": {"initialMs": 5, "maxMs": 1, "multiplier": 1}},
            "max of its retry policy was 0; it is at least 1 here; multiplier of",
        ),
        (
            {
                "type": "CUSTOMIZED",
                "exponentialRetryPolicy": {"initial": 5},
                "customizedRetryPolicy": {"next": [7]},
            },
            {"customized": {"nextMs": [7]}},
            "",
        ),
    ],
)
def test_a_retry_policy_of_rocketmq_has_a_reason_for_each_change(
    policy: dict[str, Any], settings: dict[str, Any], reason: str
) -> None:
    view = converted_from_rocketmq({"subscriptionGroupTable": {"g": {"groupRetryPolicy": policy}}})
    assert objects(view, "groups")["g"]["retry"] == settings
    outcome, text = rows(view)["subscription group g"]
    assert outcome is (CHANGED if reason else CONVERTED)
    assert reason in text


def test_a_topic_of_rocketmq_without_queues_has_a_reason() -> None:
    view = converted_from_rocketmq({"topicConfigTable": {"t": {"writeQueueNums": 0}}})
    assert rows(view)["topic t"][0] is CHANGED


@pytest.mark.parametrize(
    ("exported", "reason"),
    [
        ({"queues": {}}, "not a list of objects"),
        ({"queues": [5]}, "not a list of objects"),
        ({"queues": [{"name": 7}]}, "is not a text"),
        ({"queues": [{"name": "q", "arguments": {"x-delivery-limit": "4"}}]}, "whole number"),
        ({"topicConfigTable": {}}, "rabbitmqctl"),
    ],
)
def test_a_strange_file_of_rabbitmq_is_refused(exported: dict[str, Any], reason: str) -> None:
    with pytest.raises(Conflict, match=reason):
        converted_from_rabbitmq(exported)


@pytest.mark.parametrize(
    ("exported", "reason"),
    [
        ({"queues": []}, "mqadmin exportMetadata"),
        ({"topicConfigTable": []}, "not an object"),
        ({"topicConfigTable": {"t": {"writeQueueNums": True}}}, "whole number"),
        ({"topicConfigTable": {"t": {"writeQueueNums": -3}}}, "topics.0.queues"),
    ],
)
def test_a_strange_file_of_rocketmq_is_refused(exported: dict[str, Any], reason: str) -> None:
    with pytest.raises(Conflict, match=reason):
        converted_from_rocketmq(exported)


def test_a_report_names_commands_that_there_are() -> None:
    view = converted_from_rabbitmq({"users": [{"name": "ops", "tags": "administrator"}]})
    reasons = "; ".join(row.reason or "" for row in view.report)
    commands = re.findall(r"tidemill [^;]+", reasons)
    assert [one.split()[2] for one in commands] == ["rotate", "set"]
    assert [why for one in commands if (why := refusal(one))] == []


def with_permissions(count: int, *patterns: str, users: int = 1) -> dict[str, Any]:
    """Return a file with as many queues, and permissions of each user to read them."""
    return {
        "users": [{"name": f"u{number}", "tags": ""} for number in range(users)],
        "queues": [{"name": f"q{number}", "vhost": "/"} for number in range(count)],
        "permissions": [
            {"user": f"u{number}", "vhost": "/", "read": pattern}
            for number in range(users)
            for pattern in patterns
        ],
    }


def test_a_user_gets_at_most_the_entries_that_a_user_may_have() -> None:
    view = converted_from_rabbitmq(with_permissions(300, *["^q.*"] * 300))
    [user] = objects(view, "users").values()
    assert len(user["entries"]) == ENTRIES_MAX
    outcome, reason = rows(view)["permission of u0 on /"]
    assert outcome is CHANGED
    assert "at most 256 entries" in reason


def test_permissions_with_the_same_entries_add_them_once() -> None:
    view = converted_from_rabbitmq(with_permissions(2, *["^q.*"] * 5))
    [user] = objects(view, "users").values()
    resources = [entry["resource"] for entry in user["entries"]]
    assert resources == ["Topic:q0", "Topic:q1", "Group:q*"]
    assert rows(view)["permission of u0 on /"] == (CONVERTED, "entries of u0")


def test_a_file_gives_a_bounded_number_of_entries() -> None:
    view = converted_from_rabbitmq(with_permissions(200, "^q.*", users=150))
    users = objects(view, "users").values()
    assert sum(len(user["entries"]) for user in users) == FILE_ENTRIES_MAX
    assert rows(view)["permission of u0 on /"][0] is CONVERTED
    assert rows(view)["permission of u149 on /"][0] is CHANGED


def test_equal_entries_count_against_the_bound_of_a_file() -> None:
    entries = ConvertedEntries({f"q{number}": {"t"} for number in range(3)})
    own: list[dict[str, Any]] = []
    while entries.let_read("u", own, "q*"):
        assert entries.count <= FILE_ENTRIES_MAX
    assert own == [{"resource": "Topic:t", "actions": ["Sub", "Get"]}]


@pytest.mark.parametrize(
    ("vhosts", "vhost", "pattern", "is_converted"),
    [
        (["/"], "/", ".*", True),
        (["/", "acme"], "/", ".*", False),
        (["/", "acme"], "/", "^a.*", False),
        (["/", "acme"], "/", "^b.*", True),
        (["/", "acme"], "/", "^a$", True),
        (["/", "acme"], "acme", ".*", True),
        (["/", "a.b", "a/b"], "a.b", ".*", False),
        (["/", "a.b", "a/b"], "a.b", "^q$", False),
    ],
)
def test_a_permission_does_not_reach_other_vhosts(
    vhosts: list[str], vhost: str, pattern: str, *, is_converted: bool
) -> None:
    exported = {
        "vhosts": [{"name": name} for name in vhosts],
        "users": [{"name": "u", "tags": ""}],
        "permissions": [
            {"user": "u", "vhost": vhost, "configure": "", "write": pattern, "read": pattern}
        ],
    }
    view = converted_from_rabbitmq(exported)
    outcome, reason = rows(view)[f"permission of u on {vhost}"]
    assert bool(objects(view, "users")["u"]["entries"]) is is_converted
    assert outcome is (CONVERTED if is_converted else CHANGED)
    assert is_converted or f"write {pattern}, read {pattern} would match names of" in reason


def test_a_vhost_is_known_by_its_exchanges() -> None:
    exported = {
        "exchanges": [{"name": "salaries", "vhost": "acme", "type": "fanout"}],
        "users": [{"name": "u", "tags": ""}],
        "permissions": [{"user": "u", "vhost": "/", "write": ".*"}],
    }
    assert objects(converted_from_rabbitmq(exported), "users")["u"]["entries"] == []


def test_two_users_with_one_name_of_ours_do_not_share_rights() -> None:
    exported = {
        "users": [{"name": "a b", "tags": ""}, {"name": "a-b", "tags": ""}],
        "permissions": [
            {"user": "a b", "vhost": "/", "write": "^one$"},
            {"user": "a-b", "vhost": "/", "write": "^two$"},
        ],
    }
    view = converted_from_rabbitmq(exported)
    entries = objects(view, "users")["a-b"]["entries"]
    assert [entry["resource"] for entry in entries] == ["Topic:one"]
    assert rows(view)["user a-b"] == (SKIPPED, "another user became the user a-b already")
    assert rows(view)["permission of a-b on /"] == (SKIPPED, "its user was not converted")


@pytest.mark.parametrize("vhost", ["/", "shop"])
def test_a_name_with_a_percent_sign_stays_out_of_other_namespaces(vhost: str) -> None:
    exported = {
        "vhosts": [{"name": vhost}, {"name": "acme"}],
        "exchanges": [{"vhost": vhost, "name": "acme%x", "type": "fanout"}],
        "queues": [{"vhost": vhost, "name": "acme%q"}, {"vhost": vhost, "name": "acme-q"}],
    }
    view = converted_from_rabbitmq(exported)
    prefix = "" if vhost == "/" else f"{vhost}%"
    names = [
        one.name for one in (*(view.definitions.topics or ()), *(view.definitions.groups or ()))
    ]
    assert sorted(set(names)) == [f"{prefix}acme-q", f"{prefix}acme-x"]
    rows = {row.source: row for row in view.report}
    exchange = rows[f"exchange {vhost} acme%x"]
    assert (exchange.outcome, exchange.target) == ("CHANGED", f"topic {prefix}acme-x")
    assert "% ends a namespace, so acme%x is acme-x" in (exchange.reason or "")
    assert "% ends a namespace" in (rows[f"queue {vhost} acme%q"].reason or "")
    assert rows[f"queue {vhost} acme-q"].outcome == "SKIPPED"
