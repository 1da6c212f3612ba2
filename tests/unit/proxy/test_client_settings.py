"""What each client is told to work with, by role and language."""

from __future__ import annotations

import pytest
from google.protobuf.duration_pb2 import Duration

from tidemill.common.errors import BadRequest, IllegalGroup, IllegalTopic, RequestError
from tidemill.common.item_bytes import ITEM_BYTES_MAX
from tidemill.message import limits
from tidemill.proxy.clients.settings import (
    DEFAULT_GROUP,
    check_settings,
    consumer_settings,
    measured_languages,
    producer_settings,
)
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as link_pb2

LANGUAGES = [
    v2.LANGUAGE_UNSPECIFIED,
    v2.JAVA,
    v2.CPP,
    v2.DOT_NET,
    v2.GOLANG,
    v2.RUST,
    v2.PYTHON,
    v2.NODE_JS,
]


def producer(language: v2.Language.ValueType = v2.JAVA) -> v2.Settings:
    return v2.Settings(
        client_type=v2.PRODUCER,
        user_agent=v2.UA(language=language, version="5.1.2"),
        request_timeout=Duration(seconds=3),
        publishing=v2.Publishing(topics=[v2.Resource(resource_namespace="space", name="topic")]),
    )


def consumer(
    language: v2.Language.ValueType = v2.JAVA, kind: v2.ClientType.ValueType = v2.PUSH_CONSUMER
) -> v2.Settings:
    return v2.Settings(
        client_type=kind,
        user_agent=v2.UA(language=language),
        subscription=v2.Subscription(
            group=v2.Resource(resource_namespace="space", name="group"),
            subscriptions=[
                v2.SubscriptionEntry(
                    topic=v2.Resource(name="topic"),
                    expression=v2.FilterExpression(type=v2.TAG, expression="*"),
                )
            ],
        ),
    )


def group(**fields: object) -> link_pb2.GroupConfig:
    return link_pb2.GroupConfig(max_attempts=4, **fields)  # type: ignore[arg-type]  # keywords by name


EXPONENTIAL = group(
    exponential=link_pb2.ExponentialRetry(initial_ms=1500, max_ms=5000, multiplier=2.0)
)
CUSTOMIZED = group(customized=link_pb2.CustomizedRetry(next_ms=[1000, 2500, 60_000]))


def answer(settings: v2.Settings, config: link_pb2.GroupConfig = EXPONENTIAL) -> v2.Settings:
    return consumer_settings(settings, config, long_polling_max_ms=20_000)


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_producer_gets_an_exponential_back_off(language: v2.Language.ValueType) -> None:
    policy = producer_settings(producer(language), item_bytes_max=ITEM_BYTES_MAX).backoff_policy
    assert policy.max_attempts == 3
    assert policy.exponential_backoff.initial.ToMilliseconds() == 10
    assert policy.exponential_backoff.max.ToMilliseconds() == 1000
    assert policy.exponential_backoff.multiplier == 2.0


def test_a_producer_gets_its_own_settings_back_with_the_limits() -> None:
    settings = producer()
    answered = producer_settings(settings, item_bytes_max=ITEM_BYTES_MAX)
    assert answered.publishing.topics == settings.publishing.topics
    assert answered.publishing.max_body_size == ITEM_BYTES_MAX - (2 << 10)
    assert answered.publishing.validate_message_type
    assert answered.request_timeout == settings.request_timeout
    assert answered.user_agent == settings.user_agent
    assert not answered.metric.on


def test_a_consumer_gets_its_own_settings_back_with_the_limits() -> None:
    settings = consumer()
    subscription = answer(settings).subscription
    assert subscription.group == settings.subscription.group
    assert subscription.subscriptions == settings.subscription.subscriptions
    assert subscription.receive_batch_size == 32
    assert subscription.long_polling_timeout.ToMilliseconds() == 20_000
    assert subscription.HasField("fifo")
    assert not subscription.fifo
    assert not subscription.HasField("lite_subscription_quota")


def test_a_consumer_of_an_ordered_group_works_in_order() -> None:
    assert answer(
        consumer(), group(delivery_order=link_pb2.DELIVERY_ORDER_ORDERED)
    ).subscription.fifo


@pytest.mark.parametrize("kind", [v2.LITE_PUSH_CONSUMER, v2.LITE_SIMPLE_CONSUMER])
def test_a_lite_consumer_gets_no_quota_before_lite_topics_are_served(
    kind: v2.ClientType.ValueType,
) -> None:
    assert not answer(consumer(kind=kind)).subscription.lite_subscription_quota


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("config", [EXPONENTIAL, CUSTOMIZED, DEFAULT_GROUP])
def test_every_consumer_gets_a_back_off_with_a_strategy(
    language: v2.Language.ValueType, config: link_pb2.GroupConfig
) -> None:
    policy = answer(consumer(language), config).backoff_policy
    assert policy.max_attempts == config.max_attempts
    if policy.WhichOneof("strategy") == "customized_backoff":
        assert policy.customized_backoff.next
    else:
        assert policy.exponential_backoff.initial.ToMilliseconds() > 0


def test_a_python_consumer_gets_a_list_of_whole_seconds() -> None:
    policy = answer(consumer(v2.PYTHON)).backoff_policy
    steps = [(step.seconds, step.nanos) for step in policy.customized_backoff.next]
    assert steps == [(2, 0), (3, 0), (5, 0)]
    policy = answer(consumer(v2.PYTHON), CUSTOMIZED).backoff_policy
    assert [step.seconds for step in policy.customized_backoff.next] == [1, 3, 60]


def test_a_node_js_consumer_gets_an_exponential_back_off() -> None:
    policy = answer(consumer(v2.NODE_JS), CUSTOMIZED).backoff_policy
    assert policy.exponential_backoff.initial.ToMilliseconds() == 1000
    assert policy.exponential_backoff.max.ToMilliseconds() == 60_000


def test_other_consumers_get_the_settings_of_their_group() -> None:
    policy = answer(consumer(v2.GOLANG), CUSTOMIZED).backoff_policy
    steps = [step.ToMilliseconds() for step in policy.customized_backoff.next]
    assert steps == [1000, 2500, 60_000]
    policy = answer(consumer(v2.GOLANG)).backoff_policy
    assert policy.exponential_backoff.initial.ToMilliseconds() == 1500
    assert policy.exponential_backoff.max.ToMilliseconds() == 5000


def test_a_producer_without_topics_is_legal() -> None:
    check_settings(v2.Settings(client_type=v2.PRODUCER, publishing=v2.Publishing()))


def test_settings_without_a_client_type_or_a_role_are_refused() -> None:
    for settings in (
        v2.Settings(publishing=v2.Publishing()),
        v2.Settings(client_type=v2.PRODUCER),
        v2.Settings(client_type=-1, publishing=v2.Publishing()),  # type: ignore[arg-type]  # Sent.
        v2.Settings(client_type=99, publishing=v2.Publishing()),  # type: ignore[arg-type]  # Sent.
    ):
        with pytest.raises(RequestError):
            check_settings(settings)


def test_settings_with_illegal_names_are_refused() -> None:
    settings = producer()
    settings.publishing.topics[0].name = "no topic"
    with pytest.raises(IllegalTopic):
        check_settings(settings)
    settings = consumer()
    settings.subscription.subscriptions[0].topic.name = ""
    with pytest.raises(IllegalTopic):
        check_settings(settings)
    settings = consumer()
    settings.subscription.group.name = ""
    with pytest.raises(IllegalGroup):
        check_settings(settings)


@pytest.mark.parametrize("field", ["version", "platform", "hostname"])
def test_a_user_agent_is_limited(field: str) -> None:
    settings = producer()
    setattr(settings.user_agent, field, "a" * limits.USER_AGENT.limit)
    check_settings(settings)
    setattr(settings.user_agent, field, "a" * (limits.USER_AGENT.limit + 1))
    with pytest.raises(BadRequest):
        check_settings(settings)


def test_only_otlp_clients_send_metrics_to_their_access_point() -> None:
    measured = measured_languages(is_on=True, is_tls_required=False)
    point = v2.Endpoints(scheme=v2.IPv4, addresses=[v2.Address(host="10.0.0.9", port=8081)])
    languages = set()
    for language in LANGUAGES:
        settings = producer(language)
        assert not producer_settings(
            settings, measured=measured, item_bytes_max=ITEM_BYTES_MAX
        ).metric.on
        settings.access_point.CopyFrom(point)
        answer = producer_settings(settings, measured=measured, item_bytes_max=ITEM_BYTES_MAX)
        if answer.metric.on:
            assert answer.metric.endpoints == point
            languages.add(language)
        assert not producer_settings(settings, item_bytes_max=ITEM_BYTES_MAX).metric.on
    assert languages == {v2.JAVA, v2.PYTHON}
    consumes = consumer(v2.PYTHON)
    consumes.access_point.CopyFrom(point)
    answer = consumer_settings(
        consumes, DEFAULT_GROUP, long_polling_max_ms=20_000, measured=measured
    )
    assert answer.metric.on
    assert measured_languages(is_on=True, is_tls_required=True) == {v2.JAVA}
    assert not measured_languages(is_on=False, is_tls_required=False)


def test_a_client_cannot_choose_its_metrics_endpoint() -> None:
    settings = producer(v2.JAVA)
    settings.metric.on = True
    settings.metric.endpoints.addresses.add(host="elsewhere", port=1)
    assert producer_settings(settings, item_bytes_max=ITEM_BYTES_MAX).metric == v2.Metric(on=False)
