"""The metadata of a trigger in a ScaledObject, parsed and checked.

KEDA adds its own keys. `keyFromEnv` has a value from the environment of the workload.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from tidemill.common.errors import BadRequest
from tidemill.message.resource_names import check_group, check_topic

HORIZON_S_DEFAULT: Final = 60  # a pod starts within this time
HORIZON_S_MAX: Final = 86_400  # messages due in more than a day need no consumer now
MESSAGES_MAX: Final = 1_000_000_000  # of a target or threshold; more is a typing error
VALUE_CHARS_MAX: Final = 64  # of a value in an error
IN_FLIGHT: Final = ("count", "ignore")
OURS: Final = (
    "group",
    "topic",
    "messagesPerReplica",
    "scheduledHorizonSeconds",
    "activationMessages",
    "inFlight",
)
# Keys that KEDA itself uses for external triggers.
KEDAS: Final = frozenset({"scalerAddress", "enableTLS", "unsafeSsl", "tlsCertFile"})
_FROM_ENVIRONMENT: Final = "FromEnv"


class DemandQuery(NamedTuple):
    """A query of demand. Equal queries share one answer."""

    group: str
    topic: str  # "": all topics that the group reads
    horizon_s: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trigger:
    """A query, and the rules that turn its answer into a number of replicas."""

    query: DemandQuery
    messages_per_replica: int
    activation_messages: int  # a larger demand needs at least one replica
    counts_in_flight: bool


def read_trigger(metadata: Mapping[str, str]) -> Trigger:
    """Parse the metadata of a trigger. Raises BadRequest and errors of invalid names."""
    given = _own_keys_of(metadata)
    group, topic = given.get("group", ""), given.get("topic", "")
    query = demand_query(
        group,
        topic,
        horizon_s=_count(given, "scheduledHorizonSeconds", 0, HORIZON_S_MAX, HORIZON_S_DEFAULT),
    )
    in_flight = given.get("inFlight", IN_FLIGHT[0])
    if in_flight not in IN_FLIGHT:
        raise BadRequest(f"inFlight must be {' or '.join(IN_FLIGHT)}, not {_quote(in_flight)}")
    return Trigger(
        query=query,
        messages_per_replica=_count(given, "messagesPerReplica", 1, MESSAGES_MAX),
        activation_messages=_count(given, "activationMessages", 0, MESSAGES_MAX, 0),
        counts_in_flight=in_flight == "count",
    )


def demand_query(group: str, topic: str, *, horizon_s: int) -> DemandQuery:
    """Return the query of a group. Raises errors of invalid names."""
    if not group:
        raise BadRequest("the trigger has no group; set group to the name of the consumer group")
    check_group(group)
    if topic:
        check_topic(topic)
    return DemandQuery(group, topic, horizon_s)


def _own_keys_of(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return the metadata without the keys of KEDA. Raises BadRequest for an unknown key."""
    given: dict[str, str] = {}
    for key, value in sorted(metadata.items()):
        name = key.removesuffix(_FROM_ENVIRONMENT)
        if name in KEDAS:
            continue
        if name not in OURS:
            near = difflib.get_close_matches(key[:VALUE_CHARS_MAX], OURS, n=1, cutoff=0.4)
            hint = f"; did you mean {near[0]}?" if near else f"; known are {', '.join(OURS)}"
            raise BadRequest(f"the trigger has an unknown key {_quote(key)}{hint}")
        if name in given:
            raise BadRequest(
                f"{name} is given twice, as {name} and as {name}{_FROM_ENVIRONMENT}; remove one"
            )
        given[name] = value
    return given


def _count(
    given: Mapping[str, str], key: str, least: int, most: int, default: int | None = None
) -> int:
    text = given.get(key)
    if text is None:
        if default is None:
            raise BadRequest(
                f"the trigger has no {key}; set it to a whole number from {least} to {most}"
            )
        return default
    is_number = text.isascii() and text.isdecimal() and len(text) <= len(str(most))
    if not (is_number and least <= int(text) <= most):
        raise BadRequest(f"{key} must be a whole number from {least} to {most}, not {_quote(text)}")
    return int(text)


def _quote(text: str) -> str:
    return repr(text[:VALUE_CHARS_MAX])
