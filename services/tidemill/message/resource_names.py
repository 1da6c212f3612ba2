"""Rules for the names of topics and consumer groups, for the proxy and the admin service.

The limits are those of the public protocol, so applications behave as with other servers.
"""

from __future__ import annotations

import re

from tidemill.common.errors import IllegalGroup, IllegalTopic

TOPIC_CHARS_MAX = 127
GROUP_CHARS_MAX = 120

# Topics that the broker creates for a consumer group; clients may read dead letters.
RETRY_TOPIC_PREFIX = "%RETRY%"
DEAD_LETTER_TOPIC_PREFIX = "%DLQ%"
# Internal topics of the broker; clients do not see them.
TIMER_DEAD_LETTER_TOPIC = f"{DEAD_LETTER_TOPIC_PREFIX}TIMER"  # of delayed messages
HIDDEN_TOPIC_PREFIX = "%SYS%"

_RESOURCE_NAME = re.compile(r"[A-Za-z0-9_\-%|]+")
_SYSTEM_PREFIX = "rmq_sys_"
_SYSTEM_NAMES = frozenset(
    [
        "TBW102",
        "SCHEDULE_TOPIC_XXXX",
        "BenchmarkTest",
        "RMQ_SYS_TRANS_HALF_TOPIC",
        "RMQ_SYS_TRACE_TOPIC",
        "RMQ_SYS_TRANS_OP_HALF_TOPIC",
        "TRANS_CHECK_MAX_TIME_TOPIC",
        "SELF_TEST_TOPIC",
        "OFFSET_MOVED_EVENT",
        "CHECKPOINT_TOPIC",
    ]
)
_SYSTEM_GROUPS = frozenset(
    [
        "DEFAULT_CONSUMER",
        "DEFAULT_PRODUCER",
        "TOOLS_CONSUMER",
        "SCHEDULE_CONSUMER",
        "FILTERSRV_CONSUMER",
        "__MONITOR_CONSUMER",
        "CLIENT_INNER_PRODUCER",
        "SELF_TEST_P_GROUP",
        "SELF_TEST_C_GROUP",
        "CID_ONS-HTTP-PROXY",
        "CID_ONSAPI_PERMISSION",
        "CID_ONSAPI_OWNER",
        "CID_ONSAPI_PULL",
        "CID_RMQ_SYS_TRANS",
        "TIMER",  # Its dead-letter topic belongs to the timers.
    ]
)


def check_topic(name: str) -> None:
    """Raise IllegalTopic unless clients may use `name` for a topic."""
    if not name.strip():
        raise IllegalTopic("the topic name is blank")
    if len(name) > TOPIC_CHARS_MAX:
        raise IllegalTopic(
            f"a topic name has at most {TOPIC_CHARS_MAX} characters, not {len(name)}"
        )
    if not _RESOURCE_NAME.fullmatch(name):
        raise IllegalTopic("a topic name may only contain A-Z a-z 0-9 _ - % |")
    if name in _SYSTEM_NAMES or name.startswith((_SYSTEM_PREFIX, HIDDEN_TOPIC_PREFIX)):
        raise IllegalTopic(f"the topic name {name} is reserved for the system")


def check_group(name: str) -> None:
    """Raise IllegalGroup unless clients may use `name` for a consumer group."""
    if not name.strip():
        raise IllegalGroup("the consumer group name is blank")
    if len(name) > GROUP_CHARS_MAX:
        raise IllegalGroup(
            f"a consumer group name has at most {GROUP_CHARS_MAX} characters, not {len(name)}"
        )
    if not _RESOURCE_NAME.fullmatch(name):
        raise IllegalGroup("a consumer group name may only contain A-Z a-z 0-9 _ - % |")
    if name in _SYSTEM_GROUPS or name.startswith(_SYSTEM_PREFIX):
        raise IllegalGroup(f"the consumer group name {name} is reserved for the system")
    if name.startswith((RETRY_TOPIC_PREFIX, DEAD_LETTER_TOPIC_PREFIX)):
        raise IllegalGroup(
            f"a consumer group name must not begin with {RETRY_TOPIC_PREFIX} or"
            f" {DEAD_LETTER_TOPIC_PREFIX}, which are prefixes of the broker's own topics"
        )


def check_own_topic(name: str) -> None:
    """Raise IllegalTopic unless users may create a topic with this name."""
    check_topic(name)
    if name.startswith((RETRY_TOPIC_PREFIX, DEAD_LETTER_TOPIC_PREFIX)):
        raise IllegalTopic("only the broker creates retry and dead-letter topics")
