"""Any JSON as a foreign file is converted, or refused with a reason."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.admin.definitions.from_rabbitmq import converted_from_rabbitmq
from tidemill.admin.definitions.from_rocketmq import converted_from_rocketmq
from tidemill.common.errors import Conflict

# A file may have lone surrogates: JSON escapes them.
TEXTS = st.text(max_size=8) | st.sampled_from(["\ud800", "q\udfff"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=5,
)
NAMES = st.sampled_from(
    ["/", "shop", "a.b", "a-b", "q", "amq.x", "TBW102", "", "%RETRY%g", "ü" * 50, "\ud800"]
)


def objects(**fields: Any) -> st.SearchStrategy[list[Any]]:
    """Return lists of objects that have most of these fields, some with a strange value."""
    known = {name: strategy | VALUES for name, strategy in fields.items()}
    return st.lists(st.fixed_dictionaries({}, optional=known), max_size=4)


PATTERNS = st.sampled_from(["", ".*", "^q$", "^q.*", "(a|b)", "^$"])
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "x-delivery-limit": st.integers() | VALUES,
        "x-message-ttl": st.integers() | VALUES,
        "x-single-active-consumer": VALUES,
        "x-delayed-type": NAMES | VALUES,
        "x-max-priority": VALUES,
    },
)
KINDS = st.sampled_from(["direct", "fanout", "topic", "headers", "x-delayed-message", "?"])
RABBITMQ = st.fixed_dictionaries(
    {},
    optional={
        "vhosts": objects(name=NAMES),
        "exchanges": objects(vhost=NAMES, name=NAMES, type=KINDS, arguments=ARGUMENTS),
        "queues": objects(vhost=NAMES, name=NAMES, arguments=ARGUMENTS),
        "bindings": objects(vhost=NAMES, source=NAMES, destination=NAMES, routing_key=NAMES),
        "users": objects(name=NAMES, tags=st.lists(VALUES, max_size=2) | VALUES),
        "permissions": objects(
            user=NAMES, vhost=NAMES, configure=PATTERNS, write=PATTERNS, read=PATTERNS
        ),
        "policies": objects(name=NAMES, definition=VALUES),
        "parameters": VALUES,
    },
)
CONFIGS = st.dictionaries(
    NAMES,
    st.fixed_dictionaries(
        {},
        optional={
            "writeQueueNums": st.integers() | VALUES,
            "perm": st.integers() | VALUES,
            "attributes": st.dictionaries(st.just("message.type"), NAMES | VALUES) | VALUES,
            "retryMaxTimes": st.integers() | VALUES,
            "groupRetryPolicy": st.dictionaries(
                st.sampled_from(["exponentialRetryPolicy", "customizedRetryPolicy"]),
                st.dictionaries(
                    st.sampled_from(["initial", "max", "multiplier", "next"]),
                    st.integers() | st.lists(st.integers(), max_size=3) | VALUES,
                ),
            )
            | VALUES,
        },
    )
    | VALUES,
    max_size=4,
)
ROCKETMQ = st.fixed_dictionaries(
    {}, optional={"topicConfigTable": CONFIGS | VALUES, "subscriptionGroupTable": CONFIGS | VALUES}
)


@given(RABBITMQ)
def test_a_file_of_rabbitmq_is_converted_or_refused(exported: dict[str, Any]) -> None:
    try:
        view = converted_from_rabbitmq(exported)
    except Conflict:
        return
    rows = sum(len(value) for value in exported.values() if isinstance(value, list))
    assert len(view.report) == rows
    view.model_dump_json()


@given(ROCKETMQ)
def test_a_file_of_rocketmq_is_converted_or_refused(exported: dict[str, Any]) -> None:
    try:
        view = converted_from_rocketmq(exported)
    except Conflict:
        return
    tables = [table for table in exported.values() if isinstance(table, dict)]
    assert len(view.report) == sum(len(table) for table in tables)
    view.model_dump_json()


@pytest.mark.parametrize("convert", [converted_from_rabbitmq, converted_from_rocketmq])
@given(st.dictionaries(st.text(max_size=8), VALUES, max_size=4))
def test_another_file_is_refused(convert: Any, exported: dict[str, Any]) -> None:
    with pytest.raises(Conflict):
        convert(exported)
