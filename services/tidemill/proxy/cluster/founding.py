"""Who is the home: decided by what the seeds, the brokers of the settings, have told. Pure.

A broker that is alone has no home and needs none. Several without one are made a cluster: one is
asked to be the home of all (ADR 0025). From then on any one of them says where the home is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from tidemill.message.broker_names import natural_order

NAMED_MAX = 3  # seeds in one reason: each that tells makes another, and there may be 64


class BrokerReport(NamedTuple):
    """What a broker has told of itself."""

    name: str
    cluster_id: str  # "": it has no home
    home_name: str
    home_address: str
    has_topics: bool  # of users


@dataclass(frozen=True, slots=True)
class NoDecision:
    """Nothing can be decided before more has been told."""

    reason: str


@dataclass(frozen=True, slots=True)
class SingleBroker:
    """The one seed is its own home."""

    address: str


@dataclass(frozen=True, slots=True)
class NewCluster:
    """The broker at this address is to be asked to become the home of all, by their names."""

    address: str
    members: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class KnownHome:
    """The home is at this address."""

    address: str


@dataclass(frozen=True, slots=True)
class SeedConflict:
    """Somebody has to act before anything can be served."""

    reason: str


Decision: TypeAlias = NoDecision | SingleBroker | NewCluster | KnownHome | SeedConflict


def decide(seeds: Mapping[str, BrokerReport | None]) -> Decision:
    """Return what to do about brokers, by address: what each has told, None for nothing yet."""
    told = {address: one for address, one in seeds.items() if one is not None}
    names = [one.name for one in told.values()]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        return SeedConflict(f"several brokers of the setting brokers call themselves {twice[0]}")
    followers = {address: one for address, one in told.items() if one.cluster_id}
    if followers:
        return _decide_home(told, followers)
    if silent := sorted(seeds.keys() - told.keys()):
        more = f" and {len(silent) - NAMED_MAX} more" if len(silent) > NAMED_MAX else ""
        return NoDecision(f"nothing was heard of {', '.join(silent[:NAMED_MAX])}{more}")
    if len(told) == 1:
        return SingleBroker(next(iter(told)))
    return _decide_founding(told)


def _decide_home(
    told: Mapping[str, BrokerReport], followers: Mapping[str, BrokerReport]
) -> Decision:
    clusters = sorted({one.cluster_id for one in followers.values()})
    if len(clusters) > 1:
        return SeedConflict(
            "the brokers of the setting brokers belong to several clusters: "
            + "; ".join(
                f"{one.name} at {address} to {one.home_name}'s"
                for address, one in sorted(followers.items())
            )
        )
    homes = {one.home_name for one in followers.values()}
    for address, one in told.items():
        if one.name in homes and not one.cluster_id:
            return SeedConflict(
                f"{one.name} at {address} is the home of others, and its store does not know of"
                f" it: start it with the data that it had, or with a backup of that"
            )
        if one.cluster_id and one.name == one.home_name:
            return KnownHome(address)
    return KnownHome(next(iter(followers.values())).home_address)


def _decide_founding(told: Mapping[str, BrokerReport]) -> Decision:
    members = sorted(
        [(one.name, address) for address, one in told.items()],
        key=lambda member: natural_order(member[0]),
    )
    in_use = [name for name, address in members if told[address].has_topics]
    if len(in_use) > 1:
        return SeedConflict(
            f"{' and '.join(in_use)} have topics of their own, and none of them has a home. One"
            f" can become the home of the others if those are empty: delete their topics and"
            f" consumer groups, or serve each with a proxy of its own"
        )
    home = in_use[0] if in_use else members[0][0]
    return NewCluster(dict(members)[home], tuple(members))
