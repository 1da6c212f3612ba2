"""What topics and consumer groups may be called; the proxy and the broker's admin service ask.

The limits are those of the public protocol, so that an application behaves here as elsewhere.
"""

from __future__ import annotations

import re

from tidemill.common.errors import IllegalGroup, IllegalTopic

TOPIC_CHARS_MAX = 127
GROUP_CHARS_MAX = 120

# Topics that the broker makes for a group; clients may read the second kind.
RETRY_TOPIC_PREFIX = "%RETRY%"
DEAD_LETTER_TOPIC_PREFIX = "%DLQ%"
# Topics of the broker for itself; nobody else sees them.
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
        "TIMER",  # Its dead-letter topic is that of the timers.
    ]
)


def check_topic(name: str) -> None:
    """Raise IllegalTopic unless clients may name a topic so."""
    if not name.strip():
        raise IllegalTopic("the topic name is blank")
    if len(name) > TOPIC_CHARS_MAX:
        raise IllegalTopic(
            f"a topic name has at most {TOPIC_CHARS_MAX} characters, not {len(name)}"
        )
    if not _RESOURCE_NAME.fullmatch(name):
        raise IllegalTopic("a topic name consists of A-Z a-z 0-9 _ - % |")
    if name in _SYSTEM_NAMES or name.startswith((_SYSTEM_PREFIX, HIDDEN_TOPIC_PREFIX)):
        raise IllegalTopic(f"the topic name {name} belongs to the system")


def check_group(name: str) -> None:
    """Raise IllegalGroup unless clients may name a consumer group so."""
    if not name.strip():
        raise IllegalGroup("the consumer group name is blank")
    if len(name) > GROUP_CHARS_MAX:
        raise IllegalGroup(
            f"a consumer group name has at most {GROUP_CHARS_MAX} characters, not {len(name)}"
        )
    if not _RESOURCE_NAME.fullmatch(name):
        raise IllegalGroup("a consumer group name consists of A-Z a-z 0-9 _ - % |")
    if name in _SYSTEM_GROUPS or name.startswith(_SYSTEM_PREFIX):
        raise IllegalGroup(f"the consumer group name {name} belongs to the system")
    if name.startswith((RETRY_TOPIC_PREFIX, DEAD_LETTER_TOPIC_PREFIX)):
        raise IllegalGroup(
            f"a consumer group name does not begin with {RETRY_TOPIC_PREFIX} or"
            f" {DEAD_LETTER_TOPIC_PREFIX}, as the broker's own topics do"
        )


def check_own_topic(name: str) -> None:
    """Raise IllegalTopic unless users may create a topic of that name."""
    check_topic(name)
    if name.startswith((RETRY_TOPIC_PREFIX, DEAD_LETTER_TOPIC_PREFIX)):
        raise IllegalTopic("retry and dead-letter topics are made by the broker")
