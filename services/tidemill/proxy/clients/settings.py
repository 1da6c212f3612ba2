"""The effective settings of a client, by its language.

The answer is a copy of the client's own settings. The server overwrites some fields.
Clients of some languages support only one of the two kinds of back-off, or interpret it
differently.
"""

from __future__ import annotations

from collections.abc import Collection

from google.protobuf.duration_pb2 import Duration

from tidemill.common.errors import BadRequest, UnrecognizedClientType
from tidemill.common.item_bytes import DELIVERY_BYTES
from tidemill.message import limits
from tidemill.message.resource_names import check_group, check_topic
from tidemill.message.resources import resource_name
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as link_pb2

RECEIVE_BATCH_SIZE = 32

PROPERTIES_BYTES = 1 << 10  # of a usual message, with its id and its other stored fields

# Retries of failed sends.
_PRODUCER_ATTEMPTS = 3
_PRODUCER_BACKOFF = v2.ExponentialBackoff(
    initial=Duration(nanos=10_000_000), max=Duration(seconds=1), multiplier=2.0
)
# Steps of an exponential policy that is sent as a list.
_CUSTOMIZED_STEPS_MAX = 32

# A consumer group that has never been used.
DEFAULT_GROUP = link_pb2.GroupConfig(
    delivery_order=link_pb2.DELIVERY_ORDER_CONCURRENT,
    max_attempts=17,
    exponential=link_pb2.ExponentialRetry(initial_ms=10_000, max_ms=7_200_000, multiplier=2.0),
)

_CLIENT_TYPES = frozenset(v2.ClientType.values())


def check_client_type(client_type: int) -> None:
    """Raise UnrecognizedClientType for a missing or unknown client type."""
    if client_type == v2.CLIENT_TYPE_UNSPECIFIED:
        raise UnrecognizedClientType("the client type is missing")
    if client_type not in _CLIENT_TYPES:
        raise UnrecognizedClientType(f"unknown client type {client_type}")


def resources_of(settings: v2.Settings) -> list[v2.Resource]:
    """Return the topics of the settings of a client, and its consumer group if it has one."""
    if not settings.HasField("subscription"):
        return list(settings.publishing.topics)
    subscription = settings.subscription
    return [subscription.group, *[entry.topic for entry in subscription.subscriptions]]


def set_namespaces(settings: v2.Settings, namespace: str) -> None:
    """Name every resource as answers do; `namespace` is that of resources without one.

    Raises RequestError for an illegal namespace.
    """
    for resource in resources_of(settings):
        resource.CopyFrom(resource_name(resource, namespace).resource())


def check_settings(settings: v2.Settings, namespace: str = "") -> None:
    """Raise RequestError if the settings of a client are not valid.

    `namespace` is that of resources without one.
    """
    check_client_type(settings.client_type)
    agent = settings.user_agent
    for text in (agent.version, agent.platform, agent.hostname):
        limits.USER_AGENT.check_text(text)
    match settings.WhichOneof("pub_sub"):
        case "publishing":
            limits.SETTINGS_ENTRIES.check_count(len(settings.publishing.topics))
            for topic in settings.publishing.topics:
                check_topic(resource_name(topic, namespace).full)
        case "subscription":
            check_group(resource_name(settings.subscription.group, namespace).full)
            limits.SETTINGS_ENTRIES.check_count(len(settings.subscription.subscriptions))
            for entry in settings.subscription.subscriptions:
                check_topic(resource_name(entry.topic, namespace).full)
        case _:
            raise BadRequest("the settings have neither publishing nor subscription")


def producer_settings(
    settings: v2.Settings, *, item_bytes_max: int, measured: Collection[int] = frozenset()
) -> v2.Settings:
    """Return the settings for a producer; `item_bytes_max` is the largest message.

    Clients of the languages in `measured` send metrics to this proxy.
    """
    answer = _copy(settings, measured)
    # Producers check their bodies against it. The server also counts the properties.
    body_bytes_max = item_bytes_max - DELIVERY_BYTES - PROPERTIES_BYTES
    answer.publishing.max_body_size = min(limits.BODY.limit, body_bytes_max)
    answer.publishing.validate_message_type = True
    # Java and Node.js producers fail on any other kind.
    answer.backoff_policy.CopyFrom(
        v2.RetryPolicy(max_attempts=_PRODUCER_ATTEMPTS, exponential_backoff=_PRODUCER_BACKOFF)
    )
    return answer


def consumer_settings(
    settings: v2.Settings,
    group: link_pb2.GroupConfig,
    *,
    long_polling_max_ms: int,
    measured: Collection[int] = frozenset(),
) -> v2.Settings:
    """Return the settings for a consumer of `group`; `measured` as for a producer."""
    answer = _copy(settings, measured)
    subscription = answer.subscription
    subscription.fifo = group.delivery_order == link_pb2.DELIVERY_ORDER_ORDERED
    subscription.receive_batch_size = RECEIVE_BATCH_SIZE
    subscription.long_polling_timeout.CopyFrom(_duration(long_polling_max_ms))
    # Lite topics are not served: the client's own quota would read as granted.
    subscription.ClearField("lite_subscription_quota")
    subscription.ClearField("max_lite_topic_size")
    answer.backoff_policy.CopyFrom(_backoff(group, settings.user_agent.language))
    return answer


def _copy(settings: v2.Settings, measured: Collection[int]) -> v2.Settings:
    answer = v2.Settings()
    answer.CopyFrom(settings)
    # The client's own value could name another endpoint.
    answer.metric.Clear()
    answer.metric.on = False
    if settings.user_agent.language in measured and settings.access_point.addresses:
        answer.metric.on = True
        answer.metric.endpoints.CopyFrom(settings.access_point)
    return answer


def measured_languages(*, is_on: bool, is_tls_required: bool) -> frozenset[int]:
    """Return the languages of clients that send metrics.

    Go and C++ clients use OpenCensus. Node.js and Rust clients have no metrics.
    """
    if not is_on:
        return frozenset()
    # Python clients always send metrics without TLS.
    return frozenset({v2.JAVA} if is_tls_required else {v2.JAVA, v2.PYTHON})


def _backoff(group: link_pb2.GroupConfig, language: int) -> v2.RetryPolicy:
    policy = v2.RetryPolicy(max_attempts=group.max_attempts)
    match language:
        case v2.PYTHON:
            # Python clients read any other policy as one second, and drop fractions.
            steps = [Duration(seconds=max(-(-step // 1000), 1)) for step in _steps_ms(group)]
            policy.customized_backoff.next.extend(steps)
        case v2.NODE_JS:
            # Node.js clients read any other policy as no pause.
            policy.exponential_backoff.CopyFrom(_exponential(group))
        case _ if group.HasField("customized"):
            policy.customized_backoff.next.extend(map(_duration, _steps_ms(group)))
        case _:
            policy.exponential_backoff.CopyFrom(_exponential(group))
    return policy


def _steps_ms(group: link_pb2.GroupConfig) -> list[int]:
    """Return the pause after each attempt of a message; never empty."""
    if group.HasField("customized"):
        return list(group.customized.next_ms) or [DEFAULT_GROUP.exponential.initial_ms]
    retry = group.exponential
    count = min(max(group.max_attempts - 1, 1), _CUSTOMIZED_STEPS_MAX)
    steps_ms: list[int] = []
    step_ms = float(retry.initial_ms)
    for _ in range(count):
        steps_ms.append(int(min(step_ms, retry.max_ms)))
        step_ms = min(step_ms * retry.multiplier, retry.max_ms)
    return steps_ms


def _exponential(group: link_pb2.GroupConfig) -> v2.ExponentialBackoff:
    if group.HasField("customized"):
        steps_ms = _steps_ms(group)
        return v2.ExponentialBackoff(
            initial=_duration(steps_ms[0]), max=_duration(max(steps_ms)), multiplier=2.0
        )
    retry = group.exponential
    return v2.ExponentialBackoff(
        initial=_duration(retry.initial_ms),
        max=_duration(retry.max_ms),
        multiplier=retry.multiplier,
    )


def _duration(value_ms: int) -> Duration:
    return Duration(seconds=value_ms // 1000, nanos=value_ms % 1000 * 1_000_000)
