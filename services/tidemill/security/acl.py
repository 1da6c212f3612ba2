"""Entries: which actions a user or a role may use on which resources, and from which addresses.

An entry allows or denies actions on the resources of a pattern: one name, the names with a prefix,
or all. `rights.py` decides by the entries of a user.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Any, Final, NamedTuple

from tidemill.common.errors import BadRequest
from tidemill.message.resource_names import (
    BROKER_DEAD_LETTER_TOPICS,
    DEAD_LETTER_TOPIC_PREFIX,
    GROUP_CHARS_MAX,
    HALF_DEAD_LETTER_TOPIC,
    RETRY_TOPIC_PREFIX,
    TIMER_DEAD_LETTER_TOPIC,
    TOPIC_CHARS_MAX,
    check_begin,
)

ENTRIES_MAX: Final = 256  # of one user or role
SOURCES_MAX: Final = 16  # source ranges of one entry
RESOURCE_CHARS_MAX: Final = 255
ANYTHING: Final = "*"
ALLOW: Final = "ALLOW"
DENY: Final = "DENY"
ALL_ACTIONS: Final = "All"


class Action(IntEnum):
    """An action of a call on a resource. A listing needs Get or List."""

    PUB = 0
    SUB = 1
    CREATE = 2
    UPDATE = 3
    DELETE = 4
    GET = 5
    LIST = 6

    @property
    def text(self) -> str:
        """Return the name that users write: Pub."""
        return self.name.capitalize()


class ResourceType(IntEnum):
    """The types of resources. `Cluster` resources are areas of the operators' interface."""

    TOPIC = 0
    GROUP = 1
    CLUSTER = 2

    @property
    def text(self) -> str:
        """Return the name that users write: Topic."""
        return self.name.capitalize()


AREAS: Final = (
    "audit",
    "broker-groups",
    "clients",
    "pipeline",
    "processes",
    "quotas",
    "replicas",
    "security",
)

_OF_GROUPS: Final = (RETRY_TOPIC_PREFIX, DEAD_LETTER_TOPIC_PREFIX)
_CHARS_MAX: Final = {ResourceType.TOPIC: TOPIC_CHARS_MAX, ResourceType.GROUP: GROUP_CHARS_MAX}
_ACTIONS: Final = {action.text: action for action in Action}
_TYPES: Final = {type_.text: type_ for type_ in ResourceType}


class Resource(NamedTuple):
    """One topic, consumer group or area."""

    type: ResourceType
    name: str

    def __str__(self) -> str:
        return f"{self.type.text}:{self.name}"


@lru_cache(maxsize=4_096)
def topic_resource(topic: str) -> Resource:
    """Return the resource that decides about a topic.

    A retry or dead-letter topic belongs to its consumer group, whatever patterns match its name.
    """
    if topic.startswith(RETRY_TOPIC_PREFIX):
        group = topic.removeprefix(RETRY_TOPIC_PREFIX).partition("+")[0]
        return Resource(ResourceType.GROUP, group)
    if topic.startswith(DEAD_LETTER_TOPIC_PREFIX) and topic not in BROKER_DEAD_LETTER_TOPICS:
        return Resource(ResourceType.GROUP, topic.removeprefix(DEAD_LETTER_TOPIC_PREFIX))
    return Resource(ResourceType.TOPIC, topic)


@lru_cache(maxsize=4_096)
def group_resource(group: str) -> Resource:
    """Return the resource of a consumer group."""
    return Resource(ResourceType.GROUP, group)


# ---------------------------------------------------------------- addresses


class SourceAddress(NamedTuple):
    """The address of a connection. An IPv4-mapped IPv6 address is an IPv4 address."""

    version: int
    number: int

    def __str__(self) -> str:
        address = ipaddress.IPv4Address if self.version == 4 else ipaddress.IPv6Address
        return str(address(self.number))


class AddressRange(NamedTuple):
    """Addresses from `low` to `high`, both included, of one version of IP."""

    version: int
    low: int
    high: int

    def has(self, address: SourceAddress) -> bool:
        """Whether the range has the address."""
        return self.version == address.version and self.low <= address.number <= self.high


@lru_cache(maxsize=4_096)
def parse_address(text: str) -> SourceAddress | None:
    """Read the address of a peer, without its port; None for other text."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    mapped = getattr(address, "ipv4_mapped", None)
    address = mapped or address
    return SourceAddress(address.version, int(address))


def parse_range(text: str) -> AddressRange:
    """Read an address or a range in CIDR notation. Raises BadRequest."""
    try:
        network = ipaddress.ip_network(text)
    except ValueError as error:
        raise BadRequest(
            f"{text!r} is neither an address nor a range such as 10.1.0.0/16: {error}"
        ) from None
    if isinstance(network, ipaddress.IPv6Network):
        low = network.network_address.ipv4_mapped
        high = network.broadcast_address.ipv4_mapped
        if low is not None and high is not None:
            return AddressRange(4, int(low), int(high))
    return AddressRange(
        network.version, int(network.network_address), int(network.broadcast_address)
    )


# ---------------------------------------------------------------- entries


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessEntry:
    """One rule of a user or a role."""

    type: ResourceType | None  # None: of every type
    name: str  # a literal name, or the text before `*`
    is_prefix: bool
    actions: frozenset[Action]
    sources: tuple[str, ...] = ()  # as given; empty: from everywhere
    is_allowed: bool = True

    @property
    def resource(self) -> str:
        """The pattern as users write it."""
        if self.type is None:
            return ANYTHING
        return f"{self.type.text}:{self.name}{ANYTHING if self.is_prefix else ''}"

    def matches(self, resource: Resource) -> bool:
        """Whether the pattern matches a resource."""
        if self.type is not None and self.type is not resource.type:
            return False
        if self.is_prefix:
            return resource.name.startswith(self.name)
        return resource.name == self.name

    def to_item(self) -> dict[str, Any]:
        """Return the entry as it is stored."""
        item: dict[str, Any] = {
            "resource": self.resource,
            "actions": action_texts(self.actions),
            "decision": ALLOW if self.is_allowed else DENY,
        }
        return {**item, "sources": list(self.sources)} if self.sources else item


def action_texts(actions: frozenset[Action]) -> list[str]:
    """Return the names of actions; `All` stands for all of them."""
    if len(actions) == len(Action):
        return [ALL_ACTIONS]
    return [action.text for action in sorted(actions)]


def parse_actions(texts: Iterable[str]) -> frozenset[Action]:
    """Read the names of actions. Raises BadRequest."""
    return _parse_actions(tuple(texts))


# Many entries have the same actions, and share one set. There are at most 128 sets.
@lru_cache(maxsize=1_024)
def _parse_actions(texts: tuple[str, ...]) -> frozenset[Action]:
    found: set[Action] = set()
    for text in texts:
        name = text.capitalize()
        if name == ALL_ACTIONS:
            return frozenset(Action)
        if name not in _ACTIONS:
            known = ", ".join([ALL_ACTIONS, *_ACTIONS])
            raise BadRequest(f"there is no action {text!r}; the actions are {known}")
        found.add(_ACTIONS[name])
    if not found:
        raise BadRequest("an entry has at least one action")
    return frozenset(found)


def parse_entry(
    resource: str, actions: Iterable[str], *, sources: Sequence[str] = (), is_allowed: bool = True
) -> AccessEntry:
    """Read an entry as users write it. Raises BadRequest."""
    type_, name, is_prefix = _parse_pattern(resource)
    if len(sources) > SOURCES_MAX:
        raise BadRequest(f"an entry has at most {SOURCES_MAX} source ranges, not {len(sources)}")
    for source in sources:
        parse_range(source)
    return AccessEntry(
        type=type_,
        name=name,
        is_prefix=is_prefix,
        actions=parse_actions(actions),
        sources=tuple(sources),
        is_allowed=is_allowed,
    )


def check_names(entries: Iterable[AccessEntry], present: Iterable[AccessEntry] = ()) -> None:
    """Check that new entries can match a topic or a consumer group. Raises BadRequest.

    Entries that are `present` already may be of an earlier release, which accepted any name.
    """
    known = set(present)
    for entry in entries:
        if entry in known or not entry.name or entry.type not in _CHARS_MAX:
            continue
        if problem := check_begin(entry.name, chars_max=_CHARS_MAX[entry.type]):
            raise BadRequest(f"{entry.resource!r} would never decide: {problem}")


def entry_of(item: dict[str, Any]) -> AccessEntry:
    """Read a stored entry."""
    return parse_entry(
        item["resource"],
        item["actions"],
        sources=item.get("sources", ()),
        is_allowed=item["decision"] == ALLOW,
    )


def parse_resource(text: str) -> Resource:
    """Read one resource, such as Topic:orders. Raises BadRequest."""
    type_text, _, topic = text.partition(":")
    if type_text.capitalize() == ResourceType.TOPIC.text and topic.startswith(_OF_GROUPS):
        return topic_resource(topic)
    type_, name, is_prefix = _parse_pattern(text)
    if type_ is None or is_prefix:
        raise BadRequest(f"name one resource, such as Topic:orders, not {text!r}")
    return Resource(type_, name)


def _parse_pattern(text: str) -> tuple[ResourceType | None, str, bool]:
    if text == ANYTHING:
        return None, "", True
    type_text, separator, name = text.partition(":")
    type_ = _TYPES.get(type_text.capitalize())
    if type_ is None or not separator:
        raise BadRequest(
            f"{text!r} is no resource; write Topic:NAME, Group:NAME, Cluster:AREA or *, where the"
            f" name may be * or end with *"
        )
    is_prefix = name.endswith(ANYTHING)
    name = name.removesuffix(ANYTHING)
    if ANYTHING in name or (not name and not is_prefix) or len(name) > RESOURCE_CHARS_MAX:
        raise BadRequest(
            f"the name of {text!r} has 1 to {RESOURCE_CHARS_MAX} characters, and * only at its end"
        )
    if type_ is ResourceType.TOPIC and name.startswith(_OF_GROUPS):
        raise BadRequest(
            f"{text!r} would never decide: a retry or dead-letter topic is the resource of its"
            f" consumer group, so write Group:NAME; {TIMER_DEAD_LETTER_TOPIC} and"
            f" {HALF_DEAD_LETTER_TOPIC} need Topic:*"
        )
    if type_ is ResourceType.CLUSTER and not is_prefix and name not in AREAS:
        raise BadRequest(f"there is no area {name!r}; the areas are {', '.join(AREAS)}")
    return type_, name, is_prefix


class Subject(NamedTuple):
    """A user or a role with its entries."""

    name: str  # User:NAME or Role:NAME
    entries: Sequence[AccessEntry]
