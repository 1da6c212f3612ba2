"""Full names of topics and consumer groups: each is of one namespace, and comes back as it was."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.common.errors import BadRequest, IllegalGroup, IllegalTopic
from tidemill.message.namespaces import check_namespace, full_name, namespace_of, without_namespace
from tidemill.message.resource_names import check_group, check_topic
from tidemill.message.resources import ResourceName, resource_name
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2

words = st.text("abAB01_-|", min_size=1, max_size=6)
prefixes = st.sampled_from(["", "%DLQ%", "%RETRY%"])
names = st.builds("".join, st.tuples(prefixes, words))
retry_topics = st.builds("%RETRY%{}+{}".format, words, words)


@given(words, names | retry_topics)
def test_a_full_name_gives_back_the_bare_name_and_its_namespace(namespace: str, name: str) -> None:
    full = full_name(namespace, name)
    assert without_namespace(namespace, full) == name
    assert namespace_of(full) == namespace
    assert full_name("", full) == full
    assert full_name(namespace, full) == full, "RocketMQ wraps no name twice"


@given(st.tuples(words, names | retry_topics), st.tuples(words, names | retry_topics))
def test_two_clients_share_a_full_name_only_with_namespace_and_name(
    first: tuple[str, str], second: tuple[str, str]
) -> None:
    assert (full_name(*first) == full_name(*second)) == (first == second)


@given(words, words, names)
def test_a_name_of_another_namespace_is_shown_as_it_is(own: str, other: str, name: str) -> None:
    full = full_name(other, name)
    assert (without_namespace(own, full) == full) == (own != other)


@pytest.mark.parametrize(
    ("namespace", "name", "full"),
    [
        ("", "orders", "orders"),
        ("", "shop%orders", "shop%orders"),
        ("shop", "orders", "shop%orders"),
        ("shop", "shop%orders", "shop%orders"),
        ("shop", "other%orders", "shop%other%orders"),
        ("shop", "%DLQ%group", "%DLQ%shop%group"),
        ("shop", "%DLQ%shop%group", "%DLQ%shop%group"),
        ("shop", "%RETRY%group+orders", "%RETRY%shop%group+shop%orders"),
        ("shop", "", ""),
        ("shop", " ", " "),
    ],
)
def test_names_are_wrapped_as_by_rocketmq(namespace: str, name: str, full: str) -> None:
    assert full_name(namespace, name) == full
    assert resource_name(v2.Resource(name=name), namespace) == ResourceName(full, namespace)


@pytest.mark.parametrize("name", ["%b", "b%", "shop%"])
def test_a_namespace_does_not_make_a_name_with_an_empty_part_usable(name: str) -> None:
    with pytest.raises(IllegalTopic, match="empty part"):
        check_topic(full_name("shop", name))
    with pytest.raises(IllegalGroup, match="empty part"):
        check_group(full_name("shop", name))


@pytest.mark.parametrize("name", ["TBW102", "rmq_sys_x", "%SYS%TIMER"])
def test_a_namespace_does_not_make_a_reserved_topic_name_usable(name: str) -> None:
    with pytest.raises(IllegalTopic, match="reserved"):
        check_topic(full_name("shop", name))


def test_a_namespace_does_not_make_a_reserved_group_name_usable() -> None:
    with pytest.raises(IllegalGroup, match="reserved"):
        check_group(full_name("shop", "TIMER"))


@pytest.mark.parametrize("namespace", ["a%b", "%", "a b", "ä", "a.b", "a\n", "n" * 119])
def test_an_illegal_namespace_is_rejected(namespace: str) -> None:
    with pytest.raises(BadRequest, match="namespace"):
        full_name(namespace, "orders")
    with pytest.raises(BadRequest, match="namespace"):
        check_namespace(namespace)


def test_the_longest_namespace_leaves_room_for_a_name() -> None:
    check_group(full_name("n" * 118, "g"))
    check_topic(full_name("n" * 118, "t" * 8))
    with pytest.raises(IllegalGroup, match="with its namespace has at most 120 characters"):
        check_group(full_name("n" * 118, "gg"))
    with pytest.raises(IllegalTopic, match="with its namespace has at most 127 characters"):
        check_topic(full_name("n" * 118, "t" * 9))


def test_an_answer_names_a_resource_as_its_client_does() -> None:
    named = resource_name(v2.Resource(resource_namespace="shop", name="shop%orders"), "other")
    assert named.resource() == v2.Resource(resource_namespace="shop", name="orders")
    alone = resource_name(v2.Resource(name="shop%orders"))
    assert alone.resource() == v2.Resource(name="shop%orders")
