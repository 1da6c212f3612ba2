"""What an autoscaler is to look at: the metadata of a trigger in a ScaledObject, read and checked.

KEDA hands its own keys on with ours, and as `keyFromEnv` what the workload's environment says.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from tidemill.common.errors import BadRequest
from tidemill.message.resource_names import check_group, check_topic

HORIZON_S_DEFAULT: Final = 60  # a pod is scheduled, pulled and started in less
HORIZON_S_MAX: Final = 86_400  # what is due later than in a day is no reason to start anything now
MESSAGES_MAX: Final = 1_000_000_000  # of a target, or a threshold: more is a slip
VALUE_CHARS_MAX: Final = 64  # of a value that is shown again in an error
IN_FLIGHT: Final = ("count", "ignore")
OURS: Final = (
    "group",
    "topic",
    "messagesPerReplica",
    "scheduledHorizonSeconds",
    "activationMessages",
    "inFlight",
)
# KEDA's own, of external triggers.
KEDAS: Final = frozenset({"scalerAddress", "enableTLS", "unsafeSsl", "tlsCertFile"})
_FROM_ENVIRONMENT: Final = "FromEnv"


class DemandQuery(NamedTuple):
    """What of all there is: the same question has the same answer for all who ask it."""

    group: str
    topic: str  # "": all that the group has begun to read
    horizon_s: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trigger:
    """A question, and what its answer means."""

    question: DemandQuery
    messages_per_replica: int
    activation_messages: int  # with more than these there should be a replica
    counts_in_flight: bool


def read_trigger(metadata: Mapping[str, str]) -> Trigger:
    """Read a trigger's metadata. Raises what is wrong with it."""
    given = _ours_of(metadata)
    group, topic = given.get("group", ""), given.get("topic", "")
    question = demand_query(
        group,
        topic,
        horizon_s=_count(given, "scheduledHorizonSeconds", 0, HORIZON_S_MAX, HORIZON_S_DEFAULT),
    )
    in_flight = given.get("inFlight", IN_FLIGHT[0])
    if in_flight not in IN_FLIGHT:
        raise BadRequest(f"inFlight is {' or '.join(IN_FLIGHT)}, not {_shown(in_flight)}")
    return Trigger(
        question=question,
        messages_per_replica=_count(given, "messagesPerReplica", 1, MESSAGES_MAX),
        activation_messages=_count(given, "activationMessages", 0, MESSAGES_MAX, 0),
        counts_in_flight=in_flight == "count",
    )


def demand_query(group: str, topic: str, *, horizon_s: int) -> DemandQuery:
    """Return the question after a group; raise what is wrong with a name."""
    if not group:
        raise BadRequest("a trigger names its consumer group: group")
    check_group(group)
    if topic:
        check_topic(topic)
    return DemandQuery(group, topic, horizon_s)


def _ours_of(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return the keys that are ours. Raises BadRequest for one that is nobody's."""
    given: dict[str, str] = {}
    for key, value in sorted(metadata.items()):
        name = key.removesuffix(_FROM_ENVIRONMENT)
        if name in KEDAS:
            continue
        if name not in OURS:
            near = difflib.get_close_matches(key[:VALUE_CHARS_MAX], OURS, n=1, cutoff=0.4)
            hint = f"; did you mean {near[0]}?" if near else f"; there are {', '.join(OURS)}"
            raise BadRequest(f"a trigger has no {_shown(key)}{hint}")
        if name in given:
            raise BadRequest(f"{name} is given twice: as {name} and {name}{_FROM_ENVIRONMENT}")
        given[name] = value
    return given


def _count(
    given: Mapping[str, str], key: str, least: int, most: int, default: int | None = None
) -> int:
    text = given.get(key)
    if text is None:
        if default is None:
            raise BadRequest(f"a trigger says {key}, a whole number from {least} to {most}")
        return default
    if not (text.isascii() and text.isdecimal() and len(text) <= len(str(most))):
        raise BadRequest(f"{key} is a whole number from {least} to {most}, not {_shown(text)}")
    if not least <= int(text) <= most:
        raise BadRequest(f"{key} is from {least} to {most}, not {text}")
    return int(text)


def _shown(text: str) -> str:
    return repr(text[:VALUE_CHARS_MAX])
