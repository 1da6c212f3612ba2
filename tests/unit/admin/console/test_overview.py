"""The problems of a cluster, and their pages in the console."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tidemill.admin.activity.numbers import GroupState
from tidemill.admin.activity.problems import DAY_MS, ClusterProblem, find_problems
from tidemill.admin.cluster.processes import ProcessAnswered, ProcessAnswers
from tidemill.admin.console.pages.overview import page_of
from tidemill.admin.json.broker_groups import BrokerGroupView, ReplicaView
from tidemill.admin.json.consumer_groups import ConsumerGroupRowView
from tidemill.admin.json.overview import ProcessCertificateView, Severity
from tidemill.admin.json.storage import BrokerGroupStorageView
from tidemill.admin.routes.overview import certificate_rows
from tidemill.stubs.tidemill.process.v1 import process_pb2 as pb

ROOT = Path(__file__).parents[4]
NOW_MS = 1_800_000_000_000


def member(name: str = "broker-0", **changed: Any) -> BrokerGroupView:
    replica = ReplicaView(name=f"{name}-0", role="master", in_sync=True, behind_bytes=0)
    values = {
        "name": name,
        "state": "active",
        "is_home": True,
        "address": "127.0.0.1:1",
        "reachable": True,
        "master": f"{name}-0",
        "replicas": [replica],
    }
    return BrokerGroupView.model_validate({**values, **changed})


def disk(broker: str, *, is_full: bool) -> BrokerGroupStorageView:
    values: dict[str, Any] = {"broker": broker, "is_full": is_full}
    return BrokerGroupStorageView.model_construct(**values)


def group(name: str, **numbers: Any) -> ConsumerGroupRowView:
    return ConsumerGroupRowView.model_construct(name=name, **numbers)


def test_a_good_cluster_has_no_problem() -> None:
    groups = [group("billing", lag=7, consumers=1), group("new"), group("idle", lag=0, consumers=0)]
    assert find_problems([member()], [disk("broker-0", is_full=False)], groups) == []


def test_each_problem_is_named_with_its_code_and_command() -> None:
    lost = member("broker-1", reachable=False, reason="refused", replicas=[])
    late = ReplicaView(name="broker-0-1", role="replica", in_sync=False, behind_bytes=7)
    behind = member(replicas=[late])
    groups = [group("a/b", lag=1_234, consumers=0)]
    found = find_problems([behind, lost], [disk("broker-2", is_full=True)], groups)
    assert [(each.code, each.object, each.text) for each in found] == [
        ("BrokerDown", "broker-1", "unreachable: refused"),
        ("DiskFull", "broker-2", "the disk is full: sends fail"),
        ("InSyncSetShrunk", "broker-0", "not in sync: broker-0-1"),
        ("LagGrowing", "a/b", "1,234 messages and no consumer"),
    ]
    assert all(each.command.startswith("tidemill ") for each in found)


def test_a_member_that_the_home_cannot_reach_has_the_time() -> None:
    assert find_problems([member(unreachable_ms=9_999)], [], []) == []  # a frame is under way
    [found] = find_problems([member(unreachable_ms=20_000)], [], [])
    assert (found.code, found.since_ms) == ("MemberUnreachable", 20_000)


def test_a_broker_group_without_a_sample_is_down_once() -> None:
    found = find_problems([member()], [], [], {"broker-0": "old", "broker-1": "refused"})
    assert [(each.code, each.object) for each in found] == [("BrokerDown", "broker-1")]


def certificate(process: str, use: str, days: float | None) -> ProcessCertificateView:
    expires_at_ms = None if days is None else NOW_MS + int(days * DAY_MS)
    return ProcessCertificateView(process=process, use=use, expires_at_ms=expires_at_ms)


def test_a_process_has_one_problem_for_its_first_certificate_to_expire() -> None:
    certificates = [
        certificate("proxy-0", "clients", 14),
        certificate("proxy-0", "cluster", None),
        certificate("proxy-1", "clients", 13),
        certificate("proxy-1", "cluster", 3.5),
        certificate("admin", "admin", -0.1),
    ]
    found = find_problems([], [], [], certificates=certificates, now_ms=NOW_MS)
    assert [(each.code, each.object, each.text, each.severity) for each in found] == [
        ("CertificateExpires", "admin", "the certificate 'admin' has expired", Severity.CRITICAL),
        (
            "CertificateExpires",
            "proxy-1",
            "the certificate 'cluster' expires in 3 d 12 h",
            Severity.WARNING,
        ),
    ]


def test_certificates_with_an_unknown_end_come_first() -> None:
    def answered(name: str, *certificates: pb.ProcessCertificate) -> ProcessAnswered:
        listed = pb.CertificateList(certificates=certificates)
        description = pb.ProcessDescription(certificates=listed)
        return ProcessAnswered(pb.ProcessAnswer(name=name, description=description), 0)

    older = pb.ProcessAnswer(name="older", description=pb.ProcessDescription())
    plain = answered("plain")
    proxy = answered(
        "proxy-0",
        pb.ProcessCertificate(use="clients", expires_at_ms=9),
        pb.ProcessCertificate(use="cluster", expires_at_ms=7),
        pb.ProcessCertificate(use="other"),
    )
    rows = certificate_rows(ProcessAnswers([ProcessAnswered(older, 0), plain, proxy], ["broker-1"]))
    assert [(each.process, each.use, each.expires_at_ms) for each in rows] == [
        ("broker-1", None, None),
        ("older", None, None),
        ("proxy-0", "other", None),
        ("proxy-0", "cluster", 7),
        ("proxy-0", "clients", 9),
    ]
    assert all(bool(each.unknown) == (each.expires_at_ms is None) for each in rows)


def test_open_dead_letters_are_notices_after_all_problems() -> None:
    letters = [(f"g{n}", count) for n, count in enumerate([9, 8, 7, 6, 5, 4])]
    groups = [group("billing", lag=7, consumers=0)]
    first, *found = find_problems([], [], groups, letters=letters)
    assert (first.code, first.severity) == ("LagGrowing", Severity.WARNING)
    assert [each.object for each in found] == ["g0", "g1", "g2", "g3", "g4"]
    assert {(each.code, each.severity) for each in found} == {("DlqGrowing", Severity.NOTICE)}
    assert found[0].text == "9 open dead letters: replay or discard them"


def test_a_paused_group_without_consumers_is_no_problem() -> None:
    paused = group("billing", lag=7, consumers=0, state=GroupState.PAUSED)
    assert find_problems([], [], [paused]) == []


@pytest.mark.parametrize(
    "code",
    [
        "BrokerDown",
        "MemberUnreachable",
        "InSyncSetShrunk",
        "DiskFull",
        "LagGrowing",
        "DlqGrowing",
        "CertificateExpires",
    ],
)
def test_a_problem_has_a_runbook(code: str) -> None:
    problem = ClusterProblem(code=code, object="x", text="", command="")
    assert (ROOT / problem.runbook).is_file()


def test_a_problem_leads_to_the_page_of_its_object() -> None:
    assert page_of({"code": "LagGrowing", "object": "a/b"}) == "/groups/a%2Fb"
    assert page_of({"code": "DlqGrowing", "object": "b"}) == "/groups/b"
    assert page_of({"code": "DiskFull", "object": "broker-0"}) == "/cluster"
