"""The overview: the state of the cluster in one answer, also while broker groups hang.

`get_overview` is long because each part has a task of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, TypeVar

from fastapi import APIRouter

from tidemill.admin.activity.problems import find_problems
from tidemill.admin.activity.rows import dead_letters_of, open_letters_of
from tidemill.admin.activity.sampler import Reading
from tidemill.admin.cluster.controllers import ControllerClients
from tidemill.admin.cluster.processes import ProcessAnswers
from tidemill.admin.http.paging import FIRST_PAGE
from tidemill.admin.http.request_access import READS
from tidemill.admin.json.activity import DeadLetterNumbersView
from tidemill.admin.json.audit import AuditKindView, AuditPageView
from tidemill.admin.json.broker_groups import BrokerGroupView
from tidemill.admin.json.consumer_groups import ConsumerGroupPageView
from tidemill.admin.json.overview import (
    ClusterProblemView,
    ClusterStatus,
    OverviewView,
    ProcessCertificateView,
    Severity,
)
from tidemill.admin.json.storage import StorageView
from tidemill.admin.json.timers import TimerPageView
from tidemill.admin.json.topics import TopicPageView
from tidemill.admin.routes import Access, Activity, Cluster, OwnAccessLog
from tidemill.admin.routes.audit import list_audit
from tidemill.admin.routes.broker_groups import BROKER_GROUPS, find_broker_groups
from tidemill.admin.routes.consumer_groups import list_groups
from tidemill.admin.routes.processes import All as AllProcesses
from tidemill.admin.routes.processes import certificates_of
from tidemill.admin.routes.replicas import All
from tidemill.admin.routes.storage import get_storage
from tidemill.admin.routes.timers import list_timers
from tidemill.admin.routes.topics import list_topics
from tidemill.common.clock import SystemClock
from tidemill.common.errors import ServiceError
from tidemill.security.acl import Action, Resource, ResourceType

router = APIRouter(tags=["overview"])

ANSWER_S: Final = 2.0  # for all parts together
# A hung controller or broker is a problem, not a part without an answer. The list of brokers may
# take half a second before.
CONTROLLERS_S: Final = 1.2
CONTROLLERS: Final = "controllers"  # in `unreachable`
ROWS: Final = 5
CHANGES: Final = 10
KIND: Final = AuditKindView.CHANGE
AUDIT: Final = Resource(ResourceType.CLUSTER, "audit")
PROCESSES: Final = Resource(ResourceType.CLUSTER, "processes")
NO_ANSWER: Final = "no answer"
OLDER: Final = "an older version, which does not report certificates"

T = TypeVar("T")


class _Parts:
    """The parts of an overview, and the names of those without an answer in time."""

    def __init__(self) -> None:
        self.unanswered: list[str] = []

    async def read(
        self, name: str, ask: Callable[[], Awaitable[T]], *, is_allowed: bool = True
    ) -> T | None:
        """Return a part; None without the right to see it, or without an answer in time."""
        if not is_allowed:
            return None
        try:
            async with asyncio.timeout(ANSWER_S):
                return await ask()
        except (TimeoutError, ServiceError):
            self.unanswered.append(name)
            return None


@router.get("/overview", response_model_exclude_none=True)
async def get_overview(
    cluster: Cluster,
    controllers: All,
    processes: AllProcesses,
    access: Access,
    activity: Activity,
    own: OwnAccessLog,
) -> OverviewView:
    """Show problems, broker groups, certificates, the groups furthest behind, the largest topics.

    The answer comes within about two seconds, also if broker groups or controllers hang.
    `unanswered` names the parts that are missing then. Without controllers, the replicas of the
    broker groups are unknown.
    """
    parts = _Parts()
    sees_members = access.allows(Action.GET, BROKER_GROUPS)
    sees_changes = access.allows(Action.GET, AUDIT)
    read = parts.read
    # One task for each part, so that a slow one delays no other.
    async with asyncio.TaskGroup() as tasks:
        of_members = tasks.create_task(
            read(
                "broker groups",
                lambda: find_broker_groups(cluster, controllers, timeout_s=CONTROLLERS_S),
                is_allowed=sees_members,
            )
        )
        of_controllers = tasks.create_task(
            read("controllers", lambda: find_loss(controllers), is_allowed=sees_members)
        )
        of_disks = tasks.create_task(
            read(
                "disks",
                lambda: get_storage(cluster, access, activity, FIRST_PAGE, page_size=1),
                is_allowed=sees_members,
            )
        )
        of_groups = tasks.create_task(
            read(
                "groups",
                lambda: list_groups(cluster, access, activity, FIRST_PAGE, ROWS, sort="-lag"),
            )
        )
        of_topics = tasks.create_task(
            read(
                "topics",
                lambda: list_topics(cluster, access, activity, FIRST_PAGE, ROWS, sort="-bytes"),
            )
        )
        of_timers = tasks.create_task(
            read("timers", lambda: list_timers(cluster, access, FIRST_PAGE, page_size=1))
        )
        of_processes = tasks.create_task(
            read(
                "certificates",
                processes.describe_recently,
                is_allowed=access.allows(Action.GET, PROCESSES),
            )
        )
        of_changes = tasks.create_task(
            read(
                "changes",
                lambda: list_audit(cluster, own, FIRST_PAGE, KIND, page_size=CHANGES),
                is_allowed=sees_changes,
            )
        )
    reading = activity.read()

    def may_read(group: str) -> bool:
        return access.allows_group(READS, group)

    return _view(
        of_members.result(),
        of_controllers.result() or None,
        of_disks.result(),
        of_groups.result(),
        of_topics.result(),
        of_timers.result(),
        of_processes.result(),
        of_changes.result(),
        sorted(parts.unanswered),
        _silent(reading) if sees_members else {},
        dead_letters_of(reading, may_read),
        open_letters_of(reading, may_read),
    )


async def find_loss(controllers: ControllerClients) -> str:
    """Return why no controller answers; empty if one does, or if the cluster has none."""
    return await controllers.find_loss(CONTROLLERS_S)


def certificate_rows(processes: ProcessAnswers) -> list[ProcessCertificateView]:
    """Return all certificates: those with an unknown end, then the first to expire first."""
    rows = [
        ProcessCertificateView(process=each, unknown=NO_ANSWER) for each in processes.unreachable
    ]
    for answered in processes.answers:
        name, certificates = answered.value.name, certificates_of(answered.value.description)
        if certificates is None:
            rows.append(ProcessCertificateView(process=name, unknown=OLDER))
            continue
        rows += [
            ProcessCertificateView(
                process=name, use=each.use, expires_at_ms=each.expires_at_ms, unknown=each.unknown
            )
            for each in certificates
        ]
    rows.sort(key=lambda each: (each.expires_at_ms or 0, each.process, each.use or ""))
    return rows


def _silent(reading: Reading) -> Mapping[str, str]:
    """Return the broker groups without an answer to the last sample, with the reasons."""
    return {} if reading.numbers is None else reading.numbers.unreachable


def _view(
    found_members: tuple[list[BrokerGroupView], bool] | None,
    controller_loss: str | None,
    storage: StorageView | None,
    groups: ConsumerGroupPageView | None,
    topics: TopicPageView | None,
    timers: TimerPageView | None,
    processes: ProcessAnswers | None,
    changes: AuditPageView | None,
    unanswered: list[str],
    silent: Mapping[str, str],
    dead_letters: DeadLetterNumbersView | None,
    letters: Sequence[tuple[str, int]],
) -> OverviewView:
    members, has_controllers = (None, True) if found_members is None else found_members
    certificates = None if processes is None else certificate_rows(processes)
    problems = find_problems(
        members or [],
        [] if storage is None else storage.broker_groups,
        [] if groups is None else groups.groups,
        silent,
        controller_loss=controller_loss,
        certificates=certificates or (),
        now_ms=SystemClock().wall_ms(),
        letters=letters,
    )
    shown = (storage, groups, topics, timers, changes)
    lacking = {name for each in shown if each is not None for name in each.unreachable or ()}
    if not has_controllers:
        lacking.add(CONTROLLERS)
    is_down = members is not None and not any(each.reachable for each in members)
    is_degraded = unanswered or any(each.severity is not Severity.NOTICE for each in problems)
    status = ClusterStatus.DEGRADED if is_degraded else ClusterStatus.OK
    return OverviewView(
        status=ClusterStatus.DOWN if is_down else status,
        problems=[
            ClusterProblemView(
                code=each.code,
                severity=each.severity,
                object=each.object,
                text=each.text,
                since_ms=each.since_ms,
                runbook=each.runbook,
                command=each.command,
            )
            for each in problems
        ],
        broker_groups=members,
        disks=None if storage is None else storage.broker_groups,
        groups=None if groups is None else groups.groups,
        topics=None if topics is None else topics.topics,
        next_due_at_ms=timers.timers[0].due_at_ms if timers is not None and timers.timers else None,
        dead_letters=dead_letters,
        certificates=certificates,
        changes=None if changes is None else changes.records,
        unanswered=unanswered or None,
        sampled_at_ms=None if groups is None else groups.sampled_at_ms,
        unreachable=sorted(lacking) or None,
    )
