"""Decisions about rights: one action of a user on one resource, from one address.

For one action on one resource, the entries of a user and of its roles are ranked together:

    Topic:orders           a literal name of this type
    Topic:ord*             a prefix; a longer one first
    Topic:*                every name of this type
    *                      everything

The first rank with an entry for the action and the address decides; in it, DENY wins. If no entry
matches, the action is refused. Source: RocketMQ's ACL 2.0, where the default policies of a user are
examined after its own; here they are a role.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import chain
from typing import NamedTuple, TypeAlias, final

from tidemill.security.acl import (
    RESOURCE_CHARS_MAX,
    AccessEntry,
    Action,
    AddressRange,
    Resource,
    ResourceType,
    SourceAddress,
    Subject,
    parse_range,
)

AddressFinder: TypeAlias = Callable[[], SourceAddress | None]


class Verdict(NamedTuple):
    """A decision, with the entry that made it; None if no entry matches."""

    is_allowed: bool
    entry: AccessEntry | None = None
    subject: str = ""


class _Rule(NamedTuple):
    """An entry without its resource, so that many entries share one rule."""

    actions: frozenset[Action]
    sources: tuple[AddressRange, ...]
    is_allowed: bool


@final
class _Rank:
    """The rules of one pattern of resources. Users whose rules are equal share it."""

    __slots__ = ("_rules", "decided")

    def __init__(self, rules: tuple[_Rule, ...]) -> None:
        self._rules = rules
        # By action: the decision for all addresses; None if there is none, or it differs.
        self.decided = tuple(
            [
                None
                if any(rule.sources and action in rule.actions for rule in rules)
                else self._decide(action, lambda: None)
                for action in Action
            ]
        )

    def decide(self, action: Action, find_address: AddressFinder) -> bool | None:
        """Decide about one action; None if no rule matches."""
        decided = self.decided[action]
        return self._decide(action, find_address) if decided is None else decided

    def _decide(self, action: Action, find_address: AddressFinder) -> bool | None:
        allowing = None
        for actions, sources, is_allowed in self._rules:
            if action not in actions or not _is_from(sources, find_address):
                continue
            if not is_allowed:
                return False
            allowing = True
        return allowing

    def may_deny(self, action: Action) -> bool:
        """Whether a rule denies one action, at least from some addresses."""
        return any(not rule.is_allowed and action in rule.actions for rule in self._rules)


def _is_from(sources: Sequence[AddressRange], find_address: AddressFinder) -> bool:
    """Whether a call comes from one of the source ranges; none means everywhere."""
    if not sources:
        return True
    address = find_address()
    return address is not None and any(range_.has(address) for range_ in sources)


# Beyond these bounds, equal rules and ranks are several objects. A rank takes about 300 bytes.
@lru_cache(maxsize=4_096)
def _rule_of(actions: frozenset[Action], sources: tuple[str, ...], is_allowed: bool) -> _Rule:
    return _Rule(actions, tuple(map(parse_range, sources)), is_allowed)


@lru_cache(maxsize=4_096)
def _rank_of(*rules: _Rule) -> _Rank:
    return _Rank(rules)


# The ranks of one name, by the type of its resource.
_Row: TypeAlias = tuple[_Rank | None, ...]


@lru_cache(maxsize=4_096)
def _row_of(*ranks: _Rank | None) -> _Row:
    return ranks


@final
class Rights:
    """The entries of one user and its roles, indexed for decisions.

    With 20 names they take 2 KB: the names, and references to shared ranks.
    """

    __slots__ = ("_literals", "_prefixes")

    def __init__(self, subjects: Sequence[Subject]) -> None:
        literals: dict[str, list[list[_Rule]]] = {}
        prefixes: list[dict[tuple[int, str], list[_Rule]]] = [{} for _ in ResourceType]
        for entry in [entry for subject in subjects for entry in subject.entries]:
            rule = _rule_of(entry.actions, entry.sources, entry.is_allowed)
            for type_ in ResourceType if entry.type is None else (entry.type,):
                if entry.is_prefix:
                    key = _place_of(entry), entry.name
                    prefixes[type_].setdefault(key, []).append(rule)
                else:
                    literals.setdefault(entry.name, [[] for _ in ResourceType])[type_].append(rule)
        # By type. Its numbers are indices: to hash them would take longer.
        self._literals: dict[str, _Row] = {
            name: _row_of(*[_rank_of(*rules) if rules else None for rules in row])
            for name, row in literals.items()
        }
        # Longest first. An empty prefix matches every name.
        self._prefixes = tuple(
            [
                tuple([(key[1], _rank_of(*found[key])) for key in sorted(found, reverse=True)])
                for found in prefixes
            ]
        )

    def decide(self, action: Action, resource: Resource, find_address: AddressFinder) -> bool:
        """Decide about one action on one resource.

        `find_address` is called if an entry has source ranges. Without an address, only entries
        without them match.
        """
        type_, name = resource
        row = self._literals.get(name)
        if row is not None and (rank := row[type_]) is not None:
            is_allowed = rank.decided[action]
            if is_allowed is None:
                is_allowed = rank.decide(action, find_address)
            if is_allowed is not None:
                return is_allowed
        for prefix, rank in self._prefixes[type_]:
            if name.startswith(prefix):
                is_allowed = rank.decide(action, find_address)
                if is_allowed is not None:
                    return is_allowed
        return False

    def allows_all(self, action: Action, type_: ResourceType, find_address: AddressFinder) -> bool:
        """Whether one action is allowed on each resource of a type, also on future ones."""
        prefixes = self._prefixes[type_]
        narrow = chain(
            [rank for row in self._literals.values() if (rank := row[type_]) is not None],
            [rank for prefix, rank in prefixes if prefix],
        )
        if any(rank.may_deny(action) for rank in narrow):
            return False
        wide = (rank.decide(action, find_address) for prefix, rank in prefixes if not prefix)
        return next((is_allowed for is_allowed in wide if is_allowed is not None), False)


def _place_of(entry: AccessEntry) -> int:
    """Return the place of an entry among those that match a resource; the highest decides."""
    if entry.type is None:
        return -1
    return len(entry.name) if entry.is_prefix else RESOURCE_CHARS_MAX + 1


def find_verdict(
    subjects: Sequence[Subject], action: Action, resource: Resource, address: SourceAddress | None
) -> Verdict:
    """Decide as `Rights` does, and find the entry that decides; for answers to people."""
    best, verdict = (-2, False), Verdict(is_allowed=False)
    for subject in subjects:
        for entry in subject.entries:
            place = _place_of(entry), not entry.is_allowed
            if (
                place > best
                and action in entry.actions
                and entry.matches(resource)
                and _is_from(tuple(map(parse_range, entry.sources)), lambda: address)
            ):
                best, verdict = place, Verdict(entry.is_allowed, entry, subject.name)
    return verdict
