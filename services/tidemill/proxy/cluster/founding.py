"""The decision which broker group is the home, by the reports of the seeds. Pure.

The seeds are the brokers of the settings. A single broker has no home and needs none. Several
brokers without a home become a cluster: the proxy asks one of them to be the home (ADR 0025).
Afterwards the report of any of them has the address of the home.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from tidemill.message.broker_names import natural_order

NAMED_MAX = 3  # seeds in one reason; there may be 64, and each report makes a new reason


class BrokerReport(NamedTuple):
    """The name, membership and use of a broker."""

    name: str
    cluster_id: str  # "" without a home
    home_name: str
    home_address: str
    is_in_use: bool  # has topics that are not of the system, consumer groups or users


@dataclass(frozen=True, slots=True)
class NoDecision:
    """A decision that needs the reports of more seeds."""

    reason: str


@dataclass(frozen=True, slots=True)
class SingleBroker:
    """A single seed, which is its own home."""

    address: str


@dataclass(frozen=True, slots=True)
class NewCluster:
    """A new cluster, with the broker at this address as its home."""

    address: str
    members: tuple[tuple[str, str], ...]  # names and addresses


@dataclass(frozen=True, slots=True)
class KnownHome:
    """A cluster, with its home at this address."""

    address: str


@dataclass(frozen=True, slots=True)
class SeedConflict:
    """A conflict between seeds that an operator has to resolve."""

    reason: str


Decision: TypeAlias = NoDecision | SingleBroker | NewCluster | KnownHome | SeedConflict


def decide(seeds: Mapping[str, BrokerReport | None]) -> Decision:
    """Return the decision for seeds by address; None is a seed without a report."""
    reports = {address: report for address, report in seeds.items() if report is not None}
    names = [report.name for report in reports.values()]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        return SeedConflict(f"several brokers of the setting brokers have the name {twice[0]}")
    followers = {address: report for address, report in reports.items() if report.cluster_id}
    if followers:
        return _decide_home(reports, followers)
    if silent := sorted(seeds.keys() - reports.keys()):
        more = f" and {len(silent) - NAMED_MAX} more" if len(silent) > NAMED_MAX else ""
        return NoDecision(f"no configuration of {', '.join(silent[:NAMED_MAX])}{more}")
    if len(reports) == 1:
        return SingleBroker(next(iter(reports)))
    return _decide_founding(reports)


def _decide_home(
    reports: Mapping[str, BrokerReport], followers: Mapping[str, BrokerReport]
) -> Decision:
    clusters = sorted({one.cluster_id for one in followers.values()})
    if len(clusters) > 1:
        return SeedConflict(
            "the brokers of the setting brokers belong to several clusters: "
            + "; ".join(
                f"{one.name} at {address} to that of {one.home_name}"
                for address, one in sorted(followers.items())
            )
        )
    homes = {one.home_name for one in followers.values()}
    for address, one in reports.items():
        if one.name in homes and not one.cluster_id:
            return SeedConflict(
                f"{one.name} at {address} is the home of other brokers, but its store is new:"
                f" start it with its former data or a backup"
            )
        if one.cluster_id and one.name == one.home_name:
            return KnownHome(address)
    return KnownHome(next(iter(followers.values())).home_address)


def _decide_founding(reports: Mapping[str, BrokerReport]) -> Decision:
    members = sorted(
        [(report.name, address) for address, report in reports.items()],
        key=lambda member: natural_order(member[0]),
    )
    in_use = [name for name, address in members if reports[address].is_in_use]
    if len(in_use) > 1:
        return SeedConflict(
            f"{' and '.join(in_use)} have topics of their own, and none of them has a home. Only"
            f" one broker of a new cluster may have topics: delete the topics and consumer groups"
            f" of the others, or serve each broker with its own proxy"
        )
    home = in_use[0] if in_use else members[0][0]
    return NewCluster(dict(members)[home], tuple(members))
