"""Facts that need an operator, the most urgent first. Their codes are names of alerts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from shlex import quote
from types import MappingProxyType
from typing import Final

from tidemill.admin.activity.numbers import GroupState
from tidemill.admin.cluster.brokers import MEMBER_UNREACHABLE_MS
from tidemill.admin.json.broker_groups import BrokerGroupView
from tidemill.admin.json.consumer_groups import ConsumerGroupRowView
from tidemill.admin.json.overview import ProcessCertificateView, Severity
from tidemill.admin.json.storage import BrokerGroupStorageView
from tidemill.common.times import span

RUNBOOKS: Final = "docs/runbooks"
CERTIFICATE_DAYS_MIN: Final = 14  # the default threshold of the alert CertificateExpires
DAY_MS: Final = 86_400_000
LETTER_GROUPS_MAX: Final = 5  # consumer groups with open dead letters in the list


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterProblem:
    """A problem of one object."""

    code: str  # name of the alert, which has a runbook
    object: str
    text: str
    command: str  # shows more
    since_ms: int | None = None  # time for which it lasts
    severity: Severity = Severity.WARNING

    @property
    def runbook(self) -> str:
        """The path of the runbook in the documentation."""
        return f"{RUNBOOKS}/{self.code}.md"


def find_problems(
    members: Sequence[BrokerGroupView],
    disks: Iterable[BrokerGroupStorageView],
    groups: Iterable[ConsumerGroupRowView],
    silent: Mapping[str, str] = MappingProxyType({}),
    *,
    controller_loss: str | None = None,
    certificates: Iterable[ProcessCertificateView] = (),
    now_ms: int = 0,
    letters: Sequence[tuple[str, int]] = (),
) -> list[ClusterProblem]:
    """Return the problems of broker groups, controllers, disks, certificates and consumer groups.

    Open dead letters are notices, of the five consumer groups with the most. `letters` has names
    and counts of groups, the highest first.
    `silent` are broker groups without an answer to the last sample, with the reasons.
    `controller_loss` is the reason why no controller answers.
    """
    known = {member.name for member in members}
    found = [
        *(_down(name, reason) for name, reason in silent.items() if name not in known),
        *(problem for member in members for problem in _of_member(member)),
        *([] if controller_loss is None else [_without_controllers(controller_loss)]),
        *(problem for disk in disks for problem in _of_disk(disk)),
        *_of_certificates(certificates, now_ms),
        *(problem for group in groups for problem in _of_group(group)),
        *(_with_dead_letters(*each) for each in letters[:LETTER_GROUPS_MAX]),
    ]
    order = list(Severity)
    return sorted(found, key=lambda each: order.index(each.severity))


def _status(name: str) -> str:
    return f"tidemill broker-group show {quote(name)}"


def _down(name: str, reason: str) -> ClusterProblem:
    return ClusterProblem(
        code="BrokerDown",
        object=name,
        text=f"unreachable: {reason}",
        command=_status(name),
        severity=Severity.CRITICAL,
    )


def _without_controllers(reason: str) -> ClusterProblem:
    return ClusterProblem(
        code="ControllerNoLeader",
        object="controllers",
        text=f"{reason}; no failed master is replaced",
        command="tidemill doctor",
    )


def _of_member(member: BrokerGroupView) -> Iterator[ClusterProblem]:
    if not member.reachable:
        yield _down(member.name, member.reason or "no answer")
    elif member.unreachable_ms is not None and member.unreachable_ms >= MEMBER_UNREACHABLE_MS:
        yield ClusterProblem(
            code="MemberUnreachable",
            object=member.name,
            text=f"has not answered the home for {span(member.unreachable_ms)}: new topics and"
            " consumer groups do not reach it",
            command=_status(member.name),
            since_ms=member.unreachable_ms,
        )
    behind = [replica.name for replica in member.replicas if not replica.in_sync]
    if behind:
        yield ClusterProblem(
            code="InSyncSetShrunk",
            object=member.name,
            text=f"not in sync: {', '.join(behind)}",
            command="tidemill replica list",
        )


def _of_disk(disk: BrokerGroupStorageView) -> Iterator[ClusterProblem]:
    if disk.is_full:
        yield ClusterProblem(
            code="DiskFull",
            object=disk.broker,
            text="the disk is full: sends fail",
            command="tidemill storage show",
            severity=Severity.CRITICAL,
        )


def _of_certificates(
    certificates: Iterable[ProcessCertificateView], now_ms: int
) -> Iterator[ClusterProblem]:
    """Yield one problem for each process: its certificate that expires first."""
    first: dict[str, tuple[int, str]] = {}  # the end and the use, by process
    for each in certificates:
        if each.expires_at_ms is not None and each.use is not None:
            found = (each.expires_at_ms, each.use)
            first[each.process] = min(found, first.get(each.process, found))
    for process, (expires_at_ms, use) in first.items():
        left_ms = expires_at_ms - now_ms
        if left_ms >= CERTIFICATE_DAYS_MIN * DAY_MS:
            continue
        state = f"expires in {span(left_ms)}" if left_ms > 0 else "has expired"
        yield ClusterProblem(
            code="CertificateExpires",
            object=process,
            text=f"the certificate {use!r} {state}",
            command=f"tidemill process show {quote(process)}",
            severity=Severity.CRITICAL if left_ms <= 0 else Severity.WARNING,
        )


def _with_dead_letters(group: str, count: int) -> ClusterProblem:
    return ClusterProblem(
        code="DlqGrowing",
        object=group,
        text=f"{count:,} open dead {'letter' if count == 1 else 'letters'}: replay or discard them",
        command=f"tidemill dead-letter list --group {quote(group)} --state open",
        severity=Severity.NOTICE,
    )


def _of_group(group: ConsumerGroupRowView) -> Iterator[ClusterProblem]:
    if group.lag and group.consumers == 0 and group.state is not GroupState.PAUSED:
        yield ClusterProblem(
            code="LagGrowing",
            object=group.name,
            text=f"{group.lag:,} messages and no consumer",
            command=f"tidemill group show {quote(group.name)}",
        )
