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
HALF_DEAD_LETTER_TOPIC = f"{DEAD_LETTER_TOPIC_PREFIX}HALF"  # of expired half messages
HIDDEN_TOPIC_PREFIX = "%SYS%"
TIMER_TOPIC = f"{HIDDEN_TOPIC_PREFIX}TIMER"  # pending delayed messages
HALF_TOPIC = f"{HIDDEN_TOPIC_PREFIX}HALF"  # open half messages
# Hidden topics, whose messages the engine itself keeps as long as it needs them.
HIDDEN_TOPICS = frozenset({TIMER_TOPIC, HALF_TOPIC})
# Dead-letter topics of the broker itself: their messages belong to many topics.
BROKER_DEAD_LETTER_TOPICS = frozenset({TIMER_DEAD_LETTER_TOPIC, HALF_DEAD_LETTER_TOPIC})

_RESOURCE_NAME = re.compile(r"[A-Za-z0-9_\-%|]+")
NAMESPACE_SEPARATOR = "%"
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
        "TIMER",  # Its dead-letter topic belongs to the timers,
        "HALF",  # and this one's to the half messages.
    ]
)


def is_reserved(name: str) -> bool:
    """Whether a name belongs to the system. Such a name gets no namespace."""
    return (
        name in _SYSTEM_NAMES
        or name in _SYSTEM_GROUPS
        or name.startswith((_SYSTEM_PREFIX, HIDDEN_TOPIC_PREFIX))
    )


def split_prefix(name: str) -> tuple[str, str]:
    """Return the prefix of the broker's own topics, or nothing, and the other part of a name."""
    for prefix in (DEAD_LETTER_TOPIC_PREFIX, RETRY_TOPIC_PREFIX):
        if name.startswith(prefix):
            return prefix, name[len(prefix) :]
    return "", name


def _empty_part(name: str) -> str:
    """Return the problem of a name with an empty namespace or an empty part; else nothing."""
    if all(split_prefix(name)[1].split(NAMESPACE_SEPARATOR)):
        return ""
    return (
        f"the name {name} has an empty part: {NAMESPACE_SEPARATOR} separates a namespace from a"
        f" name, and both must have characters"
    )


def check_begin(text: str, *, chars_max: int) -> str:
    """Return the reason why no topic or consumer group begins with a text; else nothing."""
    if len(text) > chars_max:
        return f"a name has at most {chars_max} characters, not {len(text)}"
    if not _RESOURCE_NAME.fullmatch(text):
        return "a name may only contain A-Z a-z 0-9 _ - % |"
    if text.startswith(NAMESPACE_SEPARATOR):
        return f"a name does not begin with {NAMESPACE_SEPARATOR}"
    return ""


def check_topic(name: str) -> None:
    """Raise IllegalTopic unless clients may use `name` for a topic."""
    if not name.strip():
        raise IllegalTopic("the topic name is blank")
    if len(name) > TOPIC_CHARS_MAX:
        raise IllegalTopic(
            f"a topic name with its namespace has at most {TOPIC_CHARS_MAX} characters,"
            f" not {len(name)}"
        )
    if not _RESOURCE_NAME.fullmatch(name):
        raise IllegalTopic("a topic name may only contain A-Z a-z 0-9 _ - % |")
    if name in _SYSTEM_NAMES or name.startswith((_SYSTEM_PREFIX, HIDDEN_TOPIC_PREFIX)):
        raise IllegalTopic(f"the topic name {name} is reserved for the system")
    if problem := _empty_part(name):
        raise IllegalTopic(problem)


def check_group(name: str) -> None:
    """Raise IllegalGroup unless clients may use `name` for a consumer group."""
    if not name.strip():
        raise IllegalGroup("the consumer group name is blank")
    if len(name) > GROUP_CHARS_MAX:
        raise IllegalGroup(
            f"a consumer group name with its namespace has at most {GROUP_CHARS_MAX} characters,"
            f" not {len(name)}"
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
    if problem := _empty_part(name):
        raise IllegalGroup(problem)


def check_own_topic(name: str) -> None:
    """Raise IllegalTopic unless users may create a topic with this name."""
    check_topic(name)
    if name.startswith((RETRY_TOPIC_PREFIX, DEAD_LETTER_TOPIC_PREFIX)):
        raise IllegalTopic("only the broker creates retry and dead-letter topics")
