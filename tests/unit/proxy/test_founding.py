"""The decision which broker group is the home, by the reports of the seeds."""

from __future__ import annotations

from tidemill.proxy.cluster.founding import (
    BrokerReport,
    KnownHome,
    NewCluster,
    NoDecision,
    SeedConflict,
    SingleBroker,
    decide,
)


def alone(name: str, *, is_in_use: bool = False) -> BrokerReport:
    return BrokerReport(name, "", "", "", is_in_use)


def member(name: str, *, home: str = "b-0", cluster: str = "c") -> BrokerReport:
    return BrokerReport(name, cluster, home, f"{home}:1", is_in_use=True)


def test_one_broker_is_its_own_home() -> None:
    assert decide({"h:1": alone("b-0", is_in_use=True)}) == SingleBroker("h:1")


def test_new_brokers_become_a_cluster_when_all_have_reported() -> None:
    seeds = {"h2:1": alone("b-10"), "h1:1": alone("b-2"), "h3:1": None}
    assert decide(seeds) == NoDecision("no configuration of h3:1")
    seeds["h3:1"] = alone("b-11")
    assert decide(seeds) == NewCluster(
        "h1:1", (("b-2", "h1:1"), ("b-10", "h2:1"), ("b-11", "h3:1"))
    )


def test_the_broker_with_topics_becomes_the_home() -> None:
    seeds = {"h0:1": alone("b-0"), "h1:1": alone("b-1", is_in_use=True)}
    assert decide(seeds) == NewCluster("h1:1", (("b-0", "h0:1"), ("b-1", "h1:1")))


def test_two_brokers_with_topics_are_a_conflict() -> None:
    decision = decide({"h0:1": alone("b-0", is_in_use=True), "h1:1": alone("b-1", is_in_use=True)})
    assert isinstance(decision, SeedConflict)
    assert "b-0 and b-1 have topics of their own" in decision.reason
    assert "delete the topics" in decision.reason


def test_the_report_of_one_member_leads_to_the_home() -> None:
    assert decide({"h0:1": None, "h1:1": member("b-1"), "h2:1": None}) == KnownHome("b-0:1")


def test_the_address_of_the_home_as_a_seed_comes_before_the_reports_of_members() -> None:
    seeds = {"h1:1": member("b-1"), "h0:2": member("b-0")}
    assert decide(seeds) == KnownHome("h0:2")


def test_members_of_two_clusters_are_a_conflict() -> None:
    decision = decide({"h0:1": member("b-0"), "h1:1": member("x-1", home="x-0", cluster="d")})
    assert isinstance(decision, SeedConflict)
    assert "several clusters" in decision.reason


def test_a_home_with_a_new_store_is_a_conflict() -> None:
    decision = decide({"h0:1": alone("b-0"), "h1:1": member("b-1")})
    assert isinstance(decision, SeedConflict)
    assert "start it with its former data" in decision.reason


def test_two_brokers_of_one_name_are_a_conflict() -> None:
    decision = decide({"h0:1": alone("b-0"), "h1:1": alone("b-0")})
    assert isinstance(decision, SeedConflict)
    assert "have the name b-0" in decision.reason


def test_a_reason_names_at_most_three_seeds() -> None:
    seeds: dict[str, BrokerReport | None] = {f"h{n}:1": None for n in range(9)}
    assert decide(seeds) == NoDecision("no configuration of h0:1, h1:1, h2:1 and 6 more")
