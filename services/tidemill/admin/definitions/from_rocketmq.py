"""Topics and consumer groups from the JSON of RocketMQ's `mqadmin exportMetadata`."""

from __future__ import annotations

from typing import Any, Final

from tidemill.admin.definitions.conversion import (
    Foreign,
    Report,
    check_texts,
    number,
    own_group,
    own_topic,
    part,
    reason_of,
    text,
)
from tidemill.admin.json.definitions import ConversionView, ForeignFile
from tidemill.admin.json.topics import TopicTypeView
from tidemill.common.errors import Conflict, ServiceError
from tidemill.message.resource_names import is_reserved

QUEUES_MAX: Final = 1_024
ATTEMPTS_MAX: Final = 1_000
DELAYS_MAX: Final = 100  # of a retry policy
RETRIES_DEFAULT: Final = 16  # of RocketMQ; -1 means it
TOPICS: Final = "topicConfigTable"
GROUPS: Final = "subscriptionGroupTable"
_SYSTEM_PREFIXES: Final = ("%RETRY%", "%DLQ%", "RMQ_SYS_", "rmq_sys_", "CID_RMQ_SYS_", "%SYS%")
_WRITABLE: Final = 2  # the bit of `perm`


def converted_from_rocketmq(exported: ForeignFile) -> ConversionView:
    """Return our file and the report. Raises Conflict."""
    if TOPICS not in exported and GROUPS not in exported:
        raise Conflict(
            f"the file has neither {TOPICS} nor {GROUPS}; export it with mqadmin exportMetadata"
        )
    check_texts(exported)
    report = Report()
    for name in part(exported, TOPICS):
        _convert_topic(name, part(part(exported, TOPICS), name), report)
    for name in part(exported, GROUPS):
        _convert_group(name, part(part(exported, GROUPS), name), report)
    for field in exported:
        if field not in {TOPICS, GROUPS}:
            report.skipped(field, "only topics and subscription groups are converted")
    return report.view()


def _convert_topic(name: str, config: Foreign, report: Report) -> None:
    source = f"topic {name}"
    if name.startswith(_SYSTEM_PREFIXES):
        report.skipped(source, "a system topic of RocketMQ")
        return
    try:
        own, renamed = own_topic(name)
    except ServiceError as error:
        is_system = is_reserved(name)
        report.skipped(source, "a system topic of RocketMQ" if is_system else reason_of(error))
        return
    if own in report.objects["topics"]:
        report.skipped(source, f"another topic became the topic {own} already")
        return
    reasons = [renamed]
    attributes = part(config, "attributes")
    kind = text(attributes, "message.type") or text(attributes, "+message.type")
    settings: dict[str, Any] = {}
    if kind in TopicTypeView.__members__:
        settings["messageType"] = kind
    elif kind and kind != "UNSPECIFIED":
        reasons.append(
            f"message type {kind} is unknown here; the topic accepts all but special ones"
        )
    queues = number(config, "writeQueueNums")
    if queues == 0:
        reasons.append("it had no queues for producers, and has the default number here")
    elif queues is not None:
        settings["queues"] = min(queues, QUEUES_MAX)
        if queues > QUEUES_MAX:
            reasons.append(f"{queues} queues; a topic has at most {QUEUES_MAX}")
    permission = number(config, "perm")
    if permission is not None and not permission & _WRITABLE:
        reasons.append("it was read-only, and accepts messages here: take Pub from its producers")
    report.objects["topics"][own] = settings
    report.changed(source, f"topic {own}", *reasons)


def _convert_group(name: str, config: Foreign, report: Report) -> None:
    source = f"subscription group {name}"
    if name.startswith(_SYSTEM_PREFIXES):
        report.skipped(source, "a system group of RocketMQ")
        return
    try:
        own, renamed = own_group(name)
    except ServiceError as error:
        is_system = is_reserved(name)
        report.skipped(source, "a system group of RocketMQ" if is_system else reason_of(error))
        return
    if own in report.objects["groups"]:
        report.skipped(source, f"another subscription group became the group {own} already")
        return
    reasons = [renamed]
    retries = number(config, "retryMaxTimes")
    attempts = (RETRIES_DEFAULT if retries is None or retries < 0 else retries) + 1
    if attempts > ATTEMPTS_MAX:
        reasons.append(f"{attempts} attempts; a group has at most {ATTEMPTS_MAX}")
    settings: dict[str, Any] = {
        "deliveryOrder": "FIFO" if config.get("consumeMessageOrderly") else "CONCURRENT",
        "maxAttempts": min(attempts, ATTEMPTS_MAX),
        "startFrom": "latest" if config.get("consumeFromMinEnable") is False else "earliest",
    }
    retry, retry_reasons = _retry_of(part(config, "groupRetryPolicy"))
    reasons += retry_reasons
    if retry is not None:
        settings["retry"] = retry
    if config.get("consumeEnable") is False:
        reasons.append(f"it was disabled: pause it with tidemill group pause {own}")
    report.objects["groups"][own] = settings
    report.changed(source, f"group {own}", *reasons)


def _retry_of(policy: Foreign) -> tuple[dict[str, Any] | None, list[str]]:
    """Return our retry policy, and the changes. None: the default, as that of RocketMQ."""
    exponential = part(policy, "exponentialRetryPolicy")
    if exponential and text(policy, "type") != "CUSTOMIZED":
        return _exponential_of(exponential)
    delays = part(policy, "customizedRetryPolicy").get("next")
    if not isinstance(delays, list) or not delays:
        return None, []
    if not all(type(each) is int and each > 0 for each in delays):
        raise Conflict("the delays of a customizedRetryPolicy are not all whole numbers above 0")
    reasons = []
    if len(delays) > DELAYS_MAX:
        reasons.append(
            f"{len(delays)} retry delays; a group has at most {DELAYS_MAX}, and repeats the last"
        )
    return {"customized": {"nextMs": delays[:DELAYS_MAX]}}, reasons


def _exponential_of(policy: Foreign) -> tuple[dict[str, Any], list[str]]:
    settings, reasons = {}, []
    for field, own, default in (
        ("initial", "initialMs", 5_000),
        ("max", "maxMs", 7_200_000),
        ("multiplier", "multiplier", 2),
    ):
        value = number(policy, field)
        if value == 0:
            reasons.append(f"{field} of its retry policy was 0; it is at least 1 here")
        settings[own] = default if value is None else (value or 1)
    return {"exponential": settings}, reasons
